// Scores tile by tile, in the order of positions.
#include "scorer.hpp"

#include <algorithm>
#include <cstring>

#include "extent.hpp"

namespace kvd::rows {
namespace {

constexpr size_t kFetchAheadRows = 8;  // of consecutive keys: the hardware follows the rest

}  // namespace

IndexScorer::IndexScorer(std::shared_ptr<const BlockTables> tables, const KeyLayout& keys,
                         const ScoreArrays& arrays, const RowKernels& kernels)
    : tables_(std::move(tables)),
      keys_(keys),
      in_(arrays),
      kernels_(kernels),
      width_(padded(arrays.key_floats)),
      query_(arrays.heads * width_),
      tile_(kTileRows * width_),
      dots_(arrays.heads * kTileRows),
      blocks_(tables_->shape().blocks_max) {
  const size_t scale_bytes = keys.element == Element::kFp8 ? kFp8ScaleBytes : 0;
  const size_t expected = arrays.key_floats * element_bytes(keys.element) + scale_bytes;
  if (keys.row_bytes != expected) {
    throw std::invalid_argument("row_bytes is " + std::to_string(keys.row_bytes) +
                                " but a key of " + std::to_string(arrays.key_floats) +
                                " elements has " + std::to_string(expected));
  }
  const BlockTables::Shape& shape = tables_->shape();
  Extent("the keys", keys.offset)
      .reach(keys.layer_stride, shape.layers)
      .reach(keys.block_stride, shape.num_blocks)
      .reach(keys.row_bytes, shape.block_tokens)
      .fit(keys.row_bytes, keys.memory.bytes);
}

void IndexScorer::check(int64_t query, int64_t request, int64_t layer, int64_t tokens) {
  if (query < 0 || static_cast<size_t>(query) >= in_.queries_max) {
    throw std::out_of_range("query is " + std::to_string(query) + " but must be 0 to " +
                            std::to_string(in_.queries_max - 1));
  }
  const uint64_t written = tables_->written(request, layer);
  if (tokens < 0 || static_cast<size_t>(tokens) > in_.context_max) {
    throw std::invalid_argument("tokens is " + std::to_string(tokens) + " but must be 0 to " +
                                std::to_string(in_.context_max));
  }
  if (static_cast<uint64_t>(tokens) > written) {
    throw Hole("position " + std::to_string(written) + " of request " + std::to_string(request) +
               " layer " + std::to_string(layer) + " was never written: " +
               std::to_string(written) + " rows are, scores of " + std::to_string(tokens) +
               " were asked for");
  }
  const uint64_t hole =
      tables_->first_unwritten(request, layer, 0, static_cast<uint64_t>(tokens));
  if (hole < static_cast<uint64_t>(tokens)) {
    throw Hole("position " + std::to_string(hole) + " of request " + std::to_string(request) +
               " layer " + std::to_string(layer) + " was never written, although " +
               std::to_string(written) + " rows are said to be");
  }
  const auto block_tokens = static_cast<int64_t>(tables_->shape().block_tokens);
  for (int64_t at = 0; at < tokens; at += block_tokens) {
    blocks_[static_cast<size_t>(at / block_tokens)] = tables_->locate(request, at).block;
  }
}

void IndexScorer::score(int64_t query, int64_t request, int64_t layer, int64_t tokens) {
  check(query, request, layer, tokens);
  const auto number = static_cast<size_t>(query);
  for (size_t h = 0; h < in_.heads; ++h) {
    std::memcpy(query_.data() + h * width_,
                in_.queries + (number * in_.heads + h) * in_.key_floats,
                in_.key_floats * sizeof(float));
  }
  const float* weights = in_.weights + number * in_.heads;
  float* scores = in_.scores + number * in_.context_max;
  const uint8_t* layer_keys =
      keys_.memory.data + keys_.offset + static_cast<uint64_t>(layer) * keys_.layer_stride;
  const auto block_tokens = static_cast<size_t>(tables_->shape().block_tokens);
  const auto count = static_cast<size_t>(tokens);
  for (size_t at = 0; at < count; at += block_tokens) {
    const uint8_t* rows = layer_keys + blocks_[at / block_tokens] * keys_.block_stride;
    score_run(rows, std::min(block_tokens, count - at), weights, scores + at);
  }
}

// Consecutive rows.
void IndexScorer::score_run(const uint8_t* rows, size_t count, const float* weights,
                            float* scores) {
  const size_t values = in_.key_floats;
  while (count > 0) {
    const size_t tile = std::min(kTileRows, count);
    for (size_t r = 0; r < tile; ++r) {
      const uint8_t* row = rows + r * keys_.row_bytes;
      float* line = tile_.data() + r * width_;
      __builtin_prefetch(row + kFetchAheadRows * keys_.row_bytes);
      if (keys_.element == Element::kFloat32) {
        std::memcpy(line, row, keys_.row_bytes);
      } else if (keys_.element == Element::kBfloat16) {
        kernels_.widen_bfloat16(row, line, values);
      } else {
        float scale;
        std::memcpy(&scale, row + values, sizeof scale);
        kernels_.widen_fp8(row, line, values, scale);
      }
    }
    kernels_.dots(query_.data(), tile_.data(), dots_.data(), in_.heads, tile, width_);
    kernels_.score(dots_.data(), weights, scores, in_.heads, tile);
    rows += tile * keys_.row_bytes, scores += tile, count -= tile;
  }
}

}  // namespace kvd::rows
