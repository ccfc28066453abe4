// The order of things in copy_sfa: check all, begin the copies, attend, join.
#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace kvd::rows {
namespace {

constexpr size_t kPieceRows = 32;  // some five microseconds: what attention may have to wait for
constexpr uint32_t kResident = UINT32_MAX;
constexpr size_t kNearRows = 2;   // of the tile, fetched into L1 before they are widened
constexpr size_t kStripRows = 4;  // dot products between two looks at the next tile
constexpr size_t kLine = 64;

constexpr int kIntoL1 = 3;
constexpr int kIntoL2 = 2;

template <int where>
void fetch(const PartView& part, uint32_t slot) {
  const uint8_t* row = part.in_hot(slot);
  for (size_t at = 0; at < part.row_bytes; at += kLine) __builtin_prefetch(row + at, 0, where);
}

size_t pieces_of(size_t rows) { return (rows + kPieceRows - 1) / kPieceRows; }

std::string of_item(size_t number) { return "item " + std::to_string(number) + ": "; }

void require_within(size_t number, const char* name, int32_t value, size_t most) {
  if (value >= 0 && static_cast<size_t>(value) <= most) return;
  throw std::invalid_argument(of_item(number) + name + " is " + std::to_string(value) +
                              " but must be 0 to " + std::to_string(most));
}

}  // namespace

SparseAttention::SparseAttention(std::shared_ptr<const RowCopier> copier,
                                 const AttentionArrays& arrays, Element element, float scale,
                                 std::unique_ptr<Helper> helper)
    : copier_(std::move(copier)),
      kernels_(copier_->kernels()),
      in_(arrays),
      element_(element),
      scale_(scale),
      helper_(std::move(helper)),
      width_(padded(arrays.row_floats)),
      mixed_width_(padded(arrays.latent)),
      queries_(arrays.queries_max * arrays.heads * width_),
      tile_(kTileRows * width_),
      dots_(arrays.heads * kTileRows),
      tops_(arrays.queries_max * arrays.heads),
      sums_(arrays.queries_max * arrays.heads),
      keeps_(arrays.queries_max * arrays.heads),
      mixed_(arrays.queries_max * arrays.heads * mixed_width_),
      items_(arrays.batch),
      places_(arrays.batch * arrays.misses_max),
      pieces_(arrays.batch * pieces_of(arrays.misses_max)),
      stamps_(copier_->slots_end()),
      seen_(copier_->tables().shape().requests),
      wanted_(arrays.selected_max) {
  if (element == Element::kFp8) {
    throw std::invalid_argument("element is fp8: widen such rows first");
  }
  if (!(scale > 0) || !std::isfinite(scale)) {
    throw std::invalid_argument("scale is " + std::to_string(scale) + " but must be above 0");
  }
  if (arrays.latent < 1 || arrays.latent > arrays.row_floats) {
    throw std::invalid_argument("latent is " + std::to_string(arrays.latent) +
                                " but must be 1 to " + std::to_string(arrays.row_floats));
  }
  const size_t bytes = element_bytes(element);
  for (size_t part = 0; part < copier_->num_parts(); ++part) {
    if (copier_->part_bytes(part) % bytes != 0) {
      throw std::invalid_argument("part " + std::to_string(part) + " has rows of " +
                                  std::to_string(copier_->part_bytes(part)) +
                                  " bytes, no whole elements of " + std::to_string(bytes));
    }
  }
  if (copier_->row_bytes() != arrays.row_floats * bytes) {
    throw std::invalid_argument("queries have " + std::to_string(arrays.row_floats) +
                                " elements for rows of " +
                                std::to_string(copier_->row_bytes() / bytes));
  }
}

// --- checks --------------------------------------------------------------------------------------

void SparseAttention::plan(int64_t layer, size_t batch) {
  std::ranges::fill(seen_, uint8_t{0});
  num_pieces_ = 0;
  for (size_t number = 0; number < batch; ++number) plan_item(layer, number);
}

void SparseAttention::plan_item(int64_t layer, size_t number) {
  const int32_t* line = in_.items + 3 * number;
  const int32_t request = line[0];
  copier_->tables().check(request, layer);
  require_within(number, "query positions", line[1], in_.queries_max);
  require_within(number, "misses", line[2], in_.misses_max);
  if (seen_[static_cast<size_t>(request)]++ != 0) {
    throw std::invalid_argument(of_item(number) + "request " + std::to_string(request) +
                                " is in the batch already: give its positions in one item");
  }
  const auto misses = static_cast<size_t>(line[2]);
  Place* places = places_.data() + number * in_.misses_max;
  const size_t at = number * in_.misses_max;
  if (copier_->plan_reads(in_.positions + at, in_.slots + at, misses, request, layer, places) !=
      misses) {
    throw std::invalid_argument(of_item(number) + "a miss has no position");
  }
  items_[number] = {copier_->view(request, layer), static_cast<size_t>(line[1]), num_pieces_,
                    places};
  if (++stamp_ == 0) {
    std::ranges::fill(stamps_, 0u);
    stamp_ = 1;
  }
  for (size_t i = 0; i < misses; ++i) {
    uint32_t& stamp = stamps_[places[i].slot];
    if (stamp == stamp_) {
      throw std::invalid_argument(of_item(number) + "slot " + std::to_string(places[i].slot) +
                                  " is given to two misses");
    }
    stamp = stamp_;
  }
  check_places(number, misses);
  for (size_t i = 0; i < misses; i += kPieceRows) {
    Piece& piece = pieces_[num_pieces_++];
    piece.item = &items_[number];
    piece.places = {places + i, misses - i};
    piece.count = std::min(kPieceRows, misses - i);
    piece.done.store(false, std::memory_order_relaxed);
  }
}

void SparseAttention::check_places(size_t number, size_t misses) {
  const size_t count = items_[number].queries * in_.selected_max;
  const int32_t* places = in_.places + number * in_.queries_max * in_.selected_max;
  for (size_t i = 0; i < count; ++i) {
    const int32_t place = places[i];
    if (place == kNothing) continue;
    const auto wrong = [&](const std::string& what) {
      return of_item(number) + "place " + std::to_string(place) + " of query " +
             std::to_string(i / in_.selected_max) + " " + what;
    };
    if (place >= 0) {
      if (static_cast<uint64_t>(place) >= copier_->slots_end()) {
        throw std::out_of_range(wrong("is no slot: there are " +
                                      std::to_string(copier_->slots_end())));
      }
      if (stamps_[static_cast<size_t>(place)] == stamp_) {
        throw std::invalid_argument(wrong("is a slot that a miss is copied to"));
      }
    } else if (static_cast<size_t>(kFirstMiss - place) >= misses) {
      throw std::out_of_range(wrong("is miss " + std::to_string(kFirstMiss - place) + " of " +
                                    std::to_string(misses)));
    }
  }
}

// --- copies --------------------------------------------------------------------------------------

bool SparseAttention::take_piece() {
  const size_t next = next_piece_.fetch_add(1, std::memory_order_relaxed);
  if (next >= num_pieces_) return false;
  Piece& piece = pieces_[next];
  const int64_t begin = monotonic_ns();
  for (const PartView& part : piece.item->view.all()) {
    kernels_.gather(part, piece.places, piece.count);
  }
  copy_ns_.fetch_add(monotonic_ns() - begin, std::memory_order_relaxed);
  piece.done.store(true, std::memory_order_release);
  return true;
}

void SparseAttention::take_pieces(void* self) {
  while (static_cast<SparseAttention*>(self)->take_piece()) {
  }
}

// Returns when the rows of a piece are in their slots. Whoever has taken the piece is copying it.
void SparseAttention::require(uint32_t piece) {
  if (piece == kResident || pieces_[piece].done.load(std::memory_order_acquire)) return;
  const int64_t begin = monotonic_ns();
  for (int turns = 0; !pieces_[piece].done.load(std::memory_order_acquire); ++turns) {
    if (take_piece()) continue;
    pause_cpu();
    if (turns % 64 == 63) std::this_thread::yield();
  }
  wait_ns_ += monotonic_ns() - begin;
}

// --- attention -----------------------------------------------------------------------------------

void SparseAttention::attend(int64_t layer, size_t batch, bool ordered) {
  const int64_t begin = monotonic_ns();
  plan(layer, batch);
  const int64_t planned = monotonic_ns();
  wait_ns_ = 0;
  copy_ns_.store(0, std::memory_order_relaxed);
  next_piece_.store(0, std::memory_order_relaxed);
  const bool helped =
      num_pieces_ != 0 && helper_ != nullptr && helper_->begin(take_pieces, this);
  int64_t copied = 0;
  if (ordered) {
    const int64_t start = monotonic_ns();
    take_pieces(this);
    for (size_t i = 0; i < num_pieces_; ++i) require(static_cast<uint32_t>(i));
    copied = monotonic_ns() - start;
  }
  int64_t misses = 0;
  for (size_t number = 0; number < batch; ++number) {
    attend_item(number, ordered);
    misses += in_.items[3 * number + 2];
  }
  // Misses that no query reads are copied like all others: the caller's books say so.
  const int64_t attended = monotonic_ns();
  take_pieces(this);
  if (helped) helper_->end();
  wait_ns_ += monotonic_ns() - attended;
  times_ = {monotonic_ns() - begin, planned - begin, ordered ? copied : wait_ns_,
            copy_ns_.load(std::memory_order_relaxed), misses};
}

void SparseAttention::attend_item(size_t number, bool ordered) {
  const Item& item = items_[number];
  const size_t lines = item.queries * in_.heads;
  const size_t first = number * in_.queries_max * in_.heads;
  for (size_t line = 0; line < lines; ++line) {
    std::memcpy(queries_.data() + line * width_, in_.queries + (first + line) * in_.row_floats,
                in_.row_floats * sizeof(float));
  }
  std::fill_n(tops_.begin(), lines, -std::numeric_limits<float>::infinity());
  std::fill_n(sums_.begin(), lines, 0.0F);
  std::fill_n(mixed_.begin(), lines * mixed_width_, 0.0F);
  for (const bool missing : {false, true}) {
    if (ordered && missing) break;
    for (size_t query = 0; query < item.queries; ++query) {
      const size_t rows = select(number, query, item, !missing, missing || ordered);
      attend_rows(item, query, {wanted_.data(), rows});
    }
  }
  for (size_t line = 0; line < lines; ++line) {
    const float share = sums_[line] == 0.0F ? 0.0F : 1.0F / sums_[line];
    const float* mixed = mixed_.data() + line * mixed_width_;
    float* output = in_.output + (first + line) * in_.latent;
    for (size_t i = 0; i < in_.latent; ++i) output[i] = mixed[i] * share;
  }
}

size_t SparseAttention::select(size_t number, size_t query, const Item& item, bool hits,
                               bool misses) {
  const int32_t* places =
      in_.places + (number * in_.queries_max + query) * in_.selected_max;
  size_t rows = 0;
  for (size_t i = 0; i < in_.selected_max; ++i) {
    const int32_t place = places[i];
    if (place >= 0 && hits) {
      wanted_[rows++] = {static_cast<uint32_t>(place), kResident};
    } else if (place <= kFirstMiss && misses) {
      const auto miss = static_cast<size_t>(kFirstMiss - place);
      wanted_[rows++] = {item.places[miss].slot,
                         static_cast<uint32_t>(item.first_piece + miss / kPieceRows)};
    }
  }
  return rows;
}

void SparseAttention::fetch_resident(const Item& item, std::span<const Wanted> rows) {
  for (const Wanted& row : rows) {
    if (row.piece != kResident) continue;
    for (const PartView& part : item.view.all()) fetch<kIntoL2>(part, row.slot);
  }
}

void SparseAttention::fill_tile(const Item& item, std::span<const Wanted> rows) {
  size_t column = 0;
  for (const PartView& part : item.view.all()) {
    const size_t floats = part.row_bytes / element_bytes(element_);
    for (size_t r = 0; r < rows.size(); ++r) {
      fetch<kIntoL1>(part, rows[std::min(r + kNearRows, rows.size() - 1)].slot);
      const uint8_t* row = part.in_hot(rows[r].slot);
      float* line = tile_.data() + r * width_ + column;
      if (element_ == Element::kFloat32) {
        std::memcpy(line, row, part.row_bytes);
      } else {
        kernels_.widen_bfloat16(row, line, floats);
      }
    }
    column += floats;
  }
}

void SparseAttention::attend_rows(const Item& item, size_t query, std::span<const Wanted> rows) {
  const size_t first = query * in_.heads;
  fetch_resident(item, rows.first(std::min(kTileRows, rows.size())));
  while (!rows.empty()) {
    const auto tile = rows.first(std::min(kTileRows, rows.size()));
    rows = rows.subspan(tile.size());
    for (const Wanted& row : tile) require(row.piece);
    fill_tile(item, tile);
    // Memory works while the dot products are formed: strip by strip, because more fetches than fit
    // its queue would stand in the way of the arithmetic.
    for (size_t r = 0; r < tile.size(); r += kStripRows) {
      if (r < rows.size()) {
        fetch_resident(item, rows.subspan(r, std::min(kStripRows, rows.size() - r)));
      }
      kernels_.dots(queries_.data() + first * width_, tile_.data() + r * width_, dots_.data() + r,
                    in_.heads, std::min(kStripRows, tile.size() - r), width_);
    }
    for (size_t h = 0; h < in_.heads; ++h) {
      kernels_.weigh(dots_.data() + h * kTileRows, tile.size(), scale_, &tops_[first + h],
                     &sums_[first + h], &keeps_[first + h]);
    }
    kernels_.mix(dots_.data(), keeps_.data() + first, tile_.data(),
                 mixed_.data() + first * mixed_width_, in_.heads, tile.size(), width_,
                 mixed_width_);
  }
}

}  // namespace kvd::rows
