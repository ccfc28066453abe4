// Which slot a position has, in memory that follows the number of slots, not that of positions.
//
// A hash table of lines, each of 16 words, which is what a CPU fetches at once. A position has a
// home line; where that is full, its word is in one of the lines behind. At most half of all words
// are in use, so a look-up touches one line, hardly ever two. A word says:
//
//     slot | rest of the position | 1 | lines behind home (8 bits)         0: no word
//
// The home line and the rest are the position, multiplied by an odd number modulo kPositionsMax:
// two positions never have the same word, and neighbours spread over all lines. Should a word have
// to go farther from home than it can say, all of them are multiplied by another number.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "limits.hpp"

namespace kvd::residency {

// What is asked of a line; bit i of an answer is word i.
struct IndexLine {
  static constexpr int32_t kWords = 16;
  const uint32_t* words;

  // Words that are `wanted` in the bits of `mask`.
  uint32_t matches(uint32_t wanted, uint32_t mask) const noexcept;
  uint32_t empty() const noexcept { return matches(0, UINT32_MAX); }
};

struct SlotIndex {
  static constexpr int32_t kPositionBits = 20;
  static_assert(kPositionsMax == int64_t{1} << kPositionBits);
  static constexpr int32_t kBehindBits = 8;
  static constexpr uint32_t kBehindMax = (uint32_t{1} << kBehindBits) - 1;

  uint32_t* words;      // [num_lines, 16]; null in a table that has no index
  uint32_t multiplier;  // odd
  int32_t bits;         // log2(num_lines)

  static int32_t bits_for(int64_t slots) noexcept;
  int32_t num_lines() const noexcept { return int32_t{1} << bits; }
  int32_t num_words() const noexcept { return num_lines() * IndexLine::kWords; }

  // By the golden ratio, which keeps neighbours apart; another one for each turn.
  static constexpr uint32_t multiplier_of(uint32_t turn) noexcept { return 0x9E377 + 2 * turn; }
  int32_t rest_bits() const noexcept { return kPositionBits - bits; }
  int32_t slot_shift() const noexcept { return kBehindBits + 1 + rest_bits(); }
  uint32_t key_mask() const noexcept { return (uint32_t{1} << slot_shift()) - 1; }

  struct Home {
    uint32_t line;
    uint32_t key;  // a word without its slot, in the home line
  };
  Home home_of(int32_t position) const noexcept {
    const uint32_t mixed =
        static_cast<uint32_t>(position) * multiplier & (static_cast<uint32_t>(kPositionsMax) - 1);
    const uint32_t rest = mixed & ((uint32_t{1} << rest_bits()) - 1);
    return {mixed >> rest_bits(), (rest << 1 | 1) << kBehindBits};
  }
  uint32_t* line_at(uint32_t number) const noexcept {
    const auto last = static_cast<uint32_t>(num_lines() - 1);
    return words + static_cast<size_t>(number & last) * IndexLine::kWords;
  }

  // The word of a position, or null.
  uint32_t* where(int32_t position) const noexcept {
    const Home home = home_of(position);
    for (uint32_t behind = 0; behind <= kBehindMax; ++behind) {
      const IndexLine line{line_at(home.line + behind)};
      const uint32_t found = line.matches(home.key + behind, key_mask());
      if (found != 0) return line_at(home.line + behind) + __builtin_ctz(found);
      if (line.empty() != 0) return nullptr;
    }
    return nullptr;
  }
  int32_t find(int32_t position) const noexcept {
    const uint32_t* const word = where(position);
    return word == nullptr ? kAbsent : static_cast<int32_t>(*word >> slot_shift());
  }

  // False where too many lines are full: the caller makes the index anew, after the next turn.
  bool put(int32_t position, int32_t slot) const noexcept;
  void drop(int32_t position) const noexcept;
  void clear() const noexcept;
  int32_t count() const noexcept;
};

#if defined(__SSE2__)
inline uint32_t IndexLine::matches(uint32_t wanted, uint32_t mask) const noexcept {
  const __m128i key = _mm_set1_epi32(static_cast<int32_t>(wanted));
  const __m128i bits = _mm_set1_epi32(static_cast<int32_t>(mask));
  const auto part = [&](int32_t at) {
    const __m128i four = _mm_load_si128(reinterpret_cast<const __m128i*>(words + at));
    return _mm_cmpeq_epi32(_mm_and_si128(four, bits), key);
  };
  const __m128i low = _mm_packs_epi32(part(0), part(4));
  const __m128i high = _mm_packs_epi32(part(8), part(12));
  return static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(low, high)));
}
#elif defined(__aarch64__)
inline uint32_t IndexLine::matches(uint32_t wanted, uint32_t mask) const noexcept {
  const uint32x4_t key = vdupq_n_u32(wanted);
  const uint32x4_t bits = vdupq_n_u32(mask);
  constexpr uint32_t kFirst[] = {1, 2, 4, 8};
  uint32x4_t lanes = vld1q_u32(kFirst);
  uint32x4_t found = vdupq_n_u32(0);
  for (int32_t at = 0; at < kWords; at += 4, lanes = vshlq_n_u32(lanes, 4)) {
    const uint32x4_t same = vceqq_u32(vandq_u32(vld1q_u32(words + at), bits), key);
    found = vorrq_u32(found, vandq_u32(same, lanes));
  }
  return vaddvq_u32(found);
}
#else
inline uint32_t IndexLine::matches(uint32_t wanted, uint32_t mask) const noexcept {
  uint32_t found = 0;
  for (int32_t at = 0; at < kWords; ++at) {
    found |= static_cast<uint32_t>((words[at] & mask) == wanted) << at;
  }
  return found;
}
#endif

}  // namespace kvd::residency
