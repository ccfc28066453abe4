// NEON: pairs of 16-byte non-temporal stores (STNP), 4 floats a vector.
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>

#define KVD_TARGET
#define KVD_LANES 4
#define KVD_BLOCK 4
#define KVD_FROM_HALVES(halves) Floats(vcvt_f32_f16(vreinterpret_f16_u16(uint16x4_t(halves))))

namespace kvd::rows {
namespace {

inline void store_pair(uint8_t* dst, uint8x16_t a, uint8x16_t b) {
  asm volatile("stnp %q1, %q2, [%0]" : : "r"(dst), "w"(a), "w"(b) : "memory");
}

inline void copy_line(uint8_t* dst, const uint8_t* src) {
  const uint8x16_t a = vld1q_u8(src);
  const uint8x16_t b = vld1q_u8(src + 16);
  const uint8x16_t c = vld1q_u8(src + 32);
  const uint8x16_t d = vld1q_u8(src + 48);
  store_pair(dst, a, b);
  store_pair(dst + 32, c, d);
}

// STNP may be reordered with other stores, which a store barrier (inner shareable) ends.
inline void stream_fence() { asm volatile("dmb ishst" : : : "memory"); }

using Sum = uint8x16_t;

inline Sum read_line(Sum sum, const uint8_t* src) {
  const uint8x16_t low = veorq_u8(vld1q_u8(src), vld1q_u8(src + 16));
  const uint8x16_t high = veorq_u8(vld1q_u8(src + 32), vld1q_u8(src + 48));
  return veorq_u8(sum, veorq_u8(low, high));
}

inline uint64_t fold(Sum sum) { return vgetq_lane_u64(vreinterpretq_u64_u8(sum), 0); }

#include "math.inc"
#include "move.inc"

constexpr RowKernels kKernels{"neon", gather, read, widen_bfloat16, widen_fp8,
                              dots,   weigh,  mix,  score};

}  // namespace

const RowKernels* rows_neon() noexcept { return &kKernels; }

}  // namespace kvd::rows
#else
namespace kvd::rows {
const RowKernels* rows_neon() noexcept { return nullptr; }
}  // namespace kvd::rows
#endif
