// NEON: pairs of 16-byte non-temporal stores (STNP), a hint that the lines will not be read soon.
#include <algorithm>
#include <cstring>

#include "copy.hpp"
#include "crc32c.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>

#define KVD_TARGET

namespace kvd {
namespace {

inline void store_pair(uint8_t* dst, uint8x16_t a, uint8x16_t b) {
  asm volatile("stnp %q1, %q2, [%0]" : : "r"(dst), "w"(a), "w"(b) : "memory");
}

inline void copy_lines(uint8_t* dst, const uint8_t* src) {
  uint8x16_t piece[8];
#pragma GCC unroll 8
  for (size_t i = 0; i < 8; ++i) piece[i] = vld1q_u8(src + i * 16);
#pragma GCC unroll 4
  for (size_t i = 0; i < 8; i += 2) store_pair(dst + i * 16, piece[i], piece[i + 1]);
}

// STNP may be reordered with other stores, which a store barrier (inner shareable) ends.
inline void stream_fence() { asm volatile("dmb ishst" : : : "memory"); }

#include "copy_streams.inc"
#include "copy_sums.inc"

}  // namespace

CopyKernel copy_neon() noexcept { return {copy_all, copy_sum_all}; }

}  // namespace kvd
#else
namespace kvd {
CopyKernel copy_neon() noexcept { return {nullptr, nullptr}; }
}  // namespace kvd
#endif
