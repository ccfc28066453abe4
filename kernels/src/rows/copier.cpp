// Checks of row lists, and the loops that share a gather out.
#include "copier.hpp"

#include <algorithm>
#include <cstring>

#include "extent.hpp"

namespace kvd::rows {
namespace {

constexpr size_t kPieceRows = 256;  // some forty microseconds: far more than the start of a piece
constexpr size_t kShareRows = 512;  // fewer are copied sooner than a thread has woken

void check_part(const Part& part, size_t number, const BlockTables::Shape& shape, uint64_t slots,
                uint64_t scratch_rows) {
  const std::string name = "part " + std::to_string(number) + ": its ";
  if (part.row_bytes < 1 || part.row_bytes > UINT32_MAX) {
    throw std::invalid_argument(name + "row_bytes is " + std::to_string(part.row_bytes) +
                                " but must be 1 to 2**32 - 1");
  }
  if (part.slot_stride < part.row_bytes) {
    throw std::invalid_argument(name + "slot_stride is " + std::to_string(part.slot_stride) +
                                ", less than a row of " + std::to_string(part.row_bytes));
  }
  Extent(name + "region", part.offset)
      .reach(part.layer_stride, shape.layers)
      .reach(part.block_stride, shape.num_blocks)
      .reach(part.row_bytes, shape.block_tokens)
      .fit(part.row_bytes, part.region.bytes);
  Extent(name + "hot buffers", part.hot_offset)
      .reach(part.hot_request_stride, shape.requests)
      .reach(part.hot_layer_stride, shape.layers)
      .reach(part.slot_stride, slots)
      .fit(part.row_bytes, part.hot.bytes);
  if (scratch_rows != 0) {
    Extent(name + "scratch rows", part.scratch_offset)
        .reach(part.hot_request_stride, shape.requests)
        .reach(part.slot_stride, scratch_rows)
        .fit(part.row_bytes, part.hot.bytes);
  }
}

struct Gather {
  const RowView& view;
  const RowKernels& kernels;
  std::span<const Place> places;
  size_t piece_rows;
  std::atomic<size_t> next{0};

  static void take(void* self) {
    auto& job = *static_cast<Gather*>(self);
    for (;;) {
      const size_t begin = job.next.fetch_add(job.piece_rows, std::memory_order_relaxed);
      if (begin >= job.places.size()) return;
      const auto piece =
          job.places.subspan(begin, std::min(job.piece_rows, job.places.size() - begin));
      for (const PartView& part : job.view.all()) job.kernels.gather(part, piece, piece.size());
    }
  }
};

}  // namespace

Using::Using(std::atomic_flag& flag, const char* what) : flag_(flag) {
  if (flag.test_and_set(std::memory_order_acquire)) {
    throw std::invalid_argument(std::string(what) +
                                " is in use by a call of another thread: give each its own");
  }
}

RowCopier::RowCopier(std::shared_ptr<const BlockTables> tables, std::vector<Part> parts,
                     uint64_t num_slots, uint64_t scratch_rows, const RowKernels& kernels,
                     std::unique_ptr<Helper> helper)
    : tables_(std::move(tables)),
      parts_(std::move(parts)),
      num_slots_(num_slots),
      scratch_rows_(scratch_rows),
      kernels_(kernels),
      helper_(std::move(helper)) {
  if (parts_.empty() || parts_.size() > kPartsMax) {
    throw std::invalid_argument("parts has " + std::to_string(parts_.size()) +
                                " items but must have 1 to " + std::to_string(kPartsMax));
  }
  if (num_slots < 1 || num_slots > INT32_MAX || scratch_rows > INT32_MAX - num_slots) {
    throw std::invalid_argument("num_slots is " + std::to_string(num_slots) +
                                " but must be 1 or more, at most 2**31 - 1 with the scratch rows");
  }
  for (size_t i = 0; i < parts_.size(); ++i) {
    check_part(parts_[i], i, tables_->shape(), num_slots, scratch_rows);
    row_bytes_ += parts_[i].row_bytes;
  }
}

RowView RowCopier::view(int64_t request, int64_t layer) const noexcept {
  RowView view{};
  view.count = parts_.size();
  const auto owner = static_cast<uint64_t>(request);
  const auto at = static_cast<uint64_t>(layer);
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    uint8_t* buffer = part.hot.data + owner * part.hot_request_stride;
    view.parts[i] = {part.region.data + part.offset + at * part.layer_stride,
                     buffer + part.hot_offset + at * part.hot_layer_stride,
                     buffer + part.scratch_offset - num_slots_ * part.slot_stride,
                     part.block_stride,
                     part.row_bytes,
                     part.slot_stride,
                     static_cast<uint32_t>(num_slots_)};
  }
  return view;
}

uint32_t RowCopier::checked_slot(int32_t slot, size_t number, int64_t position, int64_t request,
                                 int64_t layer) const {
  if (slot >= 0 && static_cast<uint64_t>(slot) < slots_end()) return static_cast<uint32_t>(slot);
  throw std::out_of_range(at_row(number, position, request, layer) + " has slot " +
                          std::to_string(slot) + ", which is none of " +
                          std::to_string(num_slots_) + " and " + std::to_string(scratch_rows_) +
                          " scratch rows");
}

size_t RowCopier::plan_reads(const int32_t* positions, const int32_t* slots, size_t count,
                             int64_t request, int64_t layer, Place* places) const {
  const uint64_t written = tables_->written(request, layer);
  size_t planned = 0;
  for (size_t i = 0; i < count; ++i) {
    const int32_t position = positions[i];
    if (position < 0) continue;
    if (static_cast<uint64_t>(position) >= written) {
      throw Hole(at_row(i, position, request, layer) + " was never written: " +
                 std::to_string(written) + " rows are");
    }
    Place place = tables_->locate(request, position);
    const auto at = static_cast<uint64_t>(position);
    if (tables_->first_unwritten(request, layer, at, at + 1) == at) {
      throw Hole(at_row(i, position, request, layer) + " was never written, although " +
                 std::to_string(written) + " rows are said to be");
    }
    place.slot = checked_slot(slots[i], i, position, request, layer);
    places[planned++] = place;
  }
  return planned;
}

uint64_t RowCopier::gather(RowList& rows, int64_t request, int64_t layer, size_t count) const {
  const size_t planned =
      plan_reads(rows.positions, rows.slots, count, request, layer, rows.places.data());
  const RowView here = view(request, layer);
  const bool shared = helper_ != nullptr && planned >= kShareRows;
  Gather job{here, kernels_, {rows.places.data(), planned}, shared ? kPieceRows : planned};
  const bool helped = shared && helper_->begin(Gather::take, &job);
  Gather::take(&job);
  if (helped) helper_->end();
  return planned * row_bytes_;
}

uint64_t RowCopier::read(RowList& rows, int64_t request, int64_t layer, size_t count,
                         bool far) const {
  const size_t planned =
      plan_reads(rows.positions, rows.slots, count, request, layer, rows.places.data());
  const RowView here = view(request, layer);
  uint64_t word = 0;
  for (const PartView& part : here.all()) {
    word ^= kernels_.read(part, {rows.places.data(), planned}, far);
  }
  return word;
}

size_t RowCopier::plan_writes(RowList& rows, int64_t request, int64_t layer, size_t count,
                              uint64_t& end) const {
  for (size_t part = 0; part < parts_.size(); ++part) {
    if (!parts_[part].region.writable) {
      throw std::invalid_argument("the region of part " + std::to_string(part) +
                                  " is read-only: another process writes it");
    }
  }
  if (rows.sources.size() != parts_.size()) {
    throw std::invalid_argument("the list has " + std::to_string(rows.sources.size()) +
                                " sources for rows of " + std::to_string(parts_.size()) +
                                " parts");
  }
  end = tables_->written(request, layer);
  size_t planned = 0;
  for (size_t i = 0; i < count; ++i) {
    const int32_t position = rows.positions[i];
    if (position < 0) continue;
    if (static_cast<uint64_t>(position) > end) {
      throw Hole(at_row(i, position, request, layer) + " would be written past a gap: " +
                 std::to_string(end) + " rows are there");
    }
    Place place = tables_->locate(request, position);
    if (rows.slots[i] >= 0) {
      place.slot = checked_slot(rows.slots[i], i, position, request, layer);
    }
    end = std::max(end, static_cast<uint64_t>(position) + 1);
    rows.taken[planned] = static_cast<uint32_t>(i);
    rows.places[planned++] = place;
  }
  return planned;
}

uint64_t RowCopier::append(RowList& rows, int64_t request, int64_t layer, size_t count) const {
  uint64_t end = 0;
  const size_t planned = plan_writes(rows, request, layer, count, end);
  const RowView here = view(request, layer);
  for (size_t part = 0; part < here.count; ++part) {
    const PartView& to = here.parts[part];
    for (size_t i = 0; i < planned; ++i) {
      const uint8_t* row = rows.sources[part] + rows.taken[i] * to.row_bytes;
      std::memcpy(to.in_region(rows.places[i]), row, to.row_bytes);
      if (rows.places[i].slot != kNoSlot) {
        std::memcpy(to.in_hot(rows.places[i].slot), row, to.row_bytes);
      }
    }
  }
  for (size_t i = 0; i < planned; ++i) {
    tables_->note(request, layer, static_cast<uint64_t>(rows.positions[rows.taken[i]]));
  }
  tables_->publish(request, layer, end);
  return planned * row_bytes_;
}

}  // namespace kvd::rows
