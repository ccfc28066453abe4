// The operations of a step, on arrays that are registered once: a call has a few integers.
//
// A Step belongs to one thread at a time, and serves any number of tables in turn. Its arrays:
//
//     selection  [queries, k]   in: what each query selected, or out: what top_k and lim found
//     counts     [queries]      entries of each row of `selection` and `winners`
//     winners    [queries, k]   out: of each position its slot, ~position for a miss, kNoWinner
//     references [queries, k]   out of merge_misses: index of each miss in `positions`, else -1
//     positions  [N]            out: distinct positions, ascending: misses, or all that is selected
//     places     [N]            out: slot of each, or slots + row of the scratch tile
//     loads      [L], [L]       out: positions and slots of rows to load
//     scratch    [S]            out: positions in the order of the scratch tile's rows
#pragma once

#include <cstdint>

#include "kernels.hpp"
#include "memory.hpp"
#include "position_set.hpp"
#include "tables.hpp"
#include "topk.hpp"

namespace kvd::residency {

// Sizes of what the last operation wrote.
struct Figures {
  int64_t positions;  // N
  int64_t loads;      // L
  int64_t scratch;    // S
  int64_t given;      // selected by all queries, before they were merged
};
constexpr int64_t kNumFigures = sizeof(Figures) / sizeof(int64_t);

struct StepArrays {
  int32_t* selection;
  int32_t* counts;
  int32_t* winners;
  int32_t* references;
  int32_t* positions;
  int32_t* places;
  int32_t* load_positions;
  int32_t* load_slots;
  int32_t* scratch;
  int32_t* missed;  // not for callers, as the next
  int32_t* taken;
  Figures* figures;
  PositionSet set;
};

class Step {
 public:
  Step(int64_t queries, int64_t k, const Kernel& kernel);

  const StepArrays& arrays() const noexcept { return arrays_; }
  int64_t queries() const noexcept { return queries_; }
  int64_t k_max() const noexcept { return k_; }
  int64_t capacity() const noexcept { return queries_ * k_; }
  const Kernel& kernel() const noexcept { return *kernel_; }
  int32_t* row(int32_t* array, int64_t query) const noexcept { return array + query * k_; }

  // All throw std::invalid_argument where they refuse; nothing has changed then.
  void top_k(const Scores& scores, int64_t query, int64_t n, int64_t k, float* carried);
  // Winner codes of a row of the selection; returns the number of misses.
  int32_t lookup(const Table& table, int64_t query);
  // top_k, then lookup.
  int32_t lim(const Table& table, const Scores& scores, int64_t query, int64_t n, int64_t k);
  // Distinct misses of the first queries, and references to them.
  int32_t merge_misses(int64_t queries);
  // Places for what merge_misses found; returns the number of loads.
  int32_t assign(Table& table);
  // Places for all that the first queries select; returns the number of loads.
  int32_t select(Table& table, int64_t queries);

 private:
  void check_counts(int64_t first, int64_t queries) const;
  void check_selection(int64_t first, int64_t queries, int32_t positions_max);
  int32_t look_up_row(const Table& table, int64_t query);
  const int32_t* merge(int64_t queries);
  void place(Table& table, int32_t num_missed);

  int64_t queries_;
  int64_t k_;
  const Kernel* kernel_;
  Memory memory_;
  StepArrays arrays_{};
  TopKRoom room_;
  uint32_t end_ = 0;  // of what check_selection saw, as the next
  bool is_ascending_ = false;
};

}  // namespace kvd::residency
