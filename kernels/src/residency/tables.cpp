#include "tables.hpp"

#include <algorithm>
#include <iterator>

#include "kernels.hpp"

namespace kvd::residency {

void Table::begin_step() noexcept {
  if (head->step == kStampMax) {
    for (int32_t slot = 0; slot < slots; ++slot) stamps[slot] &= kChance;
    head->step = 0;
  }
  head->step += kStampNext;
  head->fresh_start = head->fresh_end = 0;
  head->all_used = 0;
}

void Table::admit(int32_t start, int32_t end) noexcept {
  head->fresh_start = start;
  head->fresh_end = end;
  for (int32_t position = end; position-- > start;) {
    int32_t slot = find(position);
    if (slot != kAbsent) {
      mark_hit(slot);
    } else if (take_slots(scalar_kernel(), 1, &slot) == 1) {
      put(slot, position);
    } else {
      continue;
    }
    ++head->counts.admitted;
  }
}

int32_t Table::take_slots(const Kernel& kernel, int32_t wanted, int32_t* slots_out) noexcept {
  int32_t taken = 0;
  while (taken < wanted && head->num_free > 0) slots_out[taken++] = free[--head->num_free];
  while (taken < wanted && head->num_touched < slots) slots_out[taken++] = head->num_touched++;
  for (int32_t at = 0; at < taken; ++at) {
    stamps[slots_out[at]] = head->step;
    tokens[slots_out[at]] = kAbsent;
  }
  if (taken == wanted || head->all_used != 0) return taken;
  const int32_t evicted = kernel.sweep(*this, wanted - taken, slots_out + taken);
  kernel.forget(*this, slots_out + taken, evicted);
  head->all_used = evicted < wanted - taken;
  head->counts.evicted += evicted;
  return taken + evicted;
}

void Table::put(int32_t slot, int32_t position) noexcept {
  tokens[slot] = position;
  if (!has_index()) {
    cache_slots[position] = hint_of(slot, head->generation);
  } else if (!index.put(position, slot)) {
    index_anew();
  }
  head->reached = std::max(head->reached, position + 1);
}

void Table::forget(int32_t position) const noexcept {
  if (has_index()) {
    index.drop(position);
  } else {
    cache_slots[position] = 0;
  }
}

// Hardly any positions fill so many neighbouring lines; with another multiplier those fill others.
void Table::index_anew() noexcept {
  bool fits = false;
  while (!fits) {
    index.multiplier = SlotIndex::multiplier_of(++head->turn);
    index.clear();
    fits = true;
    for (int32_t slot = 0; slot < head->num_touched && fits; ++slot) {
      if (tokens[slot] != kAbsent) fits = index.put(tokens[slot], slot);
    }
  }
}

void Table::empty_slot(int32_t slot) noexcept {
  forget(tokens[slot]);
  tokens[slot] = kAbsent;
  free[head->num_free++] = slot;
}

int64_t Table::invalidate_from(int32_t position) {
  int64_t num_emptied = 0;
  if (head->reached - position <= slots) {
    for (int32_t stale = position; stale < head->reached; ++stale) {
      const int32_t slot = find(stale);
      if (slot == kAbsent) continue;
      empty_slot(slot);
      ++num_emptied;
    }
  } else {
    std::vector<int32_t> stale;
    std::copy_if(tokens, tokens + head->num_touched, std::back_inserter(stale),
                 [position](int32_t token) { return token >= position; });
    std::sort(stale.begin(), stale.end());  // freed in the order of positions, as above
    for (const int32_t token : stale) empty_slot(find(token));
    num_emptied = static_cast<int64_t>(stale.size());
  }
  head->reached = std::min(head->reached, position);
  head->fresh_end = std::min(head->fresh_end, position);
  head->all_used = 0;
  head->counts.invalidated += num_emptied;
  return num_emptied;
}

void Table::reset() noexcept {
  begin_step();
  if (has_index()) {
    index.clear();
  } else if (head->generation == kGenerationMax) {
    std::fill(cache_slots, cache_slots + positions_max, Hint{0});
    head->generation = 0;
  }
  ++head->generation;
  head->num_touched = head->num_free = head->reached = 0;
  head->carries = 0;
}

std::vector<std::string> Table::check() const {
  std::vector<std::string> wrong;
  int32_t num_resident = 0;
  for (int32_t position = 0; position < head->reached; ++position) {
    const int32_t slot = find(position);
    if (slot == kAbsent) continue;
    ++num_resident;
    if (slot >= head->num_touched || tokens[slot] != position) {
      wrong.push_back("position " + std::to_string(position) + " is said to be in slot " +
                      std::to_string(slot));
    }
  }
  std::vector<bool> is_free(static_cast<size_t>(slots));
  for (int32_t at = 0; at < head->num_free; ++at) {
    const int32_t slot = free[at];
    if (is_free[static_cast<size_t>(slot)]) wrong.push_back("a slot is free twice");
    is_free[static_cast<size_t>(slot)] = true;
    if (tokens[slot] != kAbsent) {
      wrong.push_back("slot " + std::to_string(slot) + " is free and holds position " +
                      std::to_string(tokens[slot]));
    }
  }
  if (num_resident + head->num_free != head->num_touched) wrong.push_back("a slot is lost");
  if (has_index() && index.count() != num_resident) {
    wrong.push_back("the index has " + std::to_string(index.count()) + " words for " +
                    std::to_string(num_resident) + " rows");
  }
  return wrong;
}

namespace {

bool is_index_better(int64_t slots, int64_t positions_max) {
  constexpr int64_t kFetched = 65536;  // words that a step may fetch all of: 256 KiB
  const int64_t num_words = int64_t{IndexLine::kWords} << SlotIndex::bits_for(slots);
  return num_words * (num_words <= kFetched ? 2 : 4) <= positions_max;
}

}  // namespace

Tables::Tables(int64_t num_tables, int64_t slots, int64_t positions_max, Layout layout)
    : num_tables_(num_tables),
      slots_(static_cast<int32_t>(slots)),
      positions_max_(static_cast<int32_t>(positions_max)),
      has_index_(layout == Layout::kBySize ? is_index_better(slots, positions_max)
                                           : layout == Layout::kIndex),
      table_bytes_([this] {
        Carver counting(nullptr);
        carve(counting);
        return counting.used();
      }()),
      memory_(static_cast<size_t>(num_tables) * table_bytes()) {
  for (int64_t number = 0; number < num_tables; ++number) {
    Header* const head = table(number).head;
    head->generation = 1;
    head->step = kStampNext;
  }
}

Table Tables::carve(Carver& carver) const noexcept {
  Table table{};
  table.tokens = carver.take<int32_t>(static_cast<size_t>(slots_));
  table.free = carver.take<int32_t>(static_cast<size_t>(slots_));
  table.stamps = carver.take<Stamp>(static_cast<size_t>(slots_) + 1);
  if (has_index_) {
    table.index.bits = SlotIndex::bits_for(slots_);
    const auto num_words = static_cast<size_t>(table.index.num_words());
    table.index.words = carver.take<uint32_t>(num_words);
  } else {
    table.cache_slots = carver.take<Hint>(static_cast<size_t>(positions_max_));
  }
  table.slots = slots_;
  table.positions_max = positions_max_;
  return table;
}

Table Tables::table(int64_t number) const noexcept {
  auto* const heads = reinterpret_cast<Header*>(memory_.data());
  Carver carver(reinterpret_cast<uint8_t*>(heads + num_tables_) +
                static_cast<size_t>(number) * table_bytes_);
  Table table = carve(carver);
  table.head = heads + number;
  table.index.multiplier = SlotIndex::multiplier_of(table.head->turn);
  return table;
}

}  // namespace kvd::residency
