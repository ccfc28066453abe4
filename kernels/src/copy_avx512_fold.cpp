// AVX-512 with carry-less multiplication of whole registers: checksums by folding.
//
// The sixteen CRC steps of a pair of lines are as much work as the copy of short spans can hide.
// Here a stream keeps 128 bytes that stand for all bytes so far: moved over the next 128 and added
// to them, they stand for these too. That takes two multiplications for each line, which is in a
// register for the copy already. (Gopal and others, Fast CRC Computation for Generic Polynomials
// Using PCLMULQDQ Instruction, 2009.)
#include <algorithm>
#include <array>
#include <cstring>

#include "copy.hpp"
#include "crc32c_math.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define KVD_TARGET __attribute__((target("avx512f,pclmul,vpclmulqdq")))
#define KVD_RUNNING

namespace kvd {
namespace {

KVD_TARGET inline void stream_line(uint8_t* dst, __m512i line) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), line);
}

KVD_TARGET inline void copy_lines(uint8_t* dst, const uint8_t* src) {
  const __m512i a = _mm512_loadu_si512(src);
  const __m512i b = _mm512_loadu_si512(src + 64);
  stream_line(dst, a);
  stream_line(dst + 64, b);
}

KVD_TARGET inline void stream_fence() { _mm_sfence(); }

// Reflected, the 16 bytes of a lane are low * x^64 + high. The product of 64 reflected bits and a
// power of 32 comes out times x^33 in a lane; so these two move a lane over n bytes.
constexpr int64_t of_low(size_t bytes) { return crc_power(8 * bytes + 31); }
constexpr int64_t of_high(size_t bytes) { return crc_power(8 * bytes - 33); }

// What to multiply the lanes by, each moved over as many bytes; 0 for a lane that is left out.
template <size_t first, size_t second, size_t third, size_t fourth>
KVD_TARGET inline __m512i powers() {
  constexpr auto low = [](size_t bytes) { return bytes == 0 ? 0 : of_low(bytes); };
  constexpr auto high = [](size_t bytes) { return bytes == 0 ? 0 : of_high(bytes); };
  static constexpr int64_t words[8] = {low(first), high(first), low(second), high(second),
                                       low(third), high(third), low(fourth), high(fourth)};
  return _mm512_loadu_si512(words);
}

// The lanes moved on, and `more` added.
KVD_TARGET inline __m512i folded(__m512i lanes, __m512i by, __m512i more) {
  constexpr int kSumOfThree = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lanes, by, 0x00),
                                   _mm512_clmulepi64_epi128(lanes, by, 0x11), more, kSumOfThree);
}

// Two lines that stand for all bytes of a stream so far.
struct Running {
  __m512i first;
  __m512i second;
};
constexpr bool kBeginsAnywhere = false;

KVD_TARGET inline Running begun(uint64_t /* moved over the stream by whoever asks */) {
  return {_mm512_setzero_si512(), _mm512_setzero_si512()};
}

template <bool copies>
KVD_TARGET inline void step_pair(Running& sum, uint8_t* dst, const uint8_t* src) {
  const __m512i by = powers<128, 128, 128, 128>();
  const __m512i a = _mm512_loadu_si512(src);
  const __m512i b = _mm512_loadu_si512(src + 64);
  sum.first = folded(sum.first, by, a);
  sum.second = folded(sum.second, by, b);
  if constexpr (copies) {
    stream_line(dst, a);
    stream_line(dst + 64, b);
  }
}

KVD_TARGET inline uint64_t ended(const Running& sum) {
  const __m512i line = folded(sum.first, powers<64, 64, 64, 64>(), sum.second);
  const __m512i lanes = folded(line, powers<48, 32, 16, 0>(), _mm512_setzero_si512());
  const __m256i half =
      _mm256_xor_si256(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1));
  const __m128i lane =
      _mm_xor_si128(_mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)),
                    _mm512_extracti32x4_epi32(line, 3));
  const uint64_t crc = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(lane)));
  return _mm_crc32_u64(crc, static_cast<uint64_t>(_mm_extract_epi64(lane, 1)));
}

#include "copy_streams.inc"
#include "copy_sums_x86.inc"

}  // namespace

CopyKernel copy_avx512_fold() noexcept { return {copy_all, copy_sum_all}; }

}  // namespace kvd
#else
namespace kvd {
CopyKernel copy_avx512_fold() noexcept { return {nullptr, nullptr}; }
}  // namespace kvd
#endif
