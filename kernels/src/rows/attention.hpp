// copy_sfa: sparse attention over selected rows while those that are missing are copied.
//
// For each request of a batch, in turn: the rows that are in its hot buffer are attended to, a tile
// of kTileRows at a time, then the missing ones, joined by an online softmax. Meanwhile a helper
// copies the missing rows of the whole batch, in pieces, each announced when it is complete. What
// the helper has not begun when it is needed, attention copies itself.
//
// In the ordered form all missing rows are copied first and every row is attended to in the order
// of the selection: the same arithmetic, bit for bit, as if all rows had been resident.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "copier.hpp"
#include "helper.hpp"
#include "kernels.hpp"

namespace kvd::rows {

constexpr int32_t kNothing = -1;    // a place: padding
constexpr int32_t kFirstMiss = -2;  // a place: -2 - n is item n of the request's misses

// What attention reads and writes: B requests of a batch, P query positions each, K selected rows,
// M misses, H heads, R = floats of a row, L of its value.
struct AttentionArrays {
  const float* queries;     // [B, P, H, R]
  const int32_t* places;    // [B, P, K]
  const int32_t* items;     // [B, 3]: request, query positions, misses
  const int32_t* positions; // [B, M], of the misses; negative: no row
  const int32_t* slots;     // [B, M]
  float* output;            // [B, P, H, L]
  size_t batch, queries_max, heads, row_floats, selected_max, misses_max, latent;
};

// Nanoseconds of one call. hidden share of the copies = 1 - wait_ns / copy_ns.
struct AttentionTimes {
  int64_t total_ns;
  int64_t plan_ns;  // checks
  int64_t wait_ns;  // attention stood still for missing rows, or copied them itself
  int64_t copy_ns;  // spent copying, by whom ever
  int64_t misses;
};

class SparseAttention {
 public:
  // Throws std::invalid_argument naming the argument.
  SparseAttention(std::shared_ptr<const RowCopier> copier, const AttentionArrays& arrays,
                  Element element, float scale, std::unique_ptr<Helper> helper);

  // Attends for items [0, batch) of the arrays in one layer. On an error nothing has changed.
  // Throws std::out_of_range, std::invalid_argument, Hole.
  void attend(int64_t layer, size_t batch, bool ordered);
  const AttentionTimes& times() const noexcept { return times_; }
  std::atomic_flag& busy() noexcept { return busy_; }

 private:
  struct Item {
    RowView view;
    size_t queries;
    size_t first_piece;
    const Place* places;  // of the misses, indexed by item number
  };
  struct Piece {
    const Item* item;
    std::span<const Place> places;  // of the piece, and what comes after it
    size_t count;
    std::atomic<bool> done;
  };
  struct Wanted {
    uint32_t slot;
    uint32_t piece;  // of the copy that brings it, kResident when it is there
  };

  void plan(int64_t layer, size_t batch);
  void plan_item(int64_t layer, size_t number);
  void check_places(size_t number, size_t misses);
  static void take_pieces(void* self);
  bool take_piece();
  void require(uint32_t piece);
  void attend_item(size_t number, bool ordered);
  void attend_rows(const Item& item, size_t query, std::span<const Wanted> rows);
  void fill_tile(const Item& item, std::span<const Wanted> rows);
  static void fetch_resident(const Item& item, std::span<const Wanted> rows);
  size_t select(size_t number, size_t query, const Item& item, bool hits, bool misses);

  std::shared_ptr<const RowCopier> copier_;
  const RowKernels& kernels_;
  AttentionArrays in_;
  Element element_;
  float scale_;
  std::unique_ptr<Helper> helper_;
  size_t width_;        // of a tile's line, floats
  size_t mixed_width_;
  std::vector<float> queries_;  // [P, H, width]: of one request, padded
  std::vector<float> tile_;     // [kTileRows, width]
  std::vector<float> dots_;     // [H, kTileRows]
  std::vector<float> tops_, sums_, keeps_;  // [P, H]
  std::vector<float> mixed_;                // [P, H, mixed_width]
  std::vector<Item> items_;
  std::vector<Place> places_;         // [B, M]
  std::vector<Piece> pieces_;
  std::vector<uint32_t> stamps_;      // by slot: of the request whose miss gets it
  std::vector<uint8_t> seen_;         // by request: is in this batch
  std::vector<Wanted> wanted_;        // [K]
  uint32_t stamp_ = 0;
  size_t num_pieces_ = 0;
  std::atomic<size_t> next_piece_{0};
  std::atomic<int64_t> copy_ns_{0};
  int64_t wait_ns_ = 0;
  AttentionTimes times_{};
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};

}  // namespace kvd::rows
