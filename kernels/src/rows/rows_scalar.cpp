// What every CPU runs: memcpy for each row, arithmetic in vectors that the compiler takes apart.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels.hpp"

#define KVD_TARGET
#define KVD_LANES 4
#define KVD_BLOCK 2

namespace kvd::rows {
namespace {

#include "math.inc"

void gather(const PartView& part, std::span<const Place> places, size_t count) {
  for (const Place& place : places.first(count)) {
    std::memcpy(part.in_hot(place.slot), part.in_region(place), part.row_bytes);
  }
  std::atomic_thread_fence(std::memory_order_release);
}

uint64_t read(const PartView& part, std::span<const Place> places, bool) {
  uint64_t sum = 0;
  for (const Place& place : places) {
    const uint8_t* row = part.in_region(place);
    for (size_t at = 0; at < part.row_bytes; ++at) sum += row[at];
  }
  return sum;
}

constexpr RowKernels kKernels{"scalar", gather, read, widen_bfloat16, widen_fp8,
                              dots,     weigh,  mix,  score};

}  // namespace

const RowKernels* rows_scalar() noexcept { return &kKernels; }

}  // namespace kvd::rows
