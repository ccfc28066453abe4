// What bench.sparse compares with, compiled by it; no part of what is shipped.
//
// LruScan is the scheme of engines today: slots in a list by recency, all of which a step walks.
// LruList counts the misses of exact LRU. read_scores is one pass over the scores: the limit.
#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

// Marks by position, shared by all buffers of a thread, as the scan's scheme has it.
struct Marks {
  explicit Marks(int32_t positions_max)
      : steps(static_cast<size_t>(positions_max)), at(static_cast<size_t>(positions_max)) {}
  std::vector<uint32_t> steps;
  std::vector<int32_t> at;
  uint32_t step = 0;
};

class LruScan {
 public:
  LruScan(int32_t slots, Marks* marks)
      : marks_(marks), tokens_(slots, -1), order_(slots), hits_(slots), others_(slots) {
    for (int32_t slot = 0; slot < slots; ++slot) order_[slot] = slot;
  }

  // Returns the number of loads; places[i] is the slot of selected[i].
  int32_t step(const int32_t* selected, int32_t n, int32_t* places) {
    const uint32_t step = ++marks_->step;
    for (int32_t i = 0; i < n; ++i) {
      places[i] = -1;
      if (marks_->steps[selected[i]] == step) continue;
      marks_->steps[selected[i]] = step;
      marks_->at[selected[i]] = i;
    }
    int32_t num_hits = 0;
    int32_t num_others = 0;
    for (const int32_t slot : order_) {
      const int32_t token = tokens_[slot];
      if (token >= 0 && marks_->steps[token] == step) {
        places[marks_->at[token]] = slot;
        hits_[num_hits++] = slot;
      } else {
        others_[num_others++] = slot;
      }
    }
    int32_t num_loads = 0;
    for (int32_t i = 0; i < n && num_loads < num_others; ++i) {
      if (places[i] >= 0 || marks_->at[selected[i]] != i) continue;
      places[i] = others_[num_loads++];
      tokens_[places[i]] = selected[i];
    }
    // The oldest first: what was not used, what was loaded, what was hit.
    const auto loaded = others_.begin() + num_loads;
    auto next = std::copy(loaded, others_.begin() + num_others, order_.begin());
    next = std::copy(others_.begin(), loaded, next);
    std::copy(hits_.begin(), hits_.begin() + num_hits, next);
    return num_loads;
  }

 private:
  Marks* marks_;
  std::vector<int32_t> tokens_, order_, hits_, others_;
};

class LruList {
 public:
  LruList(int32_t slots, int32_t positions_max)
      : slots_(slots), last_used_(positions_max, 0), where_(positions_max, -1) {}

  // Returns the misses; the least recently used lose their place, never one of this step.
  int32_t step(const int32_t* selected, int32_t n) {
    ++step_;
    int32_t num_misses = 0;
    for (int32_t i = 0; i < n; ++i) {
      const int32_t token = selected[i];
      if (where_[token] < 0) {
        ++num_misses;
        where_[token] = 1;
        resident_.push_back(token);
      }
      last_used_[token] = step_;
    }
    const auto excess = static_cast<int64_t>(resident_.size()) - slots_;
    if (excess > 0) {
      std::nth_element(resident_.begin(), resident_.begin() + excess, resident_.end(),
                       [this](int32_t a, int32_t b) { return last_used_[a] < last_used_[b]; });
      for (int64_t i = 0; i < excess; ++i) where_[resident_[i]] = -1;
      resident_.erase(resident_.begin(), resident_.begin() + excess);
    }
    return num_misses;
  }

 private:
  int32_t slots_;
  std::vector<uint32_t> last_used_;
  std::vector<int32_t> where_, resident_;
  uint32_t step_ = 0;
};

}  // namespace

extern "C" {
void* marks_new(int32_t positions_max) { return new Marks(positions_max); }
void marks_delete(void* marks) { delete static_cast<Marks*>(marks); }
void* scan_new(int32_t slots, void* marks) {
  return new LruScan(slots, static_cast<Marks*>(marks));
}
void scan_delete(void* scan) { delete static_cast<LruScan*>(scan); }
int32_t scan_step(void* scan, const int32_t* selected, int32_t n, int32_t* places) {
  return static_cast<LruScan*>(scan)->step(selected, n, places);
}
void* lru_new(int32_t slots, int32_t positions_max) { return new LruList(slots, positions_max); }
void lru_delete(void* lru) { delete static_cast<LruList*>(lru); }
int32_t lru_step(void* lru, const int32_t* selected, int32_t n) {
  return static_cast<LruList*>(lru)->step(selected, n);
}
float read_scores(const float* scores, int64_t n) {
  constexpr int64_t kLanes = 64;  // several vectors, so that no chain of them is waited for
  float most[kLanes];
  std::fill(most, most + kLanes, -1e30F);
  for (int64_t at = 0; at + kLanes <= n; at += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      most[lane] = scores[at + lane] > most[lane] ? scores[at + lane] : most[lane];
    }
  }
  return *std::max_element(most, most + kLanes);
}
}
