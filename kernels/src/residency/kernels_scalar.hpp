// Inner loops without vectors: what the other kernels fall back to, and end with.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.hpp"
#include "position_set.hpp"
#include "tables.hpp"

namespace kvd::residency {

// How far ahead the line of a position is asked for, in positions: more than a CPU has lines in
// flight at once.
constexpr int32_t kAhead = 96;

inline int64_t scan_scalar(const Scores& scores, int64_t n, float threshold, int64_t most,
                           const Candidates& found) {
  int64_t count = 0;
  for (int64_t at = 0; at < n; ++at) {
    const float score = scores.at(at);
    if (!(score >= threshold)) continue;
    if (count == most) return -1;
    found.keys[count] = key_of(score);
    found.positions[count++] = static_cast<int32_t>(at);
  }
  return count;
}

inline Partition partition_scalar(const uint32_t* keys, int64_t n, uint32_t pivot,
                                  uint32_t* greater, uint32_t* less) {
  Partition sizes{0, 0};
  for (int64_t at = 0; at < n; ++at) {
    greater[sizes.greater] = keys[at];
    less[sizes.less] = keys[at];
    sizes.greater += keys[at] > pivot;
    sizes.less += keys[at] < pivot;
  }
  return sizes;
}

inline void emit_scalar(const Candidates& found, int64_t n, uint32_t kth, int64_t k,
                        int32_t* positions) {
  int64_t ties = k - std::count_if(found.keys, found.keys + n,
                                   [kth](uint32_t key) { return key > kth; });
  for (int64_t at = 0, count = 0; at < n && count < k; ++at) {
    const bool is_tie = found.keys[at] == kth && ties > 0;
    ties -= is_tie;
    positions[count] = found.positions[at];
    count += is_tie || found.keys[at] > kth;
  }
}

inline Inspection inspect_scalar(const int32_t* positions, int64_t n) {
  uint32_t end = 0;
  bool is_ascending = n == 0 || positions[0] >= 0;
  for (int64_t at = 0; at < n; ++at) {
    end = std::max(end, static_cast<uint32_t>(positions[at]) + 1);  // padding is 0
    is_ascending &= at == 0 || positions[at - 1] < positions[at];
  }
  return {end, is_ascending};
}

// Reads memory from its start to its end, which a CPU fetches well ahead of the reads: unlike lines
// in any order, and unlike what it is asked to prefetch.
inline void fetch(const void* from, size_t bytes) {
  constexpr size_t kLine = 64;
  const auto* const memory = static_cast<const volatile uint8_t*>(from);
  for (size_t at = 0; at < bytes; at += kLine) static_cast<void>(memory[at]);
}

// Fetches what n look-ups share, where they touch most of it.
inline void fetch_shared(const Table& table, int32_t n) {
  if (!table.has_index() || table.index.num_lines() > n) return;
  fetch(table.index.words, static_cast<size_t>(table.index.num_words()) * sizeof(uint32_t));
  fetch(table.stamps, static_cast<size_t>(table.slots) * sizeof(Stamp));
}

inline int32_t list_scalar(PositionSet& set, int32_t end, int32_t* positions) {
  return set.list(end, positions);
}

inline int32_t lookup_scalar(const Table& table, const int32_t* positions, int32_t n,
                             int32_t* winners, int32_t* missed) {
  int32_t num_missed = 0;
  fetch_shared(table, n);
  for (int32_t at = 0; at < n; ++at) {
    if (at + kAhead < n) table.ask_for(std::max(positions[at + kAhead], 0));
    const int32_t position = positions[at];
    const bool is_given = position != kPadding;
    const int32_t slot = is_given ? table.find(position) : kAbsent;
    if (slot != kAbsent) table.mark_hit(slot);
    winners[at] = slot != kAbsent ? slot : is_given ? ~position : kNoWinner;
    missed[num_missed] = at;
    num_missed += is_given && slot == kAbsent;
  }
  return num_missed;
}

}  // namespace kvd::residency
