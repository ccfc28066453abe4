// gather_rows and append_rows: rows of one layer of one request between the region and the device.
//
// Every call checks all of its rows before the first byte moves, and keeps what it has checked:
// what the caller's lists say later does not matter.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "helper.hpp"
#include "kernels.hpp"
#include "layout.hpp"

namespace kvd::rows {

// The caller's lists of rows, of one call at a time: at most `capacity` of them.
struct RowList {
  RowList(const int32_t* positions_of, const int32_t* slots_of, size_t capacity,
          std::vector<const uint8_t*> sources_of)
      : positions(positions_of),
        slots(slots_of),
        sources(std::move(sources_of)),
        places(capacity),
        taken(capacity) {}

  const int32_t* positions;             // negative: no row
  const int32_t* slots;
  std::vector<const uint8_t*> sources;  // rows to append, one array for each part; may be empty
  // Of the call that runs: its rows, and which items of the list they are.
  std::vector<Place> places;
  std::vector<uint32_t> taken;
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
};

// Throws std::invalid_argument when another call has it.
class Using {
 public:
  Using(std::atomic_flag& flag, const char* what);
  ~Using() { flag_.clear(std::memory_order_release); }
  Using(const Using&) = delete;
  Using& operator=(const Using&) = delete;

 private:
  std::atomic_flag& flag_;
};

class RowCopier {
 public:
  // Throws std::invalid_argument naming a part whose rows do not fit its memory.
  RowCopier(std::shared_ptr<const BlockTables> tables, std::vector<Part> parts, uint64_t num_slots,
            uint64_t scratch_rows, const RowKernels& kernels, std::unique_ptr<Helper> helper);

  const BlockTables& tables() const noexcept { return *tables_; }
  const RowKernels& kernels() const noexcept { return kernels_; }
  size_t num_parts() const noexcept { return parts_.size(); }
  uint64_t row_bytes() const noexcept { return row_bytes_; }  // of all parts
  uint64_t part_bytes(size_t part) const noexcept { return parts_[part].row_bytes; }
  uint64_t slots_end() const noexcept { return num_slots_ + scratch_rows_; }
  RowView view(int64_t request, int64_t layer) const noexcept;

  // Region to slots, of items [0, count) of the list; returns the bytes moved.
  // Throws std::out_of_range, Hole.
  uint64_t gather(RowList& rows, int64_t request, int64_t layer, size_t count) const;
  // The same rows, only read; returns a word made of them.
  uint64_t read(RowList& rows, int64_t request, int64_t layer, size_t count, bool far) const;
  // Device rows to the region, and to their slots (none: kNoSlot or negative).
  uint64_t append(RowList& rows, int64_t request, int64_t layer, size_t count) const;

  // Fills places from items of a list; returns how many there are. Nothing has moved.
  size_t plan_reads(const int32_t* positions, const int32_t* slots, size_t count, int64_t request,
                    int64_t layer, Place* places) const;

 private:
  size_t plan_writes(RowList& rows, int64_t request, int64_t layer, size_t count,
                     uint64_t& end) const;
  uint32_t checked_slot(int32_t slot, size_t number, int64_t position, int64_t request,
                        int64_t layer) const;

  std::shared_ptr<const BlockTables> tables_;
  std::vector<Part> parts_;
  uint64_t num_slots_;
  uint64_t scratch_rows_;
  uint64_t row_bytes_ = 0;
  const RowKernels& kernels_;
  std::unique_ptr<Helper> helper_;
};

}  // namespace kvd::rows
