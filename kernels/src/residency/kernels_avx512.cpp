// AVX-512: sixteen at a time, what is kept is compressed.
#include "avx512.hpp"

#if defined(__x86_64__)

namespace kvd::residency {
namespace {

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

constexpr Kernel kAvx512{"avx512", scan,          partition,    emit,          inspect,
                         list,     lookup_avx512, sweep_avx512, forget_avx512, put_avx512};

}  // namespace

const Kernel* avx512_kernel() noexcept { return &kAvx512; }

}  // namespace kvd::residency
#else
namespace kvd::residency {
const Kernel* avx512_kernel() noexcept { return nullptr; }
}  // namespace kvd::residency
#endif
