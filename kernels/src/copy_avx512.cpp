// AVX-512: one 64-byte store per line.
#include <algorithm>
#include <array>
#include <cstring>

#include "copy.hpp"
#include "crc32c_math.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define KVD_TARGET __attribute__((target("avx512f,pclmul")))

namespace kvd {
namespace {

KVD_TARGET inline void copy_lines(uint8_t* dst, const uint8_t* src) {
  const __m512i a = _mm512_loadu_si512(src);
  const __m512i b = _mm512_loadu_si512(src + 64);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), a);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 64), b);
}

KVD_TARGET inline void stream_fence() { _mm_sfence(); }

#include "copy_streams.inc"
#include "copy_sums_x86.inc"

}  // namespace

CopyKernel copy_avx512() noexcept { return {copy_all, copy_sum_all}; }

}  // namespace kvd
#else
namespace kvd {
CopyKernel copy_avx512() noexcept { return {nullptr, nullptr}; }
}  // namespace kvd
#endif
