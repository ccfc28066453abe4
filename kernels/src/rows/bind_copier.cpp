// Python classes BlockTables, RowList and RowCopier.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <optional>

#include "bind_types.hpp"

namespace kvd::rows {
namespace {

constexpr const char* kTablesDoc =
    R"(Which blocks of the region hold a request's rows, and how many of its rows are there.

A request is the number of a line of both arrays. They are registered: whoever owns them changes
them between calls. Defined by rows_reference.py::BlockTables.

Args:
    tables: [requests, blocks] int32, block ids in the order of positions; negative where none.
    written: [requests, layers] int64, how many leading rows of each layer are in the region. May
        be shared with other processes, and read-only where another one moves it.
    block_tokens: rows of a block, num_blocks: blocks of the region.
    rows: for debugging, [requests, layers, blocks * block_tokens] of one byte each: 1 where a row
        was written. append and truncate keep it; whoever writes rows by another way than append
        marks them. A row without a mark is a HoleError whatever the watermark says.

Raises: ValueError or TypeError naming the argument.)";

constexpr const char* kWrittenDoc = "Return how many leading rows of a layer were written.";
constexpr const char* kMarkDoc =
    R"(Raise the watermark of a layer to `tokens`: rows that came by another way than append.

IndexError outside the tables, ValueError for more tokens than a request can have.)";
constexpr const char* kTruncateDoc =
    R"(Lower the watermarks of all layers to `tokens`: what is behind was rejected, or is another's.

IndexError and ValueError as mark_written.)";

constexpr const char* kListDoc =
    R"(Rows of a call, N at most; the arrays are registered and may change between calls.

Args:
    positions: [N] int32; an item below 0 is no row.
    slots: [N] int32, slots of the hot buffer; slots + n is row n of the scratch tile. Those of one
        gather are distinct. In an append an item below 0 is no slot.
    sources: rows to append, for each part an array of N * row_bytes bytes.

One call at a time may use a list: ValueError for a second. TypeError, ValueError.)";

constexpr const char* kCopierDoc =
    R"(Copies rows of one layer of one request between the host region and hot buffers.

Args:
    tables: where rows are in the region.
    parts: 1 to 8 of Part (rows.py).
    num_slots: slots of a hot buffer in each layer; scratch_rows: rows of its scratch tile.
    kernel: "auto", or one of row_kernels().
    threads: 2 has a helper thread, for gathers of 512 rows and more.

All memory is registered here and checked to hold every row: ValueError names what does not. It
cannot be unmapped while the copier lives, nor used in a forked child. Defined by
rows_reference.py::RowCopier.)";

constexpr const char* kGatherDoc =
    R"(Copy items [0, count) of the list from the region to their slots; return the bytes moved.

All are checked first: on an error not one byte has moved. The interpreter lock is released above
16 KiB. Deterministic.

Raises:
    HoleError: a row was never written; names its position.
    IndexError: a request, layer, slot or block id that there is none of.
    ValueError: count is over the list, or the list is in use.)";

constexpr const char* kReadDoc =
    R"(Read what gather would copy, without copying it; return a word made of it.

No copy of these rows can be faster: benches measure gather by it. far: fetch rows ahead as gather
does, else only the four to come, as simple code would. Errors as gather.)";

constexpr const char* kAppendDoc =
    R"(Copy items [0, count) of the list's sources to the region and to their slots.

Then the watermark of the layer says that they are written. Rows are appended without gaps; one that
is there may be written again, and among equal positions the last item counts. Returns the bytes
written to the region. Errors as gather; HoleError also for a row behind a gap.)";

size_t checked_count(const PyRowList& rows, int64_t count) {
  const size_t capacity = rows.core->places.size();
  if (count >= 0 && static_cast<size_t>(count) <= capacity) return static_cast<size_t>(count);
  throw std::invalid_argument("count is " + std::to_string(count) + " but must be 0 to " +
                              std::to_string(capacity));
}

void make_tables(PyTables* self, nb::handle tables, nb::handle written, uint64_t block_tokens,
                 uint64_t num_blocks, nb::handle rows) {
  Array ids(tables, "tables", Kind::kInt32, 2, false);
  Array marks(written, "written", Kind::kInt64, 2, false);
  require_extent(marks, "written", 0, ids.extent(0));
  std::optional<Array> tracked;
  if (!rows.is_none()) {
    tracked.emplace(rows, "rows", Kind::kBytes, 3, true);
    require_extent(*tracked, "rows", 0, ids.extent(0));
    require_extent(*tracked, "rows", 1, marks.extent(1));
    require_extent(*tracked, "rows", 2, ids.extent(1) * block_tokens);
    if (tracked->bytes() != ids.extent(0) * marks.extent(1) * ids.extent(1) * block_tokens) {
      throw std::invalid_argument("rows has items of more than one byte");
    }
  }
  auto core = std::make_shared<BlockTables>(
      ids.data<int32_t>(), marks.data<int64_t>(), tracked ? tracked->data<uint8_t>() : nullptr,
      marks.writable(),
      BlockTables::Shape{ids.extent(0), marks.extent(1), ids.extent(1), block_tokens, num_blocks});
  new (self) PyTables{std::move(ids), std::move(marks), std::move(tracked), std::move(core)};
}

void make_list(PyRowList* self, nb::handle positions, nb::handle slots, nb::handle sources) {
  std::vector<Array> arrays;
  arrays.emplace_back(positions, "positions", Kind::kInt32, 1, false);
  arrays.emplace_back(slots, "slots", Kind::kInt32, 1, false);
  const size_t capacity = arrays[0].extent(0);
  require_extent(arrays[1], "slots", 0, capacity);
  std::vector<const uint8_t*> rows;
  std::vector<uint64_t> bytes;
  for (const nb::handle source : nb::iter(sources)) {
    arrays.emplace_back(source, "sources", Kind::kBytes, 0, false);
    rows.push_back(arrays.back().data<uint8_t>());
    bytes.push_back(arrays.back().bytes());
  }
  auto core = std::make_unique<RowList>(arrays[0].data<int32_t>(), arrays[1].data<int32_t>(),
                                        capacity, std::move(rows));
  new (self) PyRowList{std::move(arrays), std::move(core), std::move(bytes)};
}

void make_copier(PyCopier* self, nb::handle tables, nb::handle parts, uint64_t num_slots,
                 uint64_t scratch_rows, const std::string& kernel, int64_t threads) {
  if (threads < 1 || threads > 2) {
    throw std::invalid_argument("threads is " + std::to_string(threads) + " but must be 1 or 2");
  }
  std::vector<Array> arrays;
  std::vector<Part> made;
  for (const nb::handle part : nb::iter(parts)) {
    const auto fields = nb::cast<nb::tuple>(part);
    const auto number = [&](size_t i) { return nb::cast<uint64_t>(fields[i]); };
    arrays.emplace_back(fields[0], "region", Kind::kBytes, 0, false);
    const Memory region = arrays.back().memory();
    arrays.emplace_back(fields[5], "hot", Kind::kBytes, 0, true);
    made.push_back({region, number(1), number(2), number(3), number(4), arrays.back().memory(),
                    number(6), number(7), number(8), number(9), number(10)});
  }
  const RowKernels& kernels = find_row_kernels(kernel);
  auto helper = threads == 2 ? std::make_unique<Helper>(kSpinNs) : nullptr;
  auto core = std::make_shared<RowCopier>(nb::cast<PyTables&>(tables).core, std::move(made),
                                          num_slots, scratch_rows, kernels, std::move(helper));
  new (self) PyCopier(tables, std::move(arrays), std::move(core));
}

// Runs a call of the core with the list taken, without the interpreter lock if that pays.
template <typename Call>
uint64_t with_list(const PyCopier& self, PyRowList& rows, int64_t count, const Call& call) {
  const size_t items = checked_count(rows, count);
  const Using taken(rows.core->busy, "the list");
  std::optional<nb::gil_scoped_release> unlocked;
  if (items * self.core->row_bytes() > kKeepLockBytes) unlocked.emplace();
  return call(items);
}

uint64_t gather(const PyCopier& self, PyRowList& rows, int64_t request, int64_t layer,
                int64_t count) {
  return with_list(self, rows, count, [&](size_t items) {
    return self.core->gather(*rows.core, request, layer, items);
  });
}

uint64_t read(const PyCopier& self, PyRowList& rows, int64_t request, int64_t layer,
              int64_t count, bool far) {
  return with_list(self, rows, count, [&](size_t items) {
    return self.core->read(*rows.core, request, layer, items, far);
  });
}

uint64_t append(const PyCopier& self, PyRowList& rows, int64_t request, int64_t layer,
                int64_t count) {
  return with_list(self, rows, count, [&](size_t items) {
    for (size_t part = 0; part < std::min(rows.source_bytes.size(), self.core->num_parts());
         ++part) {
      const uint64_t needed = items * self.core->part_bytes(part);
      if (rows.source_bytes[part] < needed) {
        throw std::invalid_argument("source " + std::to_string(part) + " has " +
                                    std::to_string(rows.source_bytes[part]) + " bytes for " +
                                    std::to_string(items) + " rows of " +
                                    std::to_string(self.core->part_bytes(part)));
      }
    }
    return self.core->append(*rows.core, request, layer, items);
  });
}

void bind_lists(nb::module_& module) {
  nb::class_<PyTables>(module, "BlockTables", kTablesDoc)
      .def("__init__", make_tables, nb::arg("tables"), nb::arg("written"), nb::kw_only(),
           nb::arg("block_tokens"), nb::arg("num_blocks"), nb::arg("rows") = nb::none())
      .def(
          "written",
          [](const PyTables& self, int64_t request, int64_t layer) {
            return self.core->written(request, layer);
          },
          nb::arg("request"), nb::arg("layer"), kWrittenDoc)
      .def(
          "mark_written",
          [](const PyTables& self, int64_t request, int64_t layer, int64_t tokens) {
            self.core->add(request, layer, tokens);
          },
          nb::arg("request"), nb::arg("layer"), nb::arg("tokens"), kMarkDoc)
      .def(
          "truncate",
          [](const PyTables& self, int64_t request, int64_t tokens) {
            self.core->truncate(request, tokens);
          },
          nb::arg("request"), nb::arg("tokens"), kTruncateDoc);
  nb::class_<PyRowList>(module, "RowList", kListDoc)
      .def("__init__", make_list, nb::arg("positions"), nb::arg("slots"),
           nb::arg("sources") = nb::make_tuple());
}

}  // namespace

void bind_copier(nb::module_& module) {
  bind_lists(module);
  nb::class_<PyCopier>(module, "RowCopier", kCopierDoc)
      .def("__init__", make_copier, nb::arg("tables"), nb::arg("parts"), nb::kw_only(),
           nb::arg("num_slots"), nb::arg("scratch_rows") = 0, nb::arg("kernel") = "auto",
           nb::arg("threads") = 1)
      .def_prop_ro(
          "kernel", [](const PyCopier& self) { return self.core->kernels().name; },
          "Name of the kernel in use.")
      .def("gather", gather, nb::arg("rows"), nb::arg("request"), nb::arg("layer"),
           nb::arg("count"), kGatherDoc)
      .def("read", read, nb::arg("rows"), nb::arg("request"), nb::arg("layer"), nb::arg("count"),
           nb::kw_only(), nb::arg("far") = true, kReadDoc)
      .def("append", append, nb::arg("rows"), nb::arg("request"), nb::arg("layer"),
           nb::arg("count"), kAppendDoc);
}

}  // namespace kvd::rows
