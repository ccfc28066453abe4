// AVX-512: one 64-byte store per line.
#include <algorithm>
#include <cstring>

#include "copy.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define KVD_TARGET __attribute__((target("avx512f")))

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

}  // namespace

CopyFn copy_avx512() noexcept { return copy_all; }

}  // namespace kvd
#else
namespace kvd {
CopyFn copy_avx512() noexcept { return nullptr; }
}  // namespace kvd
#endif
