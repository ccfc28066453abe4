// The indexer's scores: how much a query wants each row of its request's keys.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.hpp"
#include "layout.hpp"

namespace kvd::rows {

// Where index keys stand: one part, in blocks of the tables. An fp8 row is its values and then its
// scale, a float.
struct KeyLayout {
  Memory memory;
  uint64_t offset;
  uint64_t layer_stride;
  uint64_t block_stride;
  uint64_t row_bytes;
  Element element;
};

// N queries of H heads, each of D floats; C positions at most.
struct ScoreArrays {
  const float* queries;  // [N, H, D]
  const float* weights;  // [N, H]
  float* scores;         // [N, C]
  size_t queries_max, heads, key_floats, context_max;
};

class IndexScorer {
 public:
  // Throws std::invalid_argument naming the argument.
  IndexScorer(std::shared_ptr<const BlockTables> tables, const KeyLayout& keys,
              const ScoreArrays& arrays, const RowKernels& kernels);

  // Fills scores[query, :tokens] from the keys at [0, tokens) of a request and layer.
  // Throws std::out_of_range, std::invalid_argument, Hole; on an error nothing has changed.
  void score(int64_t query, int64_t request, int64_t layer, int64_t tokens);
  std::atomic_flag& busy() noexcept { return busy_; }

 private:
  void check(int64_t query, int64_t request, int64_t layer, int64_t tokens);
  void score_run(const uint8_t* rows, size_t count, const float* weights, float* scores);

  std::shared_ptr<const BlockTables> tables_;
  KeyLayout keys_;
  ScoreArrays in_;
  const RowKernels& kernels_;
  size_t width_;
  std::vector<float> query_;  // [H, width]
  std::vector<float> tile_;   // [kTileRows, width]
  std::vector<float> dots_;   // [H, kTileRows]
  std::vector<uint32_t> blocks_;  // [blocks of a request]
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};

}  // namespace kvd::rows
