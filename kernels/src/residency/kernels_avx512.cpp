// AVX-512: sixteen at a time, what is kept is compressed.
#include "kernels_scalar.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define KVD_TARGET __attribute__((target("avx512f,avx512dq,bmi,popcnt")))

namespace kvd::residency {
namespace {

// What is compressed goes through a register: some CPUs need a hundred cycles to compress to
// memory.
constexpr int64_t kLanes = 16;

KVD_TARGET inline __mmask16 first_lanes(int64_t count) {
  return count >= kLanes ? __mmask16{0xFFFF} : static_cast<__mmask16>((1U << count) - 1);
}

KVD_TARGET inline __m512i lanes_from(int32_t first) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_add_epi32(lanes, _mm512_set1_epi32(first));
}

inline int64_t count_of(__mmask16 mask) { return __builtin_popcount(mask); }

// key_of, for each lane.
KVD_TARGET inline __m512i keys_of(__m512 scores) {
  const __m512i bits = _mm512_castps_si512(scores);
  const __m512i sign = _mm512_set1_epi32(INT32_MIN);
  const __m512i flips = _mm512_or_si512(_mm512_srai_epi32(bits, 31), sign);
  const __m512i keys = _mm512_xor_si512(bits, flips);
  const __m512i zeroed = _mm512_mask_mov_epi32(keys, _mm512_cmpeq_epi32_mask(bits, sign), sign);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(scores, scores, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(zeroed, is_nan, _mm512_set1_epi32(kLowestKey));
}

struct Floats {
  const float* data;
  KVD_TARGET __m512 load(int64_t at) const { return _mm512_loadu_ps(data + at); }
  KVD_TARGET __m512 load(int64_t at, __mmask16 lanes) const {
    return _mm512_maskz_loadu_ps(lanes, data + at);
  }
};

struct Halves {
  const uint16_t* data;
  KVD_TARGET __m512 load(int64_t at) const {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  KVD_TARGET __m512 load(int64_t at, __mmask16 lanes) const {
    alignas(32) uint16_t last[kLanes] = {};
    std::copy(data + at, data + at + count_of(lanes), last);
    return Halves{last}.load(0);
  }
};

// Keeps lanes of one vector; room for a whole vector is there.
KVD_TARGET inline int64_t keep(const Candidates& found, int64_t count, __mmask16 lanes,
                               __m512 scores, int64_t at) {
  _mm512_storeu_si512(found.keys + count, _mm512_maskz_compress_epi32(lanes, keys_of(scores)));
  _mm512_storeu_si512(found.positions + count,
                      _mm512_maskz_compress_epi32(lanes, lanes_from(static_cast<int32_t>(at))));
  return count + count_of(lanes);
}

template <typename Row>
KVD_TARGET int64_t scan_row(const Row row, int64_t n, float threshold, int64_t most,
                            const Candidates& found) {
  constexpr int64_t kStep = 4 * kLanes;
  const __m512 bound = _mm512_set1_ps(threshold);
  int64_t count = 0;
  int64_t at = 0;
  for (; at + kStep <= n; at += kStep) {
    __m512 scores[4];
    __mmask16 kept[4];
#pragma GCC unroll 4
    for (int64_t part = 0; part < 4; ++part) {
      scores[part] = row.load(at + part * kLanes);
      kept[part] = _mm512_cmp_ps_mask(scores[part], bound, _CMP_GE_OQ);
    }
    if ((kept[0] | kept[1] | kept[2] | kept[3]) == 0) continue;
    if (count > most) return -1;  // kKeysSpare is room for what this round keeps
#pragma GCC unroll 4
    for (int64_t part = 0; part < 4; ++part) {
      if (kept[part] == 0) continue;
      count = keep(found, count, kept[part], scores[part], at + part * kLanes);
    }
  }
  for (; at < n && count <= most; at += kLanes) {
    const __mmask16 inside = first_lanes(n - at);
    const __m512 scores = row.load(at, inside);
    const __mmask16 kept = _mm512_mask_cmp_ps_mask(inside, scores, bound, _CMP_GE_OQ);
    count = keep(found, count, kept, scores, at);
  }
  return count <= most ? count : -1;
}

int64_t scan(const Scores& scores, int64_t n, float threshold, int64_t most,
             const Candidates& found) {
  if (scores.is_bf16) {
    return scan_row(Halves{static_cast<const uint16_t*>(scores.data)}, n, threshold, most, found);
  }
  return scan_row(Floats{static_cast<const float*>(scores.data)}, n, threshold, most, found);
}

KVD_TARGET Partition partition(const uint32_t* keys, int64_t n, uint32_t pivot, uint32_t* greater,
                               uint32_t* less) {
  const __m512i bound = _mm512_set1_epi32(static_cast<int32_t>(pivot));
  Partition sizes{0, 0};
  for (int64_t at = 0; at < n; at += kLanes) {
    const __mmask16 inside = first_lanes(n - at);
    const __m512i part = _mm512_maskz_loadu_epi32(inside, keys + at);
    const __mmask16 above = _mm512_mask_cmpgt_epu32_mask(inside, part, bound);
    const __mmask16 below = _mm512_mask_cmplt_epu32_mask(inside, part, bound);
    _mm512_storeu_si512(greater + sizes.greater, _mm512_maskz_compress_epi32(above, part));
    _mm512_storeu_si512(less + sizes.less, _mm512_maskz_compress_epi32(below, part));
    sizes.greater += count_of(above);
    sizes.less += count_of(below);
  }
  return sizes;
}

KVD_TARGET int64_t count_greater(const uint32_t* keys, int64_t n, uint32_t bound) {
  int64_t count = 0;
  for (int64_t at = 0; at < n; at += kLanes) {
    const __mmask16 inside = first_lanes(n - at);
    const __m512i part = _mm512_maskz_loadu_epi32(inside, keys + at);
    count += count_of(_mm512_mask_cmpgt_epu32_mask(
        inside, part, _mm512_set1_epi32(static_cast<int32_t>(bound))));
  }
  return count;
}

// Only the lowest `count` lanes.
inline __mmask16 lowest(__mmask16 lanes, int64_t count) {
  while (count_of(lanes) > count) {
    lanes &= static_cast<__mmask16>(~(1U << (31 - __builtin_clz(lanes))));
  }
  return lanes;
}

KVD_TARGET void emit(const Candidates& found, int64_t n, uint32_t kth, int64_t k,
                     int32_t* positions) {
  const __m512i last = _mm512_set1_epi32(static_cast<int32_t>(kth));
  int64_t ties = k - count_greater(found.keys, n, kth);
  int64_t count = 0;
  for (int64_t at = 0; at < n && count < k; at += kLanes) {
    const __mmask16 inside = first_lanes(n - at);
    const __m512i keys = _mm512_maskz_loadu_epi32(inside, found.keys + at);
    const __m512i where = _mm512_maskz_loadu_epi32(inside, found.positions + at);
    const __mmask16 tied =
        lowest(_mm512_mask_cmpeq_epi32_mask(inside, keys, last), ties);
    ties -= count_of(tied);
    const __mmask16 kept = tied | _mm512_mask_cmpgt_epu32_mask(inside, keys, last);
    const int64_t many = count_of(kept);
    _mm512_mask_storeu_epi32(positions + count, first_lanes(many),
                             _mm512_maskz_compress_epi32(kept, where));
    count += many;
  }
}

KVD_TARGET Inspection inspect(const int32_t* positions, int64_t n) {
  if (n == 0) return {0, true};
  const __m512i one = _mm512_set1_epi32(1);
  __m512i ends = _mm512_setzero_si512();
  bool is_ascending = positions[0] >= 0;
  for (int64_t at = 0; at < n; at += kLanes) {
    const __mmask16 inside = first_lanes(n - at);
    const __m512i part = _mm512_maskz_loadu_epi32(inside, positions + at);
    ends = _mm512_mask_max_epu32(ends, inside, ends, _mm512_add_epi32(part, one));
    const __mmask16 followed = first_lanes(n - at - 1);
    const __m512i next = _mm512_maskz_loadu_epi32(followed, positions + at + 1);
    is_ascending &= _mm512_mask_cmple_epi32_mask(followed, next, part) == 0;
  }
  return {_mm512_reduce_max_epu32(ends), is_ascending};
}

KVD_TARGET int32_t list(PositionSet& set, int32_t end, int32_t* positions) {
  return set.list(end, positions);
}

inline void ask_for(const Table& table, const int32_t* positions, int32_t count) {
  for (int32_t at = 0; at < count; ++at) {
    __builtin_prefetch(table.cache_slots + std::max(positions[at], 0));
  }
}

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
  constexpr int32_t kStride = static_cast<int32_t>(kLanes);
  const __m512i generation = _mm512_set1_epi32(static_cast<int32_t>(table.head->generation));
  const __m512i all_bits = _mm512_set1_epi32(static_cast<int32_t>(kGenerationMax));
  const __m512i num_slots = _mm512_set1_epi32(table.slots);
  ask_for(table, positions, std::min(n, kAhead));
  for (int32_t at = 0; at < n; at += kStride) {
    const int32_t ahead = at + kAhead;
    if (ahead < n) ask_for(table, positions + ahead, std::min(n - ahead, kStride));
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

KVD_TARGET inline __mmask16 lanes_with_bits(const uint16_t* masks) {
  const __m256i all = _mm256_load_si256(reinterpret_cast<const __m256i*>(masks));
  const __m512i wide = _mm512_cvtepu16_epi32(all);
  return _mm512_test_epi32_mask(wide, wide);
}

// The slots of what may be behind a full line, no slot for what is not.
KVD_TARGET __m512i look_behind(const Table& table, const int32_t* positions, __mmask16 lanes,
                               __m512i slots) {
  alignas(64) int32_t found[kLanes];
  _mm512_store_si512(found, slots);
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    const int32_t lane = __builtin_ctz(left);
    found[lane] = table.find(positions[lane]);
  }
  return _mm512_load_si512(found);
}

KVD_TARGET int32_t lookup_in_index(const Table& table, const int32_t* positions, int32_t n,
                                   Found found) {
  static_assert(IndexLine::kWords == kLanes);
  const SlotIndex index = table.index;
  const __m512i key_bits = _mm512_set1_epi32(static_cast<int32_t>(index.key_mask()));
  const __m512i multiplier = _mm512_set1_epi32(static_cast<int32_t>(index.multiplier));
  const __m512i num_slots = _mm512_set1_epi32(table.slots);
  const __m512i product_bits = _mm512_set1_epi32(static_cast<int32_t>(kPositionsMax - 1));
  const __m512i rest_bits = _mm512_set1_epi32((1 << index.rest_bits()) - 1);
  const __m128i to_line = _mm_cvtsi32_si128(index.rest_bits());
  const __m128i to_slot = _mm_cvtsi32_si128(index.slot_shift());
  for (int32_t at = 0; at < n; at += static_cast<int32_t>(kLanes)) {
    const __mmask16 inside = first_lanes(n - at);
    const __m512i wanted = _mm512_maskz_loadu_epi32(inside, positions + at);
    const __mmask16 valid = _mm512_mask_cmpge_epi32_mask(inside, wanted, _mm512_setzero_si512());
    const __m512i product =
        _mm512_and_si512(_mm512_mullo_epi32(wanted, multiplier), product_bits);
    const __m512i ones = _mm512_slli_epi32(_mm512_and_si512(product, rest_bits), 1);
    alignas(64) int32_t lines[kLanes];
    alignas(64) int32_t keys[kLanes];
    alignas(64) uint32_t words[kLanes];
    alignas(32) uint16_t same[kLanes];
    alignas(32) uint16_t empty[kLanes];
    _mm512_store_si512(lines, _mm512_slli_epi32(_mm512_srl_epi32(product, to_line), 4));
    _mm512_store_si512(keys, _mm512_slli_epi32(_mm512_or_si512(ones, _mm512_set1_epi32(1)),
                                               SlotIndex::kBehindBits));
#pragma GCC unroll 16
    for (int32_t lane = 0; lane < kLanes; ++lane) {
      const uint32_t* const line = index.words + lines[lane];
      const __m512i all = _mm512_load_si512(line);
      const __m512i key = _mm512_set1_epi32(keys[lane]);
      const uint32_t found_in = _mm512_cmpeq_epi32_mask(_mm512_and_si512(all, key_bits), key);
      same[lane] = static_cast<uint16_t>(found_in);
      empty[lane] = _mm512_testn_epi32_mask(all, all);
      words[lane] = line[__builtin_ctz(found_in | 1U << kLanes)];  // behind the line, for none
    }
    const __mmask16 known = valid & lanes_with_bits(same);
    __m512i slots = _mm512_srl_epi32(_mm512_load_si512(words), to_slot);
    const __mmask16 full = valid & static_cast<__mmask16>(~(known | lanes_with_bits(empty)));
    if (__builtin_expect(full != 0, 0)) slots = look_behind(table, positions + at, full, slots);
    const __mmask16 hit = _mm512_mask_cmplt_epu32_mask(known | full, slots, num_slots);
    take_down(table, at, wanted, inside, valid, hit, slots, found);
  }
  return found.num_missed;
}

KVD_TARGET int32_t lookup(const Table& table, const int32_t* positions, int32_t n,
                          int32_t* winners, int32_t* missed) {
  const Found found{winners, missed, 0};
  fetch_shared(table, n);
  return table.has_index() ? lookup_in_index(table, positions, n, found)
                           : lookup_in_map(table, positions, n, found);
}

constexpr Kernel kAvx512{"avx512", scan, partition, emit, inspect, list, lookup};

}  // namespace

const Kernel* avx512_kernel() noexcept { return &kAvx512; }

}  // namespace kvd::residency
#else
namespace kvd::residency {
const Kernel* avx512_kernel() noexcept { return nullptr; }
}  // namespace kvd::residency
#endif
