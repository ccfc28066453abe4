// AVX-512: one 64-byte store per line, 16 floats a vector.
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define KVD_TARGET __attribute__((target("avx512f,avx512bw,prefer-vector-width=512")))
#define KVD_LANES 16
#define KVD_BLOCK 4
#define KVD_FROM_HALVES(halves) Floats(_mm512_maskz_cvtph_ps(0xffff, __m256i(halves)))

namespace kvd::rows {
namespace {

KVD_TARGET inline void copy_line(uint8_t* dst, const uint8_t* src) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
}

KVD_TARGET inline void stream_fence() { _mm_sfence(); }

using Sum = __m512i;

KVD_TARGET inline Sum read_line(Sum sum, const uint8_t* src) {
  return _mm512_xor_si512(sum, _mm512_loadu_si512(src));
}

KVD_TARGET inline uint64_t fold(Sum sum) {
  uint64_t words[8];
  _mm512_storeu_si512(words, sum);
  return words[0] ^ words[3] ^ words[7];
}

#include "math.inc"
#include "move.inc"

constexpr RowKernels kKernels{"avx512", gather, read,  widen_bfloat16, widen_fp8,
                              dots,     weigh,  mix,   score};

}  // namespace

const RowKernels* rows_avx512() noexcept { return &kKernels; }

}  // namespace kvd::rows
#else
namespace kvd::rows {
const RowKernels* rows_avx512() noexcept { return nullptr; }
}  // namespace kvd::rows
#endif
