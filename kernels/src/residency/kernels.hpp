// The inner loops of residency operations, once for each instruction set.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "limits.hpp"

namespace kvd::residency {

class PositionSet;
struct Table;

constexpr int64_t kKeysSpare = 64;  // elements that a kernel may write behind its results

// Scores order like their keys, which are integers: NaN counts as the lowest, -0 as 0.
constexpr uint32_t kLowestKey = 0x007FFFFF;  // of -inf and NaN
constexpr uint32_t key_of(float score) noexcept {
  const auto bits = std::bit_cast<uint32_t>(score);
  if (score != score) return kLowestKey;
  if (bits == 0x80000000U) return bits;
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000U);
}
constexpr float score_of(uint32_t key) noexcept {
  return std::bit_cast<float>((key & 0x80000000U) != 0 ? key ^ 0x80000000U : ~key);
}
constexpr float from_bf16(uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// A row of scores: float32, or bfloat16, each of which is a float32.
struct Scores {
  const void* data;
  bool is_bf16;

  float at(int64_t index) const noexcept {
    return is_bf16 ? from_bf16(static_cast<const uint16_t*>(data)[index])
                   : static_cast<const float*>(data)[index];
  }
};

// What is at least a threshold, in the order of positions: keys and positions.
struct Candidates {
  uint32_t* keys;
  int32_t* positions;
};

struct Inspection {
  uint32_t end;       // no position is at or beyond it; more than INT32_MAX for one below -1
  bool is_ascending;  // each is greater than the one before: no repeats, no padding
};

struct Partition {
  int64_t greater;
  int64_t less;
};

struct Kernel {
  const char* name;
  // Writes candidates among n scores and returns how many there are; -1 for more than `most`.
  int64_t (*scan)(const Scores& scores, int64_t n, float threshold, int64_t most,
                  const Candidates& found);
  // Writes what is greater than the pivot and what is less, and returns how many they are.
  Partition (*partition)(const uint32_t* keys, int64_t n, uint32_t pivot, uint32_t* greater,
                         uint32_t* less);
  // Writes the positions of the k best of n candidates; `kth` is the key of the last of them. Of
  // equal ones the first are better.
  void (*emit)(const Candidates& found, int64_t n, uint32_t kth, int64_t k, int32_t* positions);
  Inspection (*inspect)(const int32_t* positions, int64_t n);
  // PositionSet::list.
  int32_t (*list)(PositionSet& set, int32_t end, int32_t* positions);
  // For each position its winner code; hits are marked as used. Returns the number of misses,
  // whose indices are in `missed`.
  int32_t (*lookup)(const Table& table, const int32_t* positions, int32_t n, int32_t* winners,
                    int32_t* missed);
  // Moves the clock's hand over up to `wanted` victims, whose slots this step uses from here on.
  // All slots hold rows. Writes the victims and returns how many there are.
  int32_t (*sweep)(const Table& table, int32_t wanted, int32_t* slots_out);
  // Empties slots that hold rows.
  void (*forget)(const Table& table, const int32_t* slots, int32_t n);
  // Puts rows that have no slot into empty ones.
  void (*put)(Table& table, const int32_t* slots, const int32_t* positions, int32_t n);
};

// Null where the architecture has no such kernel.
const Kernel* avx512_kernel() noexcept;
const Kernel* avx2_kernel() noexcept;
const Kernel* neon_kernel() noexcept;
// The one that runs everywhere, and writes nothing behind its results.
const Kernel& scalar_kernel() noexcept;

// Names of the kernels this CPU can run, best first; "scalar" is always the last.
std::vector<std::string> kernel_names();
// "auto" is the best one. Throws std::invalid_argument for a name this CPU cannot run.
const Kernel& find_kernel(std::string_view name);

}  // namespace kvd::residency
