#include "step.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace kvd::residency {
namespace {

StepArrays carve(Carver& carver, int64_t queries, int64_t k) {
  const auto room = static_cast<size_t>(queries * k + kKeysSpare);
  StepArrays made{};
  made.figures = carver.take<Figures>(1);
  made.counts = carver.take<int32_t>(static_cast<size_t>(queries));
  for (int32_t** array :
       {&made.selection, &made.winners, &made.references, &made.positions, &made.places,
        &made.load_positions, &made.load_slots, &made.scratch, &made.missed, &made.taken}) {
    *array = carver.take<int32_t>(room);
  }
  made.set = PositionSet::carve(carver);
  return made;
}

size_t bytes_of(int64_t queries, int64_t k) {
  Carver counting(nullptr);
  carve(counting, queries, k);
  return counting.used();
}

bool is_miss(int32_t winner) { return winner < 0 && winner != kNoWinner; }

}  // namespace

Step::Step(int64_t queries, int64_t k, const Kernel& kernel)
    : queries_(queries),
      k_(k),
      kernel_(&kernel),
      memory_(bytes_of(queries, k)),
      room_(kPositionsMax) {
  Carver carver(memory_.data());
  arrays_ = carve(carver, queries, k);
}

void Step::check_counts(int64_t first, int64_t queries) const {
  for (int64_t query = first; query < first + queries; ++query) {
    const int32_t count = arrays_.counts[query];
    if (count >= 0 && count <= k_) continue;
    throw std::invalid_argument("counts[" + std::to_string(query) + "] is " +
                                std::to_string(count) + " but must be 0 to " + std::to_string(k_));
  }
}

void Step::check_selection(int64_t first, int64_t queries, int32_t positions_max) {
  check_counts(first, queries);
  uint32_t end = 0;
  is_ascending_ = queries == 1;
  for (int64_t query = first; query < first + queries; ++query) {
    const Inspection seen =
        kernel_->inspect(row(arrays_.selection, query), arrays_.counts[query]);
    end = std::max(end, seen.end);
    is_ascending_ &= seen.is_ascending;
  }
  if (end > static_cast<uint32_t>(positions_max)) {
    throw std::invalid_argument("selection has position " +
                                std::to_string(static_cast<int32_t>(end - 1)) +
                                "; give -1 for padding, or 0 to " +
                                std::to_string(positions_max - 1));
  }
  end_ = end;
}

void Step::top_k(const Scores& scores, int64_t query, int64_t n, int64_t k, float* carried) {
  arrays_.counts[query] =
      room_.top_k(*kernel_, scores, n, k, carried, row(arrays_.selection, query));
}

int32_t Step::lookup(const Table& table, int64_t query) {
  check_selection(query, 1, table.positions_max);
  return look_up_row(table, query);
}

int32_t Step::look_up_row(const Table& table, int64_t query) {
  return kernel_->lookup(table, row(arrays_.selection, query), arrays_.counts[query],
                         row(arrays_.winners, query), arrays_.missed);
}

int32_t Step::lim(const Table& table, const Scores& scores, int64_t query, int64_t n, int64_t k) {
  Header& head = *table.head;
  const uint32_t bit = uint32_t{1} << query;
  float carried = (head.carries & bit) != 0 ? head.thresholds[query]
                                            : std::numeric_limits<float>::quiet_NaN();
  top_k(scores, query, n, k, &carried);
  head.thresholds[query] = carried;
  head.carries |= bit;
  return look_up_row(table, query);
}

int32_t Step::merge_misses(int64_t queries) {
  check_counts(0, queries);
  int32_t end = 0;
  for (int64_t query = 0; query < queries; ++query) {
    const int32_t* const winners = row(arrays_.winners, query);
    for (int32_t at = 0; at < arrays_.counts[query]; ++at) {
      if (!is_miss(winners[at])) continue;
      arrays_.set.add(~winners[at]);
      end = std::max(end, ~winners[at] + 1);
    }
  }
  const int32_t count = kernel_->list(arrays_.set, end, arrays_.positions);
  for (int64_t query = 0; query < queries; ++query) {
    const int32_t* const winners = row(arrays_.winners, query);
    int32_t* const references = row(arrays_.references, query);
    for (int32_t at = 0; at < arrays_.counts[query]; ++at) {
      references[at] = is_miss(winners[at]) ? arrays_.set.rank_of(~winners[at]) : kAbsent;
    }
  }
  arrays_.set.clear(end, arrays_.positions, count);
  *arrays_.figures = {count, 0, 0, 0};
  return count;
}

// Slots for what `positions` and `missed` say is missed, and its `places`.
void Step::place(Table& table, int32_t num_missed) {
  const int32_t* const positions = arrays_.positions;
  int32_t num_loads = 0;
  int32_t num_scratch = 0;
  // Rows that the step itself writes are at hand: they are never loaded.
  const bool has_fresh = table.head->fresh_start < table.head->fresh_end;
  const int32_t num_wanted =
      !has_fresh ? num_missed
                 : static_cast<int32_t>(std::count_if(
                       arrays_.missed, arrays_.missed + num_missed,
                       [&](int32_t at) { return !table.is_fresh(positions[at]); }));
  const int32_t num_taken = table.take_slots(*kernel_, num_wanted, arrays_.taken);
  for (int32_t nth = 0; nth < num_missed; ++nth) {
    const int32_t at = arrays_.missed[nth];
    const int32_t position = positions[at];
    if (num_loads == num_taken || (has_fresh && table.is_fresh(position))) {
      arrays_.places[at] = table.slots + num_scratch;
      arrays_.scratch[num_scratch++] = position;
      continue;
    }
    const int32_t slot = arrays_.taken[num_loads];
    arrays_.places[at] = slot;
    arrays_.load_positions[num_loads] = position;
    arrays_.load_slots[num_loads++] = slot;
  }
  kernel_->put(table, arrays_.load_slots, arrays_.load_positions, num_loads);
  arrays_.figures->loads = num_loads;
  arrays_.figures->scratch = num_scratch;
  table.head->counts.misses += num_loads;
  table.head->counts.scratch += num_scratch;
}

int32_t Step::assign(Table& table) {
  const auto count = static_cast<int32_t>(arrays_.figures->positions);
  if (count > 0 && arrays_.positions[count - 1] >= table.positions_max) {
    throw std::invalid_argument("the misses reach position " +
                                std::to_string(arrays_.positions[count - 1]) +
                                " but the table ends at " + std::to_string(table.positions_max));
  }
  // Looked up once more, so that what was placed since it was missed is not placed twice.
  place(table, kernel_->lookup(table, arrays_.positions, count, arrays_.places, arrays_.missed));
  return static_cast<int32_t>(arrays_.figures->loads);
}

// The distinct positions of all queries, into `positions`.
const int32_t* Step::merge(int64_t queries) {
  int64_t given = 0;
  if (is_ascending_) {
    given = arrays_.counts[0];
    std::copy(arrays_.selection, arrays_.selection + given, arrays_.positions);
    arrays_.figures->positions = given;
  } else {
    for (int64_t query = 0; query < queries; ++query) {
      const int32_t* const selected = row(arrays_.selection, query);
      for (int32_t at = 0; at < arrays_.counts[query]; ++at) {
        if (selected[at] == kPadding) continue;
        arrays_.set.add(selected[at]);
        ++given;
      }
    }
    const auto end = static_cast<int32_t>(end_);
    const int32_t count = kernel_->list(arrays_.set, end, arrays_.positions);
    arrays_.set.clear(end, arrays_.positions, count);
    arrays_.figures->positions = count;
  }
  arrays_.figures->given = given;
  return arrays_.positions;
}

int32_t Step::select(Table& table, int64_t queries) {
  check_selection(0, queries, table.positions_max);
  const int32_t* const positions = merge(queries);
  const auto count = static_cast<int32_t>(arrays_.figures->positions);
  const int32_t num_missed =
      kernel_->lookup(table, positions, count, arrays_.places, arrays_.missed);
  Counts& counts = table.head->counts;
  counts.selected += arrays_.figures->given;
  counts.merged += arrays_.figures->given - count;
  counts.hits += count - num_missed;
  place(table, num_missed);
  return static_cast<int32_t>(arrays_.figures->loads);
}

}  // namespace kvd::residency
