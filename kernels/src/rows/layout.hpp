// Where the rows of requests stand: in the host region by block tables, on the device by slots.
//
// A request here is a number: the line of the block tables and of the watermarks that it has now.
// All offsets are 64-bit; what a call may touch is checked when the object is made, so that later a
// block id and a slot are compared with their limits and nothing else.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

namespace kvd::rows {

constexpr size_t kPartsMax = 8;
constexpr uint64_t kExtentMax = uint64_t{1} << 62;  // no sum of two extents overflows

// A row that was never written would be read, or one would be written past a gap: HoleError.
class Hole : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Where one row is: its block of the region, its place in the block, its slot on the device.
struct Place {
  uint32_t block;
  uint32_t row;
  uint32_t slot;
};
constexpr uint32_t kNoSlot = UINT32_MAX;

// Memory of somebody else, as long as the object that names it lives.
struct Memory {
  uint8_t* data;
  uint64_t bytes;
  bool writable;
};

// One part of every row, and where it stands at both ends. Strides are bytes.
//
//   region: offset + layer * layer_stride + block * block_stride + row * row_bytes
//   hot:    hot_offset + request * hot_request_stride + layer * hot_layer_stride
//           + slot * slot_stride
//   scratch rows, from slot num_slots on:
//           scratch_offset + request * hot_request_stride + (slot - num_slots) * slot_stride
struct Part {
  Memory region;
  uint64_t offset;
  uint64_t layer_stride;
  uint64_t block_stride;
  uint64_t row_bytes;
  Memory hot;
  uint64_t hot_offset;
  uint64_t hot_request_stride;
  uint64_t hot_layer_stride;
  uint64_t slot_stride;
  uint64_t scratch_offset;
};

// A part of one layer of one request: all that a kernel needs to turn places into addresses.
struct PartView {
  uint8_t* region;
  uint8_t* hot;
  uint8_t* scratch;  // as if it began with slot 0, so that one stride serves both
  uint64_t block_stride;
  uint64_t row_bytes;
  uint64_t slot_stride;
  uint32_t num_slots;

  uint8_t* in_region(const Place& place) const noexcept {
    return region + place.block * block_stride + place.row * row_bytes;
  }
  uint8_t* in_hot(uint32_t slot) const noexcept {
    return (slot < num_slots ? hot : scratch) + slot * slot_stride;
  }
};

// The parts of one layer of one request.
struct RowView {
  std::array<PartView, kPartsMax> parts;
  size_t count;
  std::span<const PartView> all() const noexcept { return {parts.data(), count}; }
};

// Block tables and watermarks, of all requests and layers.
class BlockTables {
 public:
  struct Shape {
    uint64_t requests;
    uint64_t layers;
    uint64_t blocks_max;    // of one request
    uint64_t block_tokens;  // rows of a block
    uint64_t num_blocks;    // of the region
  };

  // tables: [requests, blocks_max] block ids, or negative. written: [requests, layers], in each the
  // number of leading positions whose rows are in the region; shared with others who use it.
  // Throws std::invalid_argument.
  // rows: [requests, layers, tokens_max()], 1 where a row was written, for debugging; else null.
  BlockTables(const int32_t* tables, int64_t* written, uint8_t* rows, bool writable,
              const Shape& shape);

  const Shape& shape() const noexcept { return shape_; }
  uint64_t tokens_max() const noexcept { return shape_.blocks_max * shape_.block_tokens; }

  void check(int64_t request, int64_t layer) const;  // std::out_of_range
  uint64_t written(int64_t request, int64_t layer) const;
  // Raises the watermark to `tokens`: rows that came by another way than append.
  void add(int64_t request, int64_t layer, int64_t tokens) const;
  // Lowers the watermarks of all layers to `tokens`: what comes behind was rejected, or is another
  // request's.
  void truncate(int64_t request, int64_t tokens) const;

  // The block and row of a position. Throws std::out_of_range naming the position and its block id.
  Place locate(int64_t request, int64_t position) const;
  // Where rows are tracked: the first of [begin, end) below the watermark that was not written, or
  // end. Of a checked request and layer.
  uint64_t first_unwritten(int64_t request, int64_t layer, uint64_t begin, uint64_t end) const;
  void note(int64_t request, int64_t layer, uint64_t position) const noexcept;
  // As add, of a checked request and layer; rows stored before are seen by whoever sees the mark.
  void publish(int64_t request, int64_t layer, uint64_t tokens) const noexcept;

 private:
  int64_t* mark(int64_t request, int64_t layer) const noexcept {
    return written_ + static_cast<uint64_t>(request) * shape_.layers +
           static_cast<uint64_t>(layer);
  }
  uint8_t* rows_of(int64_t request, int64_t layer) const noexcept {
    return rows_ + static_cast<uint64_t>(mark(request, layer) - written_) * tokens_max();
  }
  uint64_t checked_tokens(int64_t tokens) const;
  void require_writable() const;

  const int32_t* tables_;
  int64_t* written_;
  uint8_t* rows_;
  bool writable_;
  Shape shape_;
};

std::string at_row(size_t number, int64_t position, int64_t request, int64_t layer);

}  // namespace kvd::rows
