// What the kernels for AVX-512 share.
#pragma once

#include "kernels_scalar.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define KVD_TARGET __attribute__((target("avx512f,avx512dq,avx512bw,bmi,popcnt")))

namespace kvd::residency {

// What is compressed goes through a register: some CPUs need a hundred cycles to compress to
// memory.
constexpr int64_t kLanes = 16;

KVD_TARGET inline __mmask16 first_lanes(int64_t count) {
  return count >= kLanes ? __mmask16{0xFFFF} : static_cast<__mmask16>((1U << count) - 1);
}

KVD_TARGET inline __m512i lanes_from(int32_t first) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_add_epi32(lanes, _mm512_set1_epi32(first));
}

inline int64_t count_of(__mmask16 mask) { return __builtin_popcount(mask); }

// The operations on books; see Kernel.
int32_t lookup_avx512(const Table& table, const int32_t* positions, int32_t n, int32_t* winners,
                      int32_t* missed);
int32_t sweep_avx512(const Table& table, int32_t wanted, int32_t* slots_out);
void forget_avx512(const Table& table, const int32_t* slots, int32_t n);
void put_avx512(Table& table, const int32_t* slots, const int32_t* positions, int32_t n);

}  // namespace kvd::residency
#endif
