#include "slot_index.hpp"

#include <algorithm>
#include <bit>

namespace kvd::residency {

int32_t SlotIndex::bits_for(int64_t slots) noexcept {
  constexpr int64_t kUsed = IndexLine::kWords / 2;
  const auto num_lines = static_cast<uint64_t>((slots + kUsed - 1) / kUsed);
  return static_cast<int32_t>(std::bit_width(num_lines - 1));
}

bool SlotIndex::put(int32_t position, int32_t slot) const noexcept {
  const Home home = home_of(position);
  const auto farthest = std::min(kBehindMax, static_cast<uint32_t>(num_lines() - 1));
  for (uint32_t behind = 0; behind <= farthest; ++behind) {
    uint32_t* const line = line_at(home.line + behind);
    const uint32_t empty = IndexLine{line}.empty();
    if (empty == 0) continue;
    line[__builtin_ctz(empty)] =
        static_cast<uint32_t>(slot) << slot_shift() | (home.key + behind);
    return true;
  }
  return false;
}

// A line that was full may have sent words on, which are found only while it is full: one of them
// comes back to where a word was dropped, and what it leaves is dealt with alike.
void SlotIndex::drop(int32_t position) const noexcept {
  uint32_t* hole = where(position);
  while (hole != nullptr) {
    const auto number = static_cast<uint32_t>((hole - words) / IndexLine::kWords);
    // Most lines have room in their last word, which is taken last.
    const bool has_room = line_at(number)[IndexLine::kWords - 1] == 0 ||
                          IndexLine{line_at(number)}.empty() != 0;
    *hole = 0;
    if (has_room) return;
    uint32_t* sent = nullptr;
    bool may_be_behind = true;
    const auto num_others = static_cast<uint32_t>(num_lines() - 1);
    for (uint32_t on = 1; on <= num_others && may_be_behind && sent == nullptr; ++on) {
      uint32_t* const line = line_at(number + on);
      for (int32_t at = 0; at < IndexLine::kWords && sent == nullptr; ++at) {
        if (line[at] != 0 && (line[at] & kBehindMax) >= on) {
          *hole = line[at] - on;
          sent = line + at;
        }
      }
      may_be_behind = IndexLine{line}.empty() == 0;
    }
    hole = sent;
  }
}

int32_t SlotIndex::count() const noexcept {
  return num_words() - static_cast<int32_t>(std::count(words, words + num_words(), uint32_t{0}));
}

void SlotIndex::clear() const noexcept { std::fill(words, words + num_words(), uint32_t{0}); }

}  // namespace kvd::residency
