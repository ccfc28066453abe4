// HotTables for Python.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "bind.hpp"

namespace kvd::residency {
namespace {

constexpr const char* kTablesDoc =
    R"(Books of hot buffers: `num_tables` tables, each for one request and layer group at a time.

num_tables:    1 to 65,536.
slots:         rows of a hot buffer, 1 to 262,144.
positions_max: tokens of the longest request, 1 to 1,048,576.
layout:        how a position's slot is found: "map" is a word for each position, "index" a hash
               table by the number of slots, "auto" the index where it takes at most half of the
               map, a quarter beyond 32,768 slots. It bears on time and memory alone: an index is
               shorter to fetch.

Addresses never change, and nothing is allocated after this. A table takes 9 bytes for each slot,
and 4 for each position or 8 to 16 for each slot; pages that are never reached take nothing. A call
on a table and one on another may run in two threads at once. Defined by
residency_reference.py::Table.

Raises:
    ValueError: an argument is out of range, or the layout is unknown.
    MemoryError: there is no address space for so many tables.)";

constexpr const char* kBeginDoc =
    "Start a step of a table: nothing is in use any more, and no row is the step's own.";

constexpr const char* kAdmitDoc =
    R"(Give slots to rows [start, end) that the step itself writes, the newest first.

They are hits of this step's selections; one that finds no slot goes to the scratch tile, and none
is ever a row to load. ValueError for an empty range, or one outside
[0, positions_max): nothing changes then.)";

constexpr const char* kInvalidateDoc =
    "Empty the slots of rows at positions >= position; returns how many there were.";

constexpr const char* kResetDoc =
    R"(Empty a table, for another request or after a failed load.

What was put into it before is not resident, whosever it was: a map takes its next generation, at
once whatever its size, and an index is cleared. `counts` stay.)";

constexpr const char* kTokensDoc =
    R"([slots] int32 of a table: position of each slot, where `slot_of` says the same of it.

For tests and inspection; writing here breaks the books, which `check` then says.)";

constexpr const char* kCacheSlotsDoc =
    R"([positions_max] uint32 of a map: slot << 14 | generation of each position.

The position is resident where the generation is the table's. Of an index, its words, as
kernels/src/residency/slot_index.hpp has them. Writing as for `tokens`.)";

Layout layout_of(const std::string& name) {
  if (name == "auto") return Layout::kBySize;
  if (name == "map") return Layout::kMap;
  if (name == "index") return Layout::kIndex;
  throw std::invalid_argument("layout is '" + name + "' but must be auto, map or index");
}

void construct(Tables* self, nb::handle num_tables, nb::handle slots, nb::handle positions_max,
               const std::string& layout) {
  new (self) Tables(within(num_tables, "num_tables", 1, kTablesMax),
                    within(slots, "slots", 1, kSlotsMax),
                    within(positions_max, "positions_max", 1, kPositionsMax), layout_of(layout));
}

void begin_step(const Tables& tables, nb::handle table) { table_of(tables, table).begin_step(); }

void reset(const Tables& tables, nb::handle table) { table_of(tables, table).reset(); }

void admit(const Tables& tables, nb::handle table, nb::handle start, nb::handle end) {
  Table at = table_of(tables, table);
  const int64_t first = within(start, "start", 0, tables.positions_max() - 1);
  const int64_t last = within(end, "end", first + 1, tables.positions_max());
  at.admit(static_cast<int32_t>(first), static_cast<int32_t>(last));
}

int64_t invalidate_from(const Tables& tables, nb::handle table, nb::handle position) {
  Table at = table_of(tables, table);
  return at.invalidate_from(
      static_cast<int32_t>(within(position, "position", 0, tables.positions_max())));
}

int64_t slot_of(const Tables& tables, nb::handle table, nb::handle position) {
  const Table at = table_of(tables, table);
  return at.find(static_cast<int32_t>(within(position, "position", 0, at.positions_max - 1)));
}

nb::object counts(const Tables& tables, nb::handle table) {
  const Counts& now = table_of(tables, table).head->counts;
  return nb::make_tuple(now.selected, now.merged, now.hits, now.misses, now.scratch, now.admitted,
                        now.evicted, now.invalidated);
}

nb::object tokens(nb::handle self, nb::handle table) {
  const Table at = table_of(nb::cast<const Tables&>(self), table);
  return view_of(at.tokens, {static_cast<size_t>(at.slots)}, self);
}

nb::object cache_slots(nb::handle self, nb::handle table) {
  const Table at = table_of(nb::cast<const Tables&>(self), table);
  if (at.has_index()) {
    return view_of(at.index.words, {static_cast<size_t>(at.index.num_words())}, self);
  }
  return view_of(at.cache_slots, {static_cast<size_t>(at.positions_max)}, self);
}

}  // namespace

void bind_tables(nb::module_& module) {
  nb::class_<Tables>(module, "HotTables", kTablesDoc)
      .def("__init__", construct, nb::arg("num_tables"), nb::arg("slots"),
           nb::arg("positions_max") = kPositionsMax, nb::kw_only(), nb::arg("layout") = "auto",
           nb::sig("def __init__(self, num_tables: int, slots: int, positions_max: int = 1048576, "
                   "*, layout: str = \"auto\") -> None"))
      .def("begin_step", begin_step, nb::arg("table"),
           nb::sig("def begin_step(self, table: int) -> None"), kBeginDoc)
      .def("admit", admit, nb::arg("table"), nb::arg("start"), nb::arg("end"),
           nb::sig("def admit(self, table: int, start: int, end: int) -> None"), kAdmitDoc)
      .def("invalidate_from", invalidate_from, nb::arg("table"), nb::arg("position"),
           nb::sig("def invalidate_from(self, table: int, position: int) -> int"), kInvalidateDoc)
      .def("reset", reset, nb::arg("table"), nb::sig("def reset(self, table: int) -> None"),
           kResetDoc)
      .def("slot_of", slot_of, nb::arg("table"), nb::arg("position"),
           nb::sig("def slot_of(self, table: int, position: int) -> int"),
           "Return the slot of a row, -1 when it is absent.")
      .def("counts", counts, nb::arg("table"),
           nb::sig("def counts(self, table: int) -> tuple[int, ...]"),
           "Return rows since the object was made, in the order of Counts.")
      .def(
          "check",
          [](const Tables& tables, nb::handle table) { return table_of(tables, table).check(); },
          nb::arg("table"), nb::sig("def check(self, table: int) -> list[str]"),
          "Compare both directions of a table and its free slots; returns what is wrong.")
      .def("tokens", tokens, nb::arg("table"),
           nb::sig("def tokens(self, table: int) -> memoryview"), kTokensDoc)
      .def("cache_slots", cache_slots, nb::arg("table"),
           nb::sig("def cache_slots(self, table: int) -> memoryview"), kCacheSlotsDoc)
      .def_prop_ro("num_tables", &Tables::num_tables, "Tables of this object.")
      .def_prop_ro("slots", &Tables::slots, "Rows of a hot buffer.")
      .def_prop_ro("positions_max", &Tables::positions_max, "Tokens of the longest request.")
      .def_prop_ro(
          "layout", [](const Tables& self) { return self.has_index() ? "index" : "map"; },
          "How a position's slot is found: 'map' or 'index'.")
      .def_prop_ro("table_bytes", &Tables::table_bytes, "Bytes of one table, its header included.");
}

}  // namespace kvd::residency
