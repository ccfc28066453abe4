// HotStep for Python.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>

#include "bind.hpp"
#include "step.hpp"

namespace kvd::residency {
namespace {

constexpr const char* kStepDoc =
    R"(Arrays of one step, registered once: a call on them has a few integers.

queries: 1 to 14, the speculative positions of a request.
k:       1 to 4096, what a query selects at most.
scores:  None, or a C-contiguous buffer that is kept, not copied: [queries, T] float32, or uint16
         that are bfloat16.
kernel:  "auto", or one of `residency_kernels()`.

One thread at a time; another one is refused with RuntimeError. All results are exact and the same
with every kernel. Arrays, int32 but for figures:

    selection  [queries, k]   in; or out of top_k and lim, then ascending. -1 is padding
    counts     [queries]      in or out: how many of each row count
    winners    [queries, k]   out: slot; ~position for a miss; -2**31 for padding
    references [queries, k]   out of merge_misses: index in positions for a miss, else -1
    positions  [N]            out, ascending: distinct misses, or all that select was given
    places     [N]            out: slot, or slots + row of the scratch tile
    load_positions, load_slots [L]   out: rows to load, and to where
    scratch    [S]            out: positions in the order of the scratch tile's rows
    figures    int64 [4]      out: N, L, S, positions given before they were merged

A winner code is either a slot or a position, so it fits an int32 whatever the context: 20 bits for
a position, 18 for a slot.)";

constexpr const char* kTopKDoc =
    R"(Select the k best of scores[query, :length]; returns min(k, length), also in counts[query].

selection[query] becomes their positions, ascending. Of equal scores the lower position is better;
-0 equals 0; NaN counts as -inf. Defined by residency_reference.py::top_k.)";

constexpr const char* kLimDoc =
    R"(Select as top_k does, and say of each winner whether it is resident; returns the misses.

winners[query] becomes their codes. The search starts where the table's last one for this query
ended, which bears on its time alone. Hits are in use from here on: no victims of this step. Defined
by residency_reference.py::Table.lim.)";

constexpr const char* kLookupDoc =
    R"(Say of each position in selection[query] whether it is resident; returns the misses.

Repeats and padding are legal. Hits are in use from here on. ValueError for a position outside
[-1, positions_max): nothing changes then. Defined by residency_reference.py::Table.lookup.)";

constexpr const char* kMergeDoc =
    R"(Merge the misses in winners[:queries]; returns N, the distinct ones.

positions becomes them, ascending, and references[query] the index of each miss in it. Defined by
residency_reference.py::merge_misses.)";

constexpr const char* kAssignDoc =
    R"(Give places to the N misses that merge_misses found; returns L, the rows to load.

A free slot, or that of a victim: a row that this step neither selected nor wrote. Where there is
none, and for rows that the step itself writes, a row of the scratch tile. What is to be loaded is
resident from here on. Defined by residency_reference.py::Table.assign.)";

constexpr const char* kSelectDoc =
    R"(Merge selection[:queries], look all of it up and place it; returns L, the rows to load.

The same as lookup of every query, merge_misses and assign, with hits among positions and places as
well. ValueError for a position outside [-1, positions_max): nothing changes then. Defined by
residency_reference.py::Table.select.)";

// A row-major matrix of scores, borrowed from its owner for as long as the step lives.
class ScoreRows {
 public:
  ScoreRows(nb::handle source, int64_t queries) {
    if (PyObject_GetBuffer(source.ptr(), &view_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
      throw nb::python_error();
    }
    const std::string format = view_.format == nullptr ? "B" : view_.format;
    const bool fits = view_.ndim == 2 && view_.shape[0] == queries && view_.shape[1] > 0 &&
                      (format == "f" || format == "H");
    if (!fits) {
      PyBuffer_Release(&view_);
      throw std::invalid_argument("scores must be [" + std::to_string(queries) +
                                  ", T] of float32, or of uint16 for bfloat16");
    }
  }
  ~ScoreRows() { PyBuffer_Release(&view_); }
  ScoreRows(const ScoreRows&) = delete;
  ScoreRows& operator=(const ScoreRows&) = delete;

  int64_t length() const noexcept { return view_.shape[1]; }
  Scores row(int64_t query) const noexcept {
    const auto* const base = static_cast<const uint8_t*>(view_.buf);
    return {base + query * view_.strides[0], view_.itemsize == 2};
  }

 private:
  Py_buffer view_;
};

struct BoundStep {
  BoundStep(int64_t queries, int64_t k, const Kernel& kernel) : step(queries, k, kernel) {}
  Step step;
  std::optional<ScoreRows> scores;
  std::atomic_flag is_busy;
};

// Has a step to itself, without the interpreter's lock.
class Using {
 public:
  explicit Using(BoundStep& bound) : bound_(bound) {
    if (bound.is_busy.test_and_set(std::memory_order_acquire)) {
      throw std::runtime_error("the step is in use by another thread; give each thread its own");
    }
  }
  ~Using() { bound_.is_busy.clear(std::memory_order_release); }
  Using(const Using&) = delete;
  Using& operator=(const Using&) = delete;

 private:
  BoundStep& bound_;
};

int64_t queries_of(const BoundStep& bound, nb::handle queries) {
  return within(queries, "queries", 1, bound.step.queries());
}

int64_t query_of(const BoundStep& bound, nb::handle query) {
  return within(query, "query", 0, bound.step.queries() - 1);
}

template <typename Work>
int64_t alone(BoundStep& bound, Work work) {
  const Using mine(bound);
  const nb::gil_scoped_release unlocked;
  return work(bound.step);
}

struct Search {
  Scores scores;
  int64_t query;
  int64_t length;
  int64_t k;
};

Search search_of(const BoundStep& bound, nb::handle query, nb::handle length, nb::handle k,
                 int64_t positions_max) {
  if (!bound.scores) throw std::invalid_argument("scores is None; give the step an array of them");
  const int64_t number = query_of(bound, query);
  const int64_t most = std::min(bound.scores->length(), positions_max);
  return {bound.scores->row(number), number, within(length, "length", 1, most),
          within(k, "k", 1, bound.step.k_max())};
}

int64_t top_k(BoundStep& bound, nb::handle query, nb::handle length, nb::handle k) {
  const Search search = search_of(bound, query, length, k, kPositionsMax);
  return alone(bound, [&](Step& step) {
    float carried = std::numeric_limits<float>::quiet_NaN();
    step.top_k(search.scores, search.query, search.length, search.k, &carried);
    return step.arrays().counts[search.query];
  });
}

int64_t lim(BoundStep& bound, const Tables& tables, nb::handle table, nb::handle query,
            nb::handle length, nb::handle k) {
  const Table at = table_of(tables, table);
  const Search search = search_of(bound, query, length, k, tables.positions_max());
  return alone(bound, [&](Step& step) {
    return step.lim(at, search.scores, search.query, search.length, search.k);
  });
}

int64_t lookup(BoundStep& bound, const Tables& tables, nb::handle table, nb::handle query) {
  const Table at = table_of(tables, table);
  const int64_t number = query_of(bound, query);
  return alone(bound, [&](Step& step) { return step.lookup(at, number); });
}

int64_t merge_misses(BoundStep& bound, nb::handle queries) {
  const int64_t count = queries_of(bound, queries);
  return alone(bound, [&](Step& step) { return step.merge_misses(count); });
}

int64_t assign(BoundStep& bound, const Tables& tables, nb::handle table) {
  Table at = table_of(tables, table);
  return alone(bound, [&](Step& step) { return step.assign(at); });
}

int64_t select(BoundStep& bound, const Tables& tables, nb::handle table, nb::handle queries) {
  Table at = table_of(tables, table);
  const int64_t count = queries_of(bound, queries);
  return alone(bound, [&](Step& step) { return step.select(at, count); });
}

void construct(BoundStep* self, nb::handle queries, nb::handle k, nb::handle scores,
               const std::string& kernel) {
  const int64_t rows = within(queries, "queries", 1, kQueriesMax);
  new (self) BoundStep(rows, within(k, "k", 1, kChosenMax), find_kernel(kernel));
  try {
    if (!scores.is_none()) self->scores.emplace(scores, rows);
  } catch (...) {
    self->~BoundStep();
    throw;
  }
}

// A property: a view of one of the arrays, [queries, k] or [queries * k].
template <typename T>
auto matrix(int32_t* StepArrays::*array) {
  return [array](nb::handle self) {
    const Step& step = nb::cast<const BoundStep&>(self).step;
    return view_of<T>(step.arrays().*array,
                      {static_cast<size_t>(step.queries()), static_cast<size_t>(step.k_max())},
                      self);
  };
}

auto list(int32_t* StepArrays::*array) {
  return [array](nb::handle self) {
    const Step& step = nb::cast<const BoundStep&>(self).step;
    return view_of<const int32_t>(step.arrays().*array, {static_cast<size_t>(step.capacity())},
                                  self);
  };
}

nb::object counts(nb::handle self) {
  const Step& step = nb::cast<const BoundStep&>(self).step;
  return view_of(step.arrays().counts, {static_cast<size_t>(step.queries())}, self);
}

nb::object figures(nb::handle self) {
  const Step& step = nb::cast<const BoundStep&>(self).step;
  return view_of<const int64_t>(&step.arrays().figures->positions,
                                {static_cast<size_t>(kNumFigures)}, self);
}

}  // namespace

void bind_step(nb::module_& module) {
  nb::class_<BoundStep>(module, "HotStep", kStepDoc)
      .def("__init__", construct, nb::arg("queries"), nb::arg("k"), nb::kw_only(),
           nb::arg("scores") = nb::none(), nb::arg("kernel") = "auto",
           nb::sig("def __init__(self, queries: int, k: int, *, scores: object = None, "
                   "kernel: str = 'auto') -> None"))
      .def("top_k", top_k, nb::arg("query"), nb::arg("length"), nb::arg("k"),
           nb::sig("def top_k(self, query: int, length: int, k: int) -> int"), kTopKDoc)
      .def("lim", lim, nb::arg("tables"), nb::arg("table"), nb::arg("query"), nb::arg("length"),
           nb::arg("k"),
           nb::sig("def lim(self, tables: HotTables, table: int, query: int, length: int, k: int) "
                   "-> int"),
           kLimDoc)
      .def("lookup", lookup, nb::arg("tables"), nb::arg("table"), nb::arg("query"),
           nb::sig("def lookup(self, tables: HotTables, table: int, query: int) -> int"),
           kLookupDoc)
      .def("merge_misses", merge_misses, nb::arg("queries"),
           nb::sig("def merge_misses(self, queries: int) -> int"), kMergeDoc)
      .def("assign", assign, nb::arg("tables"), nb::arg("table"),
           nb::sig("def assign(self, tables: HotTables, table: int) -> int"), kAssignDoc)
      .def("select", select, nb::arg("tables"), nb::arg("table"), nb::arg("queries"),
           nb::sig("def select(self, tables: HotTables, table: int, queries: int) -> int"),
           kSelectDoc)
      .def_prop_ro("kernel", [](const BoundStep& self) { return self.step.kernel().name; },
                   "Name of the kernel in use.")
      .def_prop_ro("selection", matrix<int32_t>(&StepArrays::selection),
                   "[queries, k]: what each query selects.")
      .def_prop_ro("counts", counts,
                   "[queries]: how many of each row count.")
      .def_prop_ro("winners", matrix<const int32_t>(&StepArrays::winners),
                   "[queries, k]: winner codes of the selection.")
      .def_prop_ro("references", matrix<const int32_t>(&StepArrays::references),
                   "[queries, k]: of each miss its index in positions.")
      .def_prop_ro("positions", list(&StepArrays::positions),
                   "[N]: distinct positions, ascending.")
      .def_prop_ro("places", list(&StepArrays::places),
                   "[N]: where each position is.")
      .def_prop_ro("load_positions", list(&StepArrays::load_positions),
                   "[L]: positions of rows to load.")
      .def_prop_ro("load_slots", list(&StepArrays::load_slots),
                   "[L]: slots to load them into.")
      .def_prop_ro("scratch", list(&StepArrays::scratch),
                   "[S]: positions of the scratch tile.")
      .def_prop_ro("figures", figures,
                   "[4]: N, L, S, positions given.");
  module.def("residency_kernels", kernel_names,
             "Return the kernels that this CPU can run, best first; the last is 'scalar'.");
}

}  // namespace kvd::residency
