// Python classes SparseAttention and IndexScorer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "attention.hpp"
#include "bind_types.hpp"
#include "scorer.hpp"

namespace kvd::rows {
namespace {

constexpr const char* kAttentionDoc =
    R"(Sparse attention over rows in hot buffers while missing rows are copied (copy_sfa).

B requests, P query positions each, H heads, R elements of a row, L of its value, K selected rows,
M misses. All arrays are registered and may change between calls:

    queries:   [B, P, H, R] float32
    places:    [B, P, K] int32: a slot of the request's hot buffer or scratch tile whose row is
               there; -2 - n, item n of the request's misses; or -1, nothing
    items:     [B, 3] int32: request, query positions, misses; a request once in a batch
    positions: [B, M] int32 of the misses, none below 0; slots: [B, M] int32, where they are copied
               to, distinct and none that a place names
    output:    [B, P, H, L] float32, out: softmax(scale * q . row) over the selected rows, of the
               rows' first L elements; zeros for a query that selected nothing

Args:
    copier: whose hot buffers are read and filled; its kernel is used.
    element: "float32" or "bfloat16", how rows are stored; a row is its parts one after another.
    scale: factor of the dot products, above 0.
    threads: 2 has a thread that copies meanwhile; 1 copies where attention needs a row.
    spin_ns: how long that thread looks for the next call before it sleeps.

Sums are float32. Raises: ValueError or TypeError naming the argument. Defined by
rows_reference.py::SparseAttention.)";

constexpr const char* kAttendDoc =
    R"(Attend for items [0, batch) in one layer.

ordered: every row is attended to in the order of its selection after all misses were copied: bit
for bit what the same kernel gives when all rows are resident. Otherwise rows that are there come
first, and misses as they come: sums are formed in another order, and outputs differ by rounding
(rows_reference.py::TOLERANCE).

All arrays are checked first; on an error nothing has changed. The interpreter lock is released.

Raises:
    HoleError: a missing row was never written; names its position.
    IndexError: a layer, request, slot, miss or block id that there is none of.
    ValueError: any other item out of its range, a slot that is copied to and read, or another
        thread's call in flight.)";

constexpr const char* kTimesDoc =
    R"(Return (total, plan, wait, copy) nanoseconds and the misses of the last call.

plan: checks. wait: attention stood still for missing rows, or copied them itself. copy: spent on
copying, by either thread. 1 - wait / (copy alone) is the share of the copies that was hidden.)";

constexpr const char* kScorerDoc =
    R"(The indexer's scores of one query against the keys of a request (index_scores).

N queries, H heads, D elements of a key, C positions:

    queries: [N, H, D] float32; weights: [N, H] float32
    scores:  [N, C] float32, out

Args:
    tables: where keys are, and how many were written.
    keys: memory; a key is at
        offset + layer * layer_stride + block * block_stride + row * row_bytes.
    element: "float32", "bfloat16", or "fp8": D bytes of E4M3, then the row's scale as float32.
    kernel: "auto", or one of row_kernels().

Raises: ValueError or TypeError naming the argument. Defined by rows_reference.py::index_scores.)";

constexpr const char* kScoreDoc =
    R"(Fill scores[query, :tokens] for the keys at positions [0, tokens) of a request and layer.

score(s) = sum over heads h of weights[h] * max(0, queries[h] . key[s]). A key's score depends on
the query and the key alone, bit for bit. The interpreter lock is released. On an error nothing has
changed.

Raises: HoleError for a key that was never written; IndexError for a query, request, layer or block
    id that there is none of; ValueError for tokens beyond the scores.)";

struct PyAttention {
  nb::object copier;
  std::vector<Array> arrays;
  std::unique_ptr<SparseAttention> core;
  size_t batch_max;
};

struct PyScorer {
  nb::object tables;
  std::vector<Array> arrays;
  std::unique_ptr<IndexScorer> core;
};

AttentionArrays attention_arrays(const std::vector<Array>& arrays) {
  const Array& queries = arrays[0];
  const Array& places = arrays[1];
  const Array& positions = arrays[3];
  const Array& output = arrays[5];
  const size_t batch = queries.extent(0);
  const size_t positions_max = queries.extent(1);
  const size_t heads = queries.extent(2);
  require_extent(places, "places", 0, batch);
  require_extent(places, "places", 1, positions_max);
  require_extent(arrays[2], "items", 0, batch);
  require_extent(arrays[2], "items", 1, 3);
  require_extent(positions, "positions", 0, batch);
  require_extent(arrays[4], "slots", 0, batch);
  require_extent(arrays[4], "slots", 1, positions.extent(1));
  require_extent(output, "output", 0, batch);
  require_extent(output, "output", 1, positions_max);
  require_extent(output, "output", 2, heads);
  return {queries.data<float>(),
          places.data<int32_t>(),
          arrays[2].data<int32_t>(),
          positions.data<int32_t>(),
          arrays[4].data<int32_t>(),
          output.data<float>(),
          batch,
          positions_max,
          heads,
          queries.extent(3),
          places.extent(2),
          positions.extent(1),
          output.extent(3)};
}

void make_attention(PyAttention* self, nb::handle copier, nb::handle queries, nb::handle places,
                    nb::handle items, nb::handle positions, nb::handle slots, nb::handle output,
                    const std::string& element, double scale, int64_t threads, int64_t spin_ns) {
  if (threads < 1 || threads > 2) {
    throw std::invalid_argument("threads is " + std::to_string(threads) + " but must be 1 or 2");
  }
  std::vector<Array> arrays;
  arrays.emplace_back(queries, "queries", Kind::kFloat32, 4, false);
  arrays.emplace_back(places, "places", Kind::kInt32, 3, false);
  arrays.emplace_back(items, "items", Kind::kInt32, 2, false);
  arrays.emplace_back(positions, "positions", Kind::kInt32, 2, false);
  arrays.emplace_back(slots, "slots", Kind::kInt32, 2, false);
  arrays.emplace_back(output, "output", Kind::kFloat32, 4, true);
  const AttentionArrays made = attention_arrays(arrays);
  auto helper = threads == 2 ? std::make_unique<Helper>(spin_ns) : nullptr;
  auto core = std::make_unique<SparseAttention>(nb::cast<PyCopier&>(copier).core, made,
                                                element_named(element), static_cast<float>(scale),
                                                std::move(helper));
  new (self) PyAttention{nb::borrow(copier), std::move(arrays), std::move(core), made.batch};
}

void attend(PyAttention& self, int64_t layer, int64_t batch, bool ordered) {
  if (batch < 0 || static_cast<size_t>(batch) > self.batch_max) {
    throw std::invalid_argument("batch is " + std::to_string(batch) + " but must be 0 to " +
                                std::to_string(self.batch_max));
  }
  const Using taken(self.core->busy(), "the attention");
  const nb::gil_scoped_release unlocked;
  self.core->attend(layer, static_cast<size_t>(batch), ordered);
}

std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> times(const PyAttention& self) {
  const AttentionTimes& times = self.core->times();
  return {times.total_ns, times.plan_ns, times.wait_ns, times.copy_ns, times.misses};
}

void make_scorer(PyScorer* self, nb::handle tables, nb::handle keys, nb::handle queries,
                 nb::handle weights, nb::handle scores, uint64_t offset, uint64_t layer_stride,
                 uint64_t block_stride, uint64_t row_bytes, const std::string& element,
                 const std::string& kernel) {
  std::vector<Array> arrays;
  arrays.emplace_back(keys, "keys", Kind::kBytes, 0, false);
  arrays.emplace_back(queries, "queries", Kind::kFloat32, 3, false);
  arrays.emplace_back(weights, "weights", Kind::kFloat32, 2, false);
  arrays.emplace_back(scores, "scores", Kind::kFloat32, 2, true);
  const size_t queries_max = arrays[1].extent(0);
  const size_t heads = arrays[1].extent(1);
  require_extent(arrays[2], "weights", 0, queries_max);
  require_extent(arrays[2], "weights", 1, heads);
  require_extent(arrays[3], "scores", 0, queries_max);
  const KeyLayout layout{arrays[0].memory(), offset,    layer_stride,
                         block_stride,       row_bytes, element_named(element)};
  const ScoreArrays made{arrays[1].data<float>(), arrays[2].data<float>(),
                         arrays[3].data<float>(), queries_max,
                         heads,                   arrays[1].extent(2),
                         arrays[3].extent(1)};
  auto core = std::make_unique<IndexScorer>(nb::cast<PyTables&>(tables).core, layout, made,
                                            find_row_kernels(kernel));
  new (self) PyScorer{nb::borrow(tables), std::move(arrays), std::move(core)};
}

void score(PyScorer& self, int64_t query, int64_t request, int64_t layer, int64_t tokens) {
  const Using taken(self.core->busy(), "the scorer");
  const nb::gil_scoped_release unlocked;
  self.core->score(query, request, layer, tokens);
}

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<PyAttention>(module, "SparseAttention", kAttentionDoc)
      .def("__init__", make_attention, nb::arg("copier"), nb::kw_only(), nb::arg("queries"),
           nb::arg("places"), nb::arg("items"), nb::arg("positions"), nb::arg("slots"),
           nb::arg("output"), nb::arg("element"), nb::arg("scale"), nb::arg("threads") = 2,
           nb::arg("spin_ns") = kSpinNs)
      .def("attend", attend, nb::arg("layer"), nb::arg("batch"), nb::kw_only(),
           nb::arg("ordered") = false, kAttendDoc)
      .def("times", times, kTimesDoc);
  nb::class_<PyScorer>(module, "IndexScorer", kScorerDoc)
      .def("__init__", make_scorer, nb::arg("tables"), nb::arg("keys"), nb::kw_only(),
           nb::arg("queries"), nb::arg("weights"), nb::arg("scores"), nb::arg("offset") = 0,
           nb::arg("layer_stride"), nb::arg("block_stride"), nb::arg("row_bytes"),
           nb::arg("element"), nb::arg("kernel") = "auto")
      .def("score", score, nb::arg("query"), nb::arg("request"), nb::arg("layer"),
           nb::arg("tokens"), kScoreDoc);
}

}  // namespace kvd::rows
