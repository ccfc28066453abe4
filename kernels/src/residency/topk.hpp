// The k best of a row of scores, in the order of positions.
#pragma once

#include <cstdint>

#include "kernels.hpp"
#include "memory.hpp"

namespace kvd::residency {

// What the search needs: room for all scores of a row.
class TopKRoom {
 public:
  explicit TopKRoom(int64_t positions_max);

  // Writes min(k, n) positions, ascending, and returns how many. Ties go to the lower position; NaN
  // counts as -inf. `carried` is where the last step's search ended, NaN for none; it becomes where
  // the next one may start. It bears on the time alone, never on the result.
  int32_t top_k(const Kernel& kernel, const Scores& scores, int64_t n, int64_t k, float* carried,
                int32_t* positions);

 private:
  int64_t collect(const Kernel& kernel, const Scores& scores, int64_t n, int64_t k, float carried);
  int64_t take_all(const Scores& scores, int64_t n);
  float sampled_threshold(const Kernel& kernel, const Scores& scores, int64_t n, double rank);
  uint32_t key_at_rank(const Kernel& kernel, const uint32_t* keys, int64_t n, int64_t rank);

  Memory memory_;
  Candidates found_{};
  uint32_t* samples_ = nullptr;
  uint32_t* parts_[3] = {};
};

}  // namespace kvd::residency
