// Checks of requests, positions and block ids.
#include "layout.hpp"

#include <algorithm>

namespace kvd::rows {

std::string at_row(size_t number, int64_t position, int64_t request, int64_t layer) {
  return "row " + std::to_string(number) + ": position " + std::to_string(position) +
         " of request " + std::to_string(request) + " layer " + std::to_string(layer);
}

BlockTables::BlockTables(const int32_t* tables, int64_t* written, uint8_t* rows, bool writable,
                         const Shape& shape)
    : tables_(tables), written_(written), rows_(rows), writable_(writable), shape_(shape) {
  constexpr uint64_t kPositionsMax = INT32_MAX;
  if (shape.block_tokens < 1 || shape.block_tokens > kPositionsMax) {
    throw std::invalid_argument("block_tokens is " + std::to_string(shape.block_tokens) +
                                " but must be 1 to 2**31 - 1");
  }
  if (shape.num_blocks < 1 || shape.num_blocks > kPositionsMax) {
    throw std::invalid_argument("num_blocks is " + std::to_string(shape.num_blocks) +
                                " but must be 1 to 2**31 - 1");
  }
  if (shape.requests < 1 || shape.layers < 1 || shape.blocks_max < 1) {
    throw std::invalid_argument("tables and written must have a request, a layer and a block");
  }
}

void BlockTables::check(int64_t request, int64_t layer) const {
  const auto refuse = [](const char* name, int64_t value, uint64_t limit) {
    throw std::out_of_range(std::string(name) + " is " + std::to_string(value) +
                            " but must be 0 to " + std::to_string(limit - 1));
  };
  if (request < 0 || static_cast<uint64_t>(request) >= shape_.requests) {
    refuse("request", request, shape_.requests);
  }
  if (layer < 0 || static_cast<uint64_t>(layer) >= shape_.layers) {
    refuse("layer", layer, shape_.layers);
  }
}

uint64_t BlockTables::written(int64_t request, int64_t layer) const {
  check(request, layer);
  const int64_t tokens = __atomic_load_n(mark(request, layer), __ATOMIC_ACQUIRE);
  return tokens < 0 ? 0 : static_cast<uint64_t>(tokens);
}

uint64_t BlockTables::checked_tokens(int64_t tokens) const {
  if (tokens < 0 || static_cast<uint64_t>(tokens) > tokens_max()) {
    throw std::invalid_argument("tokens is " + std::to_string(tokens) + " but must be 0 to " +
                                std::to_string(tokens_max()));
  }
  return static_cast<uint64_t>(tokens);
}

void BlockTables::require_writable() const {
  if (!writable_) throw std::invalid_argument("written is read-only: another process moves it");
}

void BlockTables::publish(int64_t request, int64_t layer, uint64_t tokens) const noexcept {
  int64_t* word = mark(request, layer);
  if (__atomic_load_n(word, __ATOMIC_RELAXED) < static_cast<int64_t>(tokens)) {
    __atomic_store_n(word, static_cast<int64_t>(tokens), __ATOMIC_RELEASE);
  }
}

void BlockTables::add(int64_t request, int64_t layer, int64_t tokens) const {
  check(request, layer);
  require_writable();
  publish(request, layer, checked_tokens(tokens));
}

void BlockTables::truncate(int64_t request, int64_t tokens) const {
  check(request, 0);
  require_writable();
  const auto limit = static_cast<int64_t>(checked_tokens(tokens));
  for (uint64_t layer = 0; layer < shape_.layers; ++layer) {
    int64_t* word = mark(request, static_cast<int64_t>(layer));
    if (__atomic_load_n(word, __ATOMIC_RELAXED) > limit) {
      __atomic_store_n(word, limit, __ATOMIC_RELEASE);
    }
    if (rows_ == nullptr) continue;
    uint8_t* rows = rows_of(request, static_cast<int64_t>(layer));
    std::fill(rows + limit, rows + tokens_max(), uint8_t{0});
  }
}

uint64_t BlockTables::first_unwritten(int64_t request, int64_t layer, uint64_t begin,
                                      uint64_t end) const {
  if (rows_ == nullptr) return end;
  const uint8_t* rows = rows_of(request, layer);
  const uint64_t known = std::min(end, tokens_max());
  return static_cast<uint64_t>(std::find(rows + std::min(begin, known), rows + known, 0) - rows);
}

void BlockTables::note(int64_t request, int64_t layer, uint64_t position) const noexcept {
  if (rows_ != nullptr) rows_of(request, layer)[position] = 1;
}

Place BlockTables::locate(int64_t request, int64_t position) const {
  const auto at = static_cast<uint64_t>(position);
  const uint64_t index = at / shape_.block_tokens;
  if (position < 0 || index >= shape_.blocks_max) {
    throw std::out_of_range("position " + std::to_string(position) + " is outside the " +
                            std::to_string(tokens_max()) + " tokens of a block table");
  }
  const int32_t block = tables_[static_cast<uint64_t>(request) * shape_.blocks_max + index];
  if (block < 0 || static_cast<uint64_t>(block) >= shape_.num_blocks) {
    throw std::out_of_range("position " + std::to_string(position) + " of request " +
                            std::to_string(request) + " is in block " + std::to_string(block) +
                            ", which is none of the " + std::to_string(shape_.num_blocks) +
                            " of the region");
  }
  return {static_cast<uint32_t>(block), static_cast<uint32_t>(at - index * shape_.block_tokens),
          kNoSlot};
}

}  // namespace kvd::rows
