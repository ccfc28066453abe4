// Most scores are far from the best k. So a threshold a little below the k-th is guessed, one pass
// keeps what reaches it, and the exact k are found among those few. The guess is where the last
// step's search ended, or a rank among samples. A guess too high keeps fewer than k, a guess too
// low more than there is patience for; then another one is made, and at last all are kept.
#include "topk.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace kvd::residency {
namespace {

constexpr int64_t kSamplesMax = 4096;
constexpr int64_t kSmall = 48;  // keys that are not worth a partition
constexpr int64_t kPivots = 15;
constexpr double kOver = 1.25;       // how far below k a sampled threshold aims
constexpr int64_t kMargin = 8;       // k / kMargin more are aimed at by a carried one
constexpr int64_t kPatience = 8;     // candidates per k that a carried one may keep
constexpr float kLowest = -std::numeric_limits<float>::infinity();

size_t room_bytes(int64_t positions_max);

struct Room {
  Candidates found;
  uint32_t* samples;
  uint32_t* parts[3];
};

Room carve(Carver& carver, int64_t positions_max) {
  const auto room = static_cast<size_t>(positions_max + kKeysSpare);
  Room made{};
  made.found = {carver.take<uint32_t>(room), carver.take<int32_t>(room)};
  made.samples = carver.take<uint32_t>(static_cast<size_t>(kSamplesMax));
  for (uint32_t*& part : made.parts) part = carver.take<uint32_t>(room);
  return made;
}

size_t room_bytes(int64_t positions_max) {
  Carver counting(nullptr);
  carve(counting, positions_max);
  return counting.used();
}

uint32_t nth_key(const uint32_t* keys, int64_t n, int64_t rank) {
  uint32_t sorted[kSmall];
  std::copy(keys, keys + n, sorted);
  std::nth_element(sorted, sorted + rank, sorted + n, std::greater<>());
  return sorted[rank];
}

// A key whose rank is about that asked for.
uint32_t pivot_of(const uint32_t* keys, int64_t n, int64_t rank) {
  uint32_t some[kPivots];
  for (int64_t at = 0; at < kPivots; ++at) some[at] = keys[(at + 1) * n / (kPivots + 1)];
  return nth_key(some, kPivots, std::min(rank * kPivots / n, kPivots - 1));
}

}  // namespace

TopKRoom::TopKRoom(int64_t positions_max) : memory_(room_bytes(positions_max)) {
  Carver carver(memory_.data());
  const Room room = carve(carver, positions_max);
  found_ = room.found;
  samples_ = room.samples;
  std::copy(std::begin(room.parts), std::end(room.parts), parts_);
}

int32_t TopKRoom::top_k(const Kernel& kernel, const Scores& scores, int64_t n, int64_t k,
                        float* carried, int32_t* positions) {
  if (n <= k) {
    std::iota(positions, positions + n, 0);
    return static_cast<int32_t>(n);
  }
  const int64_t count = collect(kernel, scores, n, k, *carried);
  const uint32_t kth = key_at_rank(kernel, found_.keys, count, k - 1);
  const int64_t next = std::min(count - 1, k + k / kMargin);
  *carried = score_of(key_at_rank(kernel, found_.keys, count, next));
  kernel.emit(found_, count, kth, k, positions);
  return static_cast<int32_t>(k);
}

// At least k candidates, the best k among them.
int64_t TopKRoom::collect(const Kernel& kernel, const Scores& scores, int64_t n, int64_t k,
                          float carried) {
  if (carried > kLowest) {  // not for NaN
    const int64_t count = kernel.scan(scores, n, carried, std::min(n, kPatience * k), found_);
    if (count >= k) return count;
  }
  for (double aim = kOver * static_cast<double>(k); aim < static_cast<double>(n); aim *= 2) {
    const float threshold =
        sampled_threshold(kernel, scores, n, aim / static_cast<double>(n));
    if (!(threshold > kLowest)) break;
    const int64_t count = kernel.scan(scores, n, threshold, n, found_);
    if (count >= k) return count;
  }
  return take_all(scores, n);
}

int64_t TopKRoom::take_all(const Scores& scores, int64_t n) {
  for (int64_t at = 0; at < n; ++at) {
    found_.keys[at] = key_of(scores.at(at));
    found_.positions[at] = static_cast<int32_t>(at);
  }
  return n;
}

// A score that about this share of all scores reaches.
float TopKRoom::sampled_threshold(const Kernel& kernel, const Scores& scores, int64_t n,
                                  double share) {
  const int64_t count = std::clamp<int64_t>(n / 16, 1, kSamplesMax);
  const int64_t stride = n / count;
  for (int64_t at = 0; at < count; ++at) {
    samples_[at] = key_of(scores.at(at * stride + at * 7 % stride));
  }
  const auto rank = static_cast<int64_t>(share * static_cast<double>(count)) + 8;
  return score_of(key_at_rank(kernel, samples_, count, std::min(rank, count - 1)));
}

// The key of a rank, 0 for the greatest, by partitions of what is left.
uint32_t TopKRoom::key_at_rank(const Kernel& kernel, const uint32_t* keys, int64_t n,
                               int64_t rank) {
  const uint32_t* left = keys;
  for (;;) {
    if (n <= kSmall) return nth_key(left, n, rank);
    const uint32_t pivot = pivot_of(left, n, rank);
    uint32_t* const greater = left == parts_[0] ? parts_[1] : parts_[0];
    uint32_t* const less = left == parts_[2] ? parts_[1] : parts_[2];
    const Partition sizes = kernel.partition(left, n, pivot, greater, less);
    if (rank < sizes.greater) {
      left = greater;
      n = sizes.greater;
    } else if (rank < n - sizes.less) {
      return pivot;
    } else {
      rank -= n - sizes.less;
      left = less;
      n = sizes.less;
    }
  }
}

}  // namespace kvd::residency
