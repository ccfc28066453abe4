// Inner loops without vectors: what the other kernels fall back to, and end with.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels.hpp"
#include "position_set.hpp"
#include "tables.hpp"

namespace kvd::residency {

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

// Reads a byte that is not needed yet. A CPU has more reads in flight than it takes prefetches, and
// fetches what follows on lines that it reads in a row.
inline void touch(const void* memory) {
  static_cast<void>(*static_cast<const volatile uint8_t*>(memory));
}

inline void touch_all(const void* from, int64_t bytes) {
  constexpr int64_t kLine = 64;
  for (int64_t at = 0; at < bytes; at += kLine) touch(static_cast<const uint8_t*>(from) + at);
}

// Fetches what n look-ups read, and the stamps that they mark: all lines of an array where they
// need a good part of them, else those in question.
inline void fetch_shared(const Table& table, const int32_t* positions, int32_t n) {
  const int64_t enough = int64_t{320} * n;  // bytes in a row, which come sooner than n lines
  if (table.slots <= enough) touch_all(table.stamps, table.slots);
  const int64_t index_bytes = table.has_index() ? table.index.num_words() * 4 : INT64_MAX;
  if (index_bytes <= enough) return touch_all(table.index.words, index_bytes);
  for (int32_t at = 0; at < n; ++at) touch(table.word_of(std::max(positions[at], 0)));
}

inline int32_t list_scalar(PositionSet& set, int32_t end, int32_t* positions) {
  return set.list(end, positions);
}

inline int32_t lookup_scalar(const Table& table, const int32_t* positions, int32_t n,
                             int32_t* winners, int32_t* missed) {
  int32_t num_missed = 0;
  fetch_shared(table, positions, n);
  for (int32_t at = 0; at < n; ++at) {
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

// The clock's hand moves over eight stamps at a time, the first one in the lowest byte.
constexpr int32_t kSwept = 8;
constexpr uint64_t kEach = 0x0101010101010101;
constexpr uint64_t kSigns = 0x80 * kEach;  // of each byte the highest bit
static_assert(sizeof(Stamp) == 1 && std::endian::native == std::endian::little);

inline void copy_stamps(void* to, const void* from, int32_t many) noexcept {
  if (many == kSwept) {
    std::memcpy(to, from, kSwept);
  } else {
    std::memcpy(to, from, static_cast<size_t>(many));
  }
}

// Moves the hand over stamps, up to the last of `wanted` victims. Those get the stamp of the step,
// others lose their chance. Returns the victims, as the highest bit of each one's byte.
inline uint64_t sweep_eight(uint64_t& stamped, Stamp step, int32_t wanted) noexcept {
  const uint64_t others = (stamped & ~(kEach * kChance)) ^ kEach * step;
  const uint64_t unused = (((others & ~kSigns) + ~kSigns) | others) & kSigns;
  const uint64_t chances = stamped << 7 & kSigns;
  uint64_t found = unused & ~chances;
  uint64_t saved = unused & chances;
  if (std::popcount(found) >= wanted) {
    uint64_t rest = found;
    for (int32_t nth = 0; nth < wanted; ++nth) rest &= rest - 1;
    const uint64_t passed = (rest & -rest) - 1;  // before the first one that is not wanted
    found &= passed;
    saved &= (std::bit_floor(found) << 1) - 1;
  }
  const uint64_t taken = (found >> 7) * 0xFF;
  stamped = (stamped & ~(saved >> 7) & ~taken) | (kEach * step & taken);
  return found;
}

// After one round no chance is left, so two find all there is.
inline int32_t sweep_scalar(const Table& table, int32_t wanted, int32_t* slots_out) {
  const Stamp step = table.head->step;
  int32_t count = 0;
  int32_t slot = table.head->hand;
  for (int32_t left = 2 * table.slots; left > 0 && count < wanted;) {
    const int32_t many = std::min(kSwept, table.slots - slot);
    uint64_t stamped = kEach * step;  // what lies behind the last slot counts as used
    copy_stamps(&stamped, table.stamps + slot, many);
    uint64_t found = sweep_eight(stamped, step, wanted - count);
    copy_stamps(table.stamps + slot, &stamped, many);
    for (; found != 0; found &= found - 1) slots_out[count++] = slot + __builtin_ctzll(found) / 8;
    left -= many;
    slot = slot + many == table.slots ? 0 : slot + many;
  }
  if (count > 0) table.head->hand = (slots_out[count - 1] + 1) % table.slots;
  return count;
}

inline void forget_scalar(const Table& table, const int32_t* slots, int32_t n) {
  if (!table.has_index()) {  // whose lines the look-up has read
    for (int32_t at = 0; at < n; ++at) touch(table.word_of(table.tokens[slots[at]]));
  }
  for (int32_t at = 0; at < n; ++at) {
    table.forget(table.tokens[slots[at]]);
    table.tokens[slots[at]] = kAbsent;
  }
}

inline void put_scalar(Table& table, const int32_t* slots, const int32_t* positions, int32_t n) {
  for (int32_t at = 0; at < n; ++at) table.put(slots[at], positions[at]);
}

}  // namespace kvd::residency
