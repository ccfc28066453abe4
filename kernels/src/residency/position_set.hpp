// A set of positions that comes out in ascending order, with the rank of each.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "limits.hpp"
#include "memory.hpp"

namespace kvd::residency {

class PositionSet {
 public:
  static constexpr int32_t kSpare = 4;  // what `list` may write behind its end

  // Empty: the memory must be zeroed.
  static PositionSet carve(Carver& carver) {
    PositionSet set;
    set.words_ = carver.take<uint64_t>(kWords);
    set.ranks_ = carver.take<int32_t>(kWords);
    return set;
  }

  // By bytes: neighbours mostly go to different ones, so that none waits for the one before.
  void add(int32_t position) noexcept {
    uint8_t& byte = reinterpret_cast<uint8_t*>(words_)[position >> 3];
    byte = static_cast<uint8_t>(byte | 1U << (position & 7));
  }

  // Writes what is in the set, all of it below `end`, in ascending order; returns how many. Inlined
  // into kernels, which have instructions for it.
  __attribute__((always_inline)) int32_t list(int32_t end, int32_t* positions) noexcept {
    int32_t count = 0;
    const int32_t num_words = words_below(end);
    for (int32_t word = 0; word < num_words; ++word) {
      uint64_t bits = words_[word];
      if (bits == 0) continue;
      const int32_t many = __builtin_popcountll(bits);
      ranks_[word] = count;
      // There are few, mostly: written without asking how many, which would be guessed wrongly.
      int32_t at = count;
      for (int32_t turn = 0; turn < kSpare; ++turn, bits &= bits - 1) {
        positions[at++] = word << kShift | __builtin_ctzll(bits | uint64_t{1} << kMask);
      }
      for (; bits != 0; bits &= bits - 1) {
        positions[at++] = word << kShift | __builtin_ctzll(bits);
      }
      count += many;
    }
    return count;
  }

  // Index of a member in what `list` wrote.
  int32_t rank_of(int32_t position) const noexcept {
    const int32_t word = position >> kShift;
    const uint64_t before = (uint64_t{1} << (position & kMask)) - 1;
    return ranks_[word] + __builtin_popcountll(words_[word] & before);
  }

  // Empties the set; the arguments are those of `list` and what it returned.
  void clear(int32_t end, const int32_t* positions, int32_t count) noexcept {
    const int32_t num_words = words_below(end);
    if (count > num_words / 8) {
      std::fill(words_, words_ + num_words, uint64_t{0});
      return;
    }
    for (int32_t at = 0; at < count; ++at) words_[positions[at] >> kShift] = 0;
  }

 private:
  static_assert(std::endian::native == std::endian::little);  // a byte is where its bits are

  static constexpr int32_t kShift = 6;
  static constexpr int32_t kMask = 63;
  static constexpr size_t kWords = kPositionsMax >> kShift;

  static int32_t words_below(int32_t end) noexcept { return (end + kMask) >> kShift; }

  uint64_t* words_ = nullptr;
  int32_t* ranks_ = nullptr;
};

}  // namespace kvd::residency
