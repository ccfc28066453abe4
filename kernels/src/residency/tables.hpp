// The books of hot buffers: for each table which positions of a request have a slot, and which.
//
// A table says the same thing both ways:
//
//     cache_slots[position] -> slot and generation, in one word; 0 for none
//     tokens[slot]          -> position
//
// A position is resident exactly when its word has the table's generation. Whoever evicts a row
// clears its word; to go to another request, the table takes the next generation, and all words are
// void at once. So a look-up touches one line, hit or miss, whatever the number of slots. Zeroed
// memory is an empty table.
//
// A step looks up thousands of positions, and waits for as many lines where the words of a long
// context are far apart. So a table with few slots for its positions has a SlotIndex instead, of so
// few lines that all of them, fetched in a row, are sooner there than those in question would be.
// That is cleared for another request.
//
// A slot that this step uses is stamped with the step's number, and with a chance if it was hit.
// The clock's hand passes the slots with this step's stamp, takes the chance of another that has
// one, and stops at one that has none: the victim. What the step uses is stamped first, so it
// evicts none of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "limits.hpp"
#include "memory.hpp"
#include "slot_index.hpp"

namespace kvd::residency {

struct Kernel;

// What cache_slots says of a position: slot above, generation below, from 1 on. After the last
// generation all words are cleared, once every 16,383 requests.
using Hint = uint32_t;
constexpr int32_t kGenerationBits = 14;
constexpr uint32_t kGenerationMax = (uint32_t{1} << kGenerationBits) - 1;
static_assert(kSlotsMax <= int64_t{1} << (32 - kGenerationBits));

constexpr Hint hint_of(int32_t slot, uint32_t generation) noexcept {
  return static_cast<uint32_t>(slot) << kGenerationBits | generation;
}
constexpr int32_t slot_in(Hint hint) noexcept {
  return static_cast<int32_t>(hint >> kGenerationBits);
}
constexpr uint32_t generation_in(Hint hint) noexcept { return hint & kGenerationMax; }

// What a slot is stamped with: step above, and in the lowest bit whether it has a chance. After the
// last step all of them keep that bit alone, once every 127 steps.
using Stamp = uint8_t;
constexpr Stamp kChance = 1;
constexpr Stamp kStampNext = 2;  // from a step to the next
constexpr Stamp kStampMax = UINT8_MAX - kChance;

// Rows since the object was made; see engine_shim.hot_residency.HotStatistics.
struct Counts {
  int64_t selected;
  int64_t merged;
  int64_t hits;
  int64_t misses;
  int64_t scratch;
  int64_t admitted;
  int64_t evicted;
  int64_t invalidated;
};
constexpr int64_t kNumCounts = sizeof(Counts) / sizeof(int64_t);

struct alignas(64) Header {
  uint32_t generation;  // of the request that has the table
  int32_t hand;         // slot at which the next victim is looked for
  int32_t num_touched;  // slots from here on were never used since the table was emptied
  int32_t num_free;     // slots on the stack of those emptied since
  int32_t reached;      // no resident position is at or beyond it
  int32_t fresh_start, fresh_end;  // rows that this step writes
  int32_t all_used;     // whether this step was seen to use all slots
  uint32_t turn;        // of the index
  uint32_t carries;     // bit per query: it has a threshold
  Stamp step;           // stamp of what this step uses, without a chance
  float thresholds[kQueriesMax];
  Counts counts;
};

// One table: pointers into the memory of a Tables.
struct Table {
  Header* head;
  int32_t* tokens;    // [slots], kAbsent in an emptied slot
  int32_t* free;      // [slots], a stack
  Stamp* stamps;      // [slots], and one more for what has no slot
  Hint* cache_slots;  // [positions_max]; null in a table with an index
  SlotIndex index;
  int32_t slots;
  int32_t positions_max;

  bool has_index() const noexcept { return index.words != nullptr; }
  // Where to look for a position first.
  const void* word_of(int32_t position) const noexcept {
    return has_index() ? index.line_at(index.home_of(position).line) : cache_slots + position;
  }
  // The slot of a position within [0, positions_max), or kAbsent.
  int32_t find(int32_t position) const noexcept {
    if (has_index()) {
      const int32_t slot = index.find(position);
      return slot < slots ? slot : kAbsent;
    }
    const Hint hint = cache_slots[position];
    const bool is_resident = generation_in(hint) == head->generation && slot_in(hint) < slots;
    return is_resident ? slot_in(hint) : kAbsent;
  }
  void mark_hit(int32_t slot) const noexcept { stamps[slot] = head->step | kChance; }
  bool is_fresh(int32_t position) const noexcept {
    return head->fresh_start <= position && position < head->fresh_end;
  }

  void begin_step() noexcept;
  // Rows [start, end) that this step writes get slots, the newest first.
  void admit(int32_t start, int32_t end) noexcept;
  // Slots for up to `wanted` rows, which use them, free ones first, then victims; returns how many
  // there are. What is behind them is undefined, also kKeysSpare behind `wanted`.
  int32_t take_slots(const Kernel& kernel, int32_t wanted, int32_t* slots_out) noexcept;
  void put(int32_t slot, int32_t position) noexcept;
  // A row that has a slot loses it; what the slot holds is up to the caller.
  void forget(int32_t position) const noexcept;
  int64_t invalidate_from(int32_t position);
  void reset() noexcept;
  std::vector<std::string> check() const;

 private:
  void index_anew() noexcept;
  void empty_slot(int32_t slot) noexcept;
};

enum class Layout { kBySize, kMap, kIndex };

class Tables {
 public:
  // By size: an index where it has at most half of the words that the positions would have, and at
  // most a quarter where a step does not fetch all of them.
  Tables(int64_t num_tables, int64_t slots, int64_t positions_max, Layout layout);

  Table table(int64_t number) const noexcept;
  int64_t num_tables() const noexcept { return num_tables_; }
  int32_t slots() const noexcept { return slots_; }
  int32_t positions_max() const noexcept { return positions_max_; }
  bool has_index() const noexcept { return has_index_; }
  size_t table_bytes() const noexcept { return table_bytes_ + sizeof(Header); }

 private:
  Table carve(Carver& carver) const noexcept;

  int64_t num_tables_;
  int32_t slots_;
  int32_t positions_max_;
  bool has_index_;
  size_t table_bytes_;  // without its header
  Memory memory_;       // all headers, which are touched at once; then the tables
};

}  // namespace kvd::residency
