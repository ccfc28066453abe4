// The operations on books with AVX-512: a line of the index is one vector.
#include "avx512.hpp"

#if defined(__x86_64__)

namespace kvd::residency {
namespace {

constexpr int32_t kStride = static_cast<int32_t>(kLanes);
static_assert(IndexLine::kWords == kLanes);

// What a look-up writes.
struct Found {
  int32_t* winners;
  int32_t* missed;
  int32_t num_missed;
};

// Takes down where sixteen positions are: in `slots` those of `hit`, and missing the other `valid`.
KVD_TARGET inline void take_down(const Table& table, int32_t at, __m512i wanted, __mmask16 inside,
                                 __mmask16 valid, __mmask16 hit, __m512i slots, Found& found) {
  alignas(64) int32_t marked[kLanes];  // a miss marks the slot behind the last
  _mm512_store_si512(marked, _mm512_mask_mov_epi32(_mm512_set1_epi32(table.slots), hit, slots));
  Stamp* const stamps = table.stamps;
  const Stamp used = table.head->step | kChance;
#pragma GCC unroll 16
  for (int32_t lane = 0; lane < kLanes; ++lane) stamps[marked[lane]] = used;
  const __m512i absent = _mm512_mask_xor_epi32(_mm512_set1_epi32(kNoWinner), valid, wanted,
                                               _mm512_set1_epi32(-1));
  _mm512_mask_storeu_epi32(found.winners + at, inside, _mm512_mask_mov_epi32(absent, hit, slots));
  const __mmask16 missing = valid & static_cast<__mmask16>(~hit);
  _mm512_storeu_si512(found.missed + found.num_missed,
                      _mm512_maskz_compress_epi32(missing, lanes_from(at)));
  found.num_missed += static_cast<int32_t>(count_of(missing));
}

KVD_TARGET int32_t lookup_in_map(const Table& table, const int32_t* positions, int32_t n,
                                 Found found) {
  const __m512i generation = _mm512_set1_epi32(static_cast<int32_t>(table.head->generation));
  const __m512i all_bits = _mm512_set1_epi32(static_cast<int32_t>(kGenerationMax));
  const __m512i num_slots = _mm512_set1_epi32(table.slots);
  for (int32_t at = 0; at < n; at += kStride) {
    const __mmask16 inside = first_lanes(n - at);
    const __m512i wanted = _mm512_maskz_loadu_epi32(inside, positions + at);
    const __mmask16 valid = _mm512_mask_cmpge_epi32_mask(inside, wanted, _mm512_setzero_si512());
    const __m512i hints =
        _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), valid, wanted, table.cache_slots, 4);
    const __m512i slots = _mm512_srli_epi32(hints, kGenerationBits);
    const __mmask16 current =
        _mm512_mask_testn_epi32_mask(valid, _mm512_xor_si512(hints, generation), all_bits);
    const __mmask16 hit = _mm512_mask_cmplt_epu32_mask(current, slots, num_slots);
    take_down(table, at, wanted, inside, valid, hit, slots, found);
  }
  return found.num_missed;
}

// Look-ups in an index go through these, a part of a selection at a time: what one writes is read
// long after, when no load has to wait for a store.
constexpr int32_t kPart = 256;
struct Part {
  alignas(64) int32_t lines[kPart];  // where the home line starts, in words
  alignas(64) uint32_t keys[kPart];
  alignas(64) uint32_t words[kPart];  // 0 for none
};

// SlotIndex::home_of, for each lane of each vector.
KVD_TARGET void find_homes(const SlotIndex& index, const int32_t* positions, int32_t n,
                           Part& part) {
  const __m512i multiplier = _mm512_set1_epi32(static_cast<int32_t>(index.multiplier));
  const __m512i product_bits = _mm512_set1_epi32(static_cast<int32_t>(kPositionsMax - 1));
  const __m512i rest_bits = _mm512_set1_epi32((1 << index.rest_bits()) - 1);
  const __m128i to_line = _mm_cvtsi32_si128(index.rest_bits());
  for (int32_t at = 0; at < n; at += kStride) {
    const __m512i wanted = _mm512_maskz_loadu_epi32(first_lanes(n - at), positions + at);
    const __m512i product =
        _mm512_and_si512(_mm512_mullo_epi32(wanted, multiplier), product_bits);
    const __m512i twice = _mm512_slli_epi32(_mm512_and_si512(product, rest_bits), 1);
    const __m512i marked = _mm512_or_si512(twice, _mm512_set1_epi32(1));
    _mm512_store_si512(part.lines + at, _mm512_slli_epi32(_mm512_srl_epi32(product, to_line), 4));
    _mm512_store_si512(part.keys + at, _mm512_slli_epi32(marked, SlotIndex::kBehindBits));
  }
}

// The words with the keys of a part, each in its home line.
KVD_TARGET void find_words(const SlotIndex& index, int32_t n, Part& part) {
  const __m512i key_bits = _mm512_set1_epi32(static_cast<int32_t>(index.key_mask()));
#pragma GCC unroll 4
  for (int32_t at = 0; at < n; ++at) {
    const __m512i line = _mm512_load_si512(index.words + part.lines[at]);
    const __m512i key = _mm512_set1_epi32(static_cast<int32_t>(part.keys[at]));
    const __mmask16 same = _mm512_testn_epi32_mask(_mm512_xor_si512(line, key), key_bits);
    part.words[at] = static_cast<uint32_t>(_mm_cvtsi128_si32(
        _mm512_castsi512_si128(_mm512_maskz_compress_epi32(same, line))));
  }
}

// What is not in its home line may be behind it, where that is full. Finds it for misses from
// `first` on, and leaves the others among them; `start` is where the part does.
KVD_TARGET void look_behind(const Table& table, const int32_t* positions, int32_t start,
                            const Part& part, int32_t first, Found& found) {
  int32_t kept = first;
  for (int32_t nth = first; nth < found.num_missed; ++nth) {
    const int32_t at = found.missed[nth];
    found.missed[kept++] = at;
    // Most lines have room in their last word, which is taken last.
    if (table.index.words[part.lines[at - start] + kStride - 1] == 0) continue;
    const int32_t slot = table.find(positions[at]);
    if (slot == kAbsent) continue;
    table.mark_hit(slot);
    found.winners[at] = slot;
    --kept;
  }
  found.num_missed = kept;
}

KVD_TARGET int32_t lookup_in_index(const Table& table, const int32_t* positions, int32_t n,
                                   Found found) {
  Part part;
  const SlotIndex index = table.index;
  const __m512i num_slots = _mm512_set1_epi32(table.slots);
  const __m128i to_slot = _mm_cvtsi32_si128(index.slot_shift());
  for (int32_t start = 0; start < n; start += kPart) {
    const int32_t many = std::min(kPart, n - start);
    find_homes(index, positions + start, many, part);
    find_words(index, many, part);
    const int32_t first = found.num_missed;
    for (int32_t at = 0; at < many; at += kStride) {
      const __mmask16 inside = first_lanes(many - at);
      const __m512i wanted = _mm512_maskz_loadu_epi32(inside, positions + start + at);
      const __mmask16 valid = _mm512_mask_cmpge_epi32_mask(inside, wanted, _mm512_setzero_si512());
      const __m512i words = _mm512_load_si512(part.words + at);
      const __m512i slots = _mm512_srl_epi32(words, to_slot);
      const __mmask16 hit = _mm512_mask_cmplt_epu32_mask(
          _mm512_mask_test_epi32_mask(valid, words, words), slots, num_slots);
      take_down(table, start + at, wanted, inside, valid, hit, slots, found);
    }
    look_behind(table, positions, start, part, first, found);
  }
  return found.num_missed;
}

// sweep_eight, of 64 stamps.
constexpr int32_t kSweptWide = 64;
KVD_TARGET inline uint64_t sweep_part(Stamp* stamps, int32_t many, Stamp step, int32_t wanted) {
  const __mmask64 inside = ~uint64_t{0} >> (kSweptWide - many);
  const __m512i used = _mm512_set1_epi8(static_cast<char>(step));
  const __m512i chance = _mm512_set1_epi8(kChance);
  const __m512i stamped = _mm512_maskz_loadu_epi8(inside, stamps);
  const __mmask64 unused =
      _mm512_mask_cmpneq_epi8_mask(inside, _mm512_andnot_si512(chance, stamped), used);
  const __mmask64 chances = _mm512_test_epi8_mask(stamped, chance);
  uint64_t found = unused & ~chances;
  uint64_t saved = unused & chances;
  if (__builtin_popcountll(found) >= wanted) {
    uint64_t rest = found;
    for (int32_t nth = 0; nth < wanted; ++nth) rest &= rest - 1;
    found &= (rest & -rest) - 1;  // before the first one that is not wanted
    saved &= (std::bit_floor(found) << 1) - 1;
  }
  const __m512i spent = _mm512_mask_sub_epi8(stamped, saved, stamped, chance);
  _mm512_mask_storeu_epi8(stamps, inside, _mm512_mask_mov_epi8(spent, found, used));
  return found;
}

}  // namespace

KVD_TARGET int32_t lookup_avx512(const Table& table, const int32_t* positions, int32_t n,
                                 int32_t* winners, int32_t* missed) {
  const Found found{winners, missed, 0};
  fetch_shared(table, positions, n);
  return table.has_index() ? lookup_in_index(table, positions, n, found)
                           : lookup_in_map(table, positions, n, found);
}

KVD_TARGET int32_t sweep_avx512(const Table& table, int32_t wanted, int32_t* slots_out) {
  int32_t count = 0;
  int32_t slot = table.head->hand;
  for (int32_t left = 2 * table.slots; left > 0 && count < wanted;) {
    const int32_t many = std::min(kSweptWide, table.slots - slot);
    const uint64_t found =
        sweep_part(table.stamps + slot, many, table.head->step, wanted - count);
    for (int32_t lane = 0; lane < kSweptWide; lane += kStride) {
      const auto lanes = static_cast<__mmask16>(found >> lane);
      _mm512_storeu_si512(slots_out + count,
                          _mm512_maskz_compress_epi32(lanes, lanes_from(slot + lane)));
      count += static_cast<int32_t>(count_of(lanes));
    }
    left -= many;
    slot = slot + many == table.slots ? 0 : slot + many;
  }
  if (count > 0) table.head->hand = (slots_out[count - 1] + 1) % table.slots;
  return count;
}

KVD_TARGET void forget_avx512(const Table& table, const int32_t* slots, int32_t n) {
  if (!table.has_index()) return forget_scalar(table, slots, n);
  const SlotIndex index = table.index;
  const __m512i key_bits = _mm512_set1_epi32(static_cast<int32_t>(index.key_mask()));
  for (int32_t at = 0; at < n; ++at) {
    int32_t& token = table.tokens[slots[at]];
    const SlotIndex::Home home = index.home_of(token);
    uint32_t* const line = index.line_at(home.line);
    const __m512i key = _mm512_set1_epi32(static_cast<int32_t>(home.key));
    const __m512i words = _mm512_load_si512(line);
    const uint32_t same = _mm512_testn_epi32_mask(_mm512_xor_si512(words, key), key_bits);
    // Where the last word is empty, the line has sent none on; see SlotIndex::drop.
    if (__builtin_expect(same != 0 && line[kStride - 1] == 0, 1)) {
      line[__builtin_ctz(same)] = 0;
    } else {
      index.drop(token);
    }
    token = kAbsent;
  }
}

KVD_TARGET void put_avx512(Table& table, const int32_t* slots, const int32_t* positions,
                           int32_t n) {
  if (!table.has_index()) return put_scalar(table, slots, positions, n);
  SlotIndex index = table.index;
  int32_t reached = 0;
  for (int32_t at = 0; at < n; ++at) {
    const SlotIndex::Home home = index.home_of(positions[at]);
    uint32_t* const line = index.line_at(home.line);
    const __m512i words = _mm512_load_si512(line);
    const uint32_t empty = _mm512_testn_epi32_mask(words, words);
    if (__builtin_expect(empty == 0, 0)) {
      table.put(slots[at], positions[at]);
      index = table.index;  // which may be another one
      continue;
    }
    line[__builtin_ctz(empty)] =
        static_cast<uint32_t>(slots[at]) << index.slot_shift() | home.key;
    table.tokens[slots[at]] = positions[at];
    reached = std::max(reached, positions[at] + 1);
  }
  table.head->reached = std::max(table.head->reached, reached);
}

}  // namespace kvd::residency
#endif
