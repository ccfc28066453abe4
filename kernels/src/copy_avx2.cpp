// AVX2: two 32-byte stores per line; they meet in one write-combining buffer.
#include <algorithm>
#include <array>
#include <cstring>

#include "copy.hpp"
#include "crc32c_math.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define KVD_TARGET __attribute__((target("avx2,pclmul")))

namespace kvd {
namespace {

KVD_TARGET inline __m256i load(const uint8_t* src) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
}

KVD_TARGET inline void stream(uint8_t* dst, __m256i value) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), value);
}

KVD_TARGET inline void copy_lines(uint8_t* dst, const uint8_t* src) {
  const __m256i a = load(src);
  const __m256i b = load(src + 32);
  const __m256i c = load(src + 64);
  const __m256i d = load(src + 96);
  stream(dst, a);
  stream(dst + 32, b);
  stream(dst + 64, c);
  stream(dst + 96, d);
}

KVD_TARGET inline void stream_fence() { _mm_sfence(); }

#include "copy_streams.inc"
#include "copy_sums_x86.inc"

}  // namespace

CopyKernel copy_avx2() noexcept { return {copy_all, copy_sum_all}; }

}  // namespace kvd
#else
namespace kvd {
CopyKernel copy_avx2() noexcept { return {nullptr, nullptr}; }
}  // namespace kvd
#endif
