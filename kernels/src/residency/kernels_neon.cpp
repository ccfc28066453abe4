// NEON: the scan, which reads most; the rest is bound by memory and stays scalar.
#include "kernels_scalar.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>

namespace kvd::residency {
namespace {

constexpr int64_t kLanes = 16;

struct Floats {
  const float* data;
  float32x4_t load(int64_t at) const { return vld1q_f32(data + at); }
  float get(int64_t at) const { return data[at]; }
};

struct Halves {
  const uint16_t* data;
  float32x4_t load(int64_t at) const {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(data + at), 16));
  }
  float get(int64_t at) const { return from_bf16(data[at]); }
};

template <typename Row>
int64_t scan_row(const Row row, int64_t n, float threshold, int64_t most,
                 const Candidates& found) {
  const float32x4_t bound = vdupq_n_f32(threshold);
  int64_t count = 0;
  for (int64_t at = 0; at < n; at += kLanes) {
    if (at + kLanes <= n) {
      const uint32x4_t low = vorrq_u32(vcgeq_f32(row.load(at), bound),
                                       vcgeq_f32(row.load(at + 4), bound));
      const uint32x4_t high = vorrq_u32(vcgeq_f32(row.load(at + 8), bound),
                                        vcgeq_f32(row.load(at + 12), bound));
      if (vmaxvq_u32(vorrq_u32(low, high)) == 0) continue;
    }
    for (int64_t where = at; where < std::min(at + kLanes, n); ++where) {
      if (!(row.get(where) >= threshold)) continue;
      if (count == most) return -1;
      found.keys[count] = key_of(row.get(where));
      found.positions[count++] = static_cast<int32_t>(where);
    }
  }
  return count;
}

int64_t scan(const Scores& scores, int64_t n, float threshold, int64_t most,
             const Candidates& found) {
  if (scores.is_bf16) {
    return scan_row(Halves{static_cast<const uint16_t*>(scores.data)}, n, threshold, most, found);
  }
  return scan_row(Floats{static_cast<const float*>(scores.data)}, n, threshold, most, found);
}

constexpr Kernel kNeon{"neon",      scan,          partition_scalar, emit_scalar,   inspect_scalar,
                       list_scalar, lookup_scalar, sweep_scalar,     forget_scalar, put_scalar};

}  // namespace

const Kernel* neon_kernel() noexcept { return &kNeon; }

}  // namespace kvd::residency
#else
namespace kvd::residency {
const Kernel* neon_kernel() noexcept { return nullptr; }
}  // namespace kvd::residency
#endif
