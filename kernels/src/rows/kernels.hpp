// The inner loops over rows, once for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "layout.hpp"

namespace kvd::rows {

constexpr size_t kTileRows = 64;   // rows that attention and scores take at a time
constexpr size_t kPad = 16;        // widths in floats are padded to this with zeros
constexpr size_t kFp8ScaleBytes = 4;  // after the fp8 values of an index row

inline size_t padded(size_t floats) { return (floats + kPad - 1) / kPad * kPad; }

// How the elements of a row are stored.
enum class Element { kFloat32, kBfloat16, kFp8 };
// Bytes of one element; Throws std::invalid_argument for a name that is none.
Element element_named(std::string_view name);
constexpr size_t element_bytes(Element element) {
  return element == Element::kFloat32 ? 4 : element == Element::kBfloat16 ? 2 : 1;
}

// Copies one part of each of the first `count` rows from the region to its slot, and fetches from
// those behind them; the copies are ordered before later stores of this thread. Rows of one call
// have distinct slots.
using GatherFn = void (*)(const PartView& part, std::span<const Place> places, size_t count);
// Reads the same bytes and folds them into a word: what no copy of them can be faster than. It
// fetches as gather does, or without `far` only the four rows to come.
using ReadFn = uint64_t (*)(const PartView& part, std::span<const Place> places, bool far);

// `count` elements as floats, fp8 ones times a scale.
using WidenFn = void (*)(const uint8_t* from, float* to, size_t count);
using WidenScaledFn = void (*)(const uint8_t* from, float* to, size_t count, float scale);

// dots[h * kTileRows + r] = queries[h] . rows[r], for heads h and `count` rows r of a tile; both
// have `width` floats per line, a multiple of kPad. Lines of the tile up to the next multiple of 4
// are read; dots beyond `count` hold anything. A sum depends on its two lines alone.
using DotsFn = void (*)(const float* queries, const float* rows, float* dots, size_t heads,
                        size_t count, size_t width);

// One line of dots to weights: w[r] = exp(scale * w[r] - *top) for r < count, 0 up to kTileRows.
// *top is raised to the largest scale * w[r] first; *sum becomes *keep * *sum + sum of w, and
// *keep is exp(old top - new top): what earlier sums are worth now.
using WeighFn = void (*)(float* line, size_t count, float scale, float* top, float* sum,
                         float* keep);

// mixed[h] = keep[h] * mixed[h] + sum over r < count of weights[h * kTileRows + r] * rows[r]; lines
// of `mixed` have `mixed_width` floats, lines of the tile `row_width`, multiples of kPad.
using MixFn = void (*)(const float* weights, const float* keep, const float* rows, float* mixed,
                       size_t heads, size_t count, size_t row_width, size_t mixed_width);

// scores[r] = sum over h of head_weights[h] * max(0, dots[h * kTileRows + r]), in order of h.
using ScoreFn = void (*)(const float* dots, const float* head_weights, float* scores, size_t heads,
                         size_t count);

struct RowKernels {
  const char* name;
  GatherFn gather;
  ReadFn read;
  WidenFn widen_bfloat16;
  WidenScaledFn widen_fp8;
  DotsFn dots;
  WeighFn weigh;
  MixFn mix;
  ScoreFn score;
};

// Null where the architecture has no such kernels.
const RowKernels* rows_avx512() noexcept;
const RowKernels* rows_avx2() noexcept;
const RowKernels* rows_neon() noexcept;
const RowKernels* rows_scalar() noexcept;

// Names of the kernels this CPU can run, best first; "scalar" is always the last.
std::vector<std::string> row_kernels();
// "auto" is the best one. Throws std::invalid_argument for a name this CPU cannot run.
const RowKernels& find_row_kernels(std::string_view name);

}  // namespace kvd::rows
