// AVX2: the scan, eight scores at a time; what it keeps is rare, and taken out lane by lane. The
// rest waits for memory, with vectors or without.
#include "kernels_scalar.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define KVD_TARGET __attribute__((target("avx2,bmi,popcnt")))

namespace kvd::residency {
namespace {

constexpr int64_t kLanes = 8;

struct Floats {
  const float* data;
  KVD_TARGET __m256 load(int64_t at) const { return _mm256_loadu_ps(data + at); }
  float get(int64_t at) const { return data[at]; }
};

struct Halves {
  const uint16_t* data;
  KVD_TARGET __m256 load(int64_t at) const {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  float get(int64_t at) const { return from_bf16(data[at]); }
};

template <typename Row>
KVD_TARGET uint32_t lanes_at_least(const Row row, int64_t at, __m256 bound) {
  return static_cast<uint32_t>(
      _mm256_movemask_ps(_mm256_cmp_ps(row.load(at), bound, _CMP_GE_OQ)));
}

template <typename Row>
KVD_TARGET int64_t scan_row(const Row row, int64_t n, float threshold, int64_t most,
                            const Candidates& found) {
  constexpr int64_t kStep = 4 * kLanes;
  const __m256 bound = _mm256_set1_ps(threshold);
  int64_t count = 0;
  int64_t at = 0;
  for (; at + kStep <= n; at += kStep) {
    uint32_t kept = 0;
#pragma GCC unroll 4
    for (int64_t part = 0; part < 4; ++part) {
      kept |= lanes_at_least(row, at + part * kLanes, bound) << (part * kLanes);
    }
    if (kept == 0) continue;
    if (count + kStep > most + kKeysSpare) return -1;
    for (; kept != 0; kept &= kept - 1) {
      const int64_t where = at + __builtin_ctz(kept);
      found.keys[count] = key_of(row.get(where));
      found.positions[count++] = static_cast<int32_t>(where);
    }
  }
  for (; at < n && count <= most; ++at) {
    if (!(row.get(at) >= threshold)) continue;
    found.keys[count] = key_of(row.get(at));
    found.positions[count++] = static_cast<int32_t>(at);
  }
  return count <= most ? count : -1;
}

int64_t scan(const Scores& scores, int64_t n, float threshold, int64_t most,
             const Candidates& found) {
  if (scores.is_bf16) {
    return scan_row(Halves{static_cast<const uint16_t*>(scores.data)}, n, threshold, most, found);
  }
  return scan_row(Floats{static_cast<const float*>(scores.data)}, n, threshold, most, found);
}

KVD_TARGET int32_t list(PositionSet& set, int32_t end, int32_t* positions) {
  return set.list(end, positions);
}

constexpr Kernel kAvx2{"avx2", scan,          partition_scalar, emit_scalar,   inspect_scalar,
                       list,   lookup_scalar, sweep_scalar,     forget_scalar, put_scalar};

}  // namespace

const Kernel* avx2_kernel() noexcept { return &kAvx2; }

}  // namespace kvd::residency
#else
namespace kvd::residency {
const Kernel* avx2_kernel() noexcept { return nullptr; }
}  // namespace kvd::residency
#endif
