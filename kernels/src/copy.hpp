// Copying lists of byte ranges from one mapping into another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvd {

class Region;

// One piece of a copy, as it lies in the caller's array of native u64 triples.
struct Span {
  uint64_t dst;
  uint64_t src;
  uint64_t bytes;
};
static_assert(sizeof(Span) == 24);

// A copy kernel moves checked spans in the order given, with dst and src as the bases. Spans of one
// call must not overlap. On return every byte is ordered before any later store of this thread.
using CopyFn = void (*)(uint8_t* dst, const uint8_t* src, std::span<const Span> spans);

// A span with this dst is only read: its bytes count in the checksum of its group.
constexpr uint64_t kNotCopied = UINT64_MAX;

// The same, with checksums: spans divide into groups, counts[g] spans each, and sums[g] becomes the
// CRC-32C of the source bytes of group g in order, continued from what it was.
using CopySumFn = void (*)(uint8_t* dst, const uint8_t* src, std::span<const Span> spans,
                           std::span<const uint32_t> counts, uint32_t* sums);

struct CopyKernel {
  CopyFn copy;
  CopySumFn copy_sum;
};

// Null functions where the architecture has no such kernel.
CopyKernel copy_avx512_fold() noexcept;
CopyKernel copy_avx512() noexcept;
CopyKernel copy_avx2() noexcept;
CopyKernel copy_neon() noexcept;

// Names of the kernels this CPU can run, best first; "scalar" is always the last.
std::vector<std::string> copy_kernels();
// "auto" is the best one. Throws std::invalid_argument for a name this CPU cannot run.
CopyKernel find_copy_kernel(std::string_view name);

// Checks all spans before any byte moves; returns the sum of their lengths.
// Throws std::out_of_range naming the first span outside a mapping, std::invalid_argument when
// both mappings show one file and a destination overlaps a source.
uint64_t check_spans(const Region& dst, const Region& src, std::span<const Span> spans);
// The same for spans of which some are only read; returns the bytes that move.
uint64_t check_sum_spans(const Region& dst, const Region& src, std::span<const Span> spans);

}  // namespace kvd
