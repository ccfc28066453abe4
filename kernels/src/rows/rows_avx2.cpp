// AVX2: two 32-byte stores per line, 8 floats a vector; 16 registers hold blocks of two.
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define KVD_TARGET __attribute__((target("avx2,fma,f16c")))
#define KVD_LANES 8
#define KVD_BLOCK 2
#define KVD_FROM_HALVES(halves) Floats(_mm256_cvtph_ps(__m128i(halves)))

namespace kvd::rows {
namespace {

KVD_TARGET inline __m256i half_line(const uint8_t* src) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
}

KVD_TARGET inline void copy_line(uint8_t* dst, const uint8_t* src) {
  const __m256i low = half_line(src);
  const __m256i high = half_line(src + 32);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), low);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 32), high);
}

KVD_TARGET inline void stream_fence() { _mm_sfence(); }

using Sum = __m256i;

KVD_TARGET inline Sum read_line(Sum sum, const uint8_t* src) {
  return _mm256_xor_si256(sum, _mm256_xor_si256(half_line(src), half_line(src + 32)));
}

KVD_TARGET inline uint64_t fold(Sum sum) {
  return static_cast<uint64_t>(_mm256_extract_epi64(sum, 0) ^ _mm256_extract_epi64(sum, 3));
}

#include "math.inc"
#include "move.inc"

constexpr RowKernels kKernels{"avx2", gather, read, widen_bfloat16, widen_fp8,
                              dots,   weigh,  mix,  score};

}  // namespace

const RowKernels* rows_avx2() noexcept { return &kKernels; }

}  // namespace kvd::rows
#else
namespace kvd::rows {
const RowKernels* rows_avx2() noexcept { return nullptr; }
}  // namespace kvd::rows
#endif
