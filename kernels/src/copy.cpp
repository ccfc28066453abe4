// Checks of a span list and the choice of a kernel; the kernels themselves are in copy_*.cpp.
#include "copy.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "crc32c.hpp"
#include "region.hpp"

namespace kvd {
namespace {

void copy_scalar(uint8_t* dst, const uint8_t* src, std::span<const Span> spans) {
  for (const Span& span : spans) std::memcpy(dst + span.dst, src + span.src, span.bytes);
  std::atomic_thread_fence(std::memory_order_release);
}

constexpr size_t kPiece = 16384;  // stays in L1 between its copy and its checksum

void copy_sum_scalar(uint8_t* dst, const uint8_t* src, std::span<const Span> spans,
                     std::span<const uint32_t> counts, uint32_t* sums) {
  size_t next = 0;
  for (size_t group = 0; group < counts.size(); ++group) {
    for (const size_t end = next + counts[group]; next < end; ++next) {
      const Span& span = spans[next];
      for (uint64_t at = 0; at < span.bytes; at += kPiece) {
        const size_t bytes = std::min<uint64_t>(kPiece, span.bytes - at);
        const uint8_t* from = src + span.src + at;
        if (span.dst != kNotCopied) std::memcpy(dst + span.dst + at, from, bytes);
        sums[group] = crc32c(sums[group], from, bytes);
      }
    }
  }
  std::atomic_thread_fence(std::memory_order_release);
}

#if defined(__x86_64__)
// The vector kernels join checksums with it; every CPU with AVX2 has it, some machines hide it.
bool has_carryless() { return __builtin_cpu_supports("pclmul") != 0; }
#endif

bool runs_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") != 0 && has_carryless();
#else
  return false;
#endif
}

bool runs_avx512_fold() {
#if defined(__x86_64__)
  return runs_avx512() && __builtin_cpu_supports("vpclmulqdq") != 0;
#else
  return false;
#endif
}

bool runs_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") != 0 && has_carryless();
#else
  return false;
#endif
}

struct Kernel {
  const char* name;
  CopyKernel kernel;
  bool runs;
};

// AMD family 19h (Zen 4; Zen 3 has no AVX-512) splits 512-bit stores in two: AVX2 is 3 to 5 %
// faster there.
bool splits_wide_stores() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amdfam19h") != 0;
#else
  return false;
#endif
}

// Best first.
std::array<Kernel, 5> all_kernels() {
  std::array<Kernel, 5> kernels{{
      {"avx512-fold", copy_avx512_fold(), runs_avx512_fold()},
      {"avx512", copy_avx512(), runs_avx512()},
      {"avx2", copy_avx2(), runs_avx2()},
      {"neon", copy_neon(), true},  // every aarch64 has it; null elsewhere
      {"scalar", {copy_scalar, copy_sum_scalar}, true},
  }};
  if (splits_wide_stores()) std::rotate(kernels.begin(), kernels.begin() + 2, kernels.begin() + 3);
  return kernels;
}

struct FileRange {
  uint64_t begin;
  uint64_t end;
};

std::vector<FileRange> sorted_ranges(std::span<const Span> spans, uint64_t base,
                                     uint64_t Span::*offset) {
  std::vector<FileRange> ranges;
  ranges.reserve(spans.size());
  for (const Span& span : spans) {
    if (span.bytes != 0) ranges.push_back({base + span.*offset, base + span.*offset + span.bytes});
  }
  std::ranges::sort(ranges, {}, &FileRange::begin);
  return ranges;
}

// Bytes would depend on the order of the copies, and on the kernel.
void refuse_overlap(const Region& dst, const Region& src, std::span<const Span> spans) {
  const auto to = sorted_ranges(spans, dst.file_offset(), &Span::dst);
  const auto from = sorted_ranges(spans, src.file_offset(), &Span::src);
  uint64_t from_end = 0;
  size_t next = 0;
  for (const FileRange& range : to) {
    // from_end: the furthest end of any source that begins before this destination ends.
    while (next < from.size() && from[next].begin < range.end) {
      from_end = std::max(from_end, from[next++].end);
    }
    if (from_end > range.begin) {
      throw std::invalid_argument(
          "destination bytes " + std::to_string(range.begin) + " to " + std::to_string(range.end) +
          " of the file are also a source of this call: copy overlapping ranges in two calls "
          "through a third place");
    }
  }
}

}  // namespace

std::vector<std::string> copy_kernels() {
  std::vector<std::string> names;
  for (const Kernel& kernel : all_kernels()) {
    if (kernel.kernel.copy != nullptr && kernel.runs) names.emplace_back(kernel.name);
  }
  return names;
}

CopyKernel find_copy_kernel(std::string_view name) {
  for (const Kernel& kernel : all_kernels()) {
    if (kernel.kernel.copy == nullptr || !kernel.runs) continue;
    if (name == "auto" || name == kernel.name) return kernel.kernel;
  }
  std::string known = "auto";
  for (const std::string& have : copy_kernels()) known += ", " + have;
  throw std::invalid_argument("kernel '" + std::string(name) +
                              "' does not run on this CPU: use one of " + known);
}

namespace {

[[noreturn]] void refuse_span(size_t number, const Span& span, const char* side, uint64_t offset,
                              uint64_t size) {
  throw std::out_of_range("span " + std::to_string(number) + ": " + std::to_string(span.bytes) +
                          " bytes at " + side + " offset " + std::to_string(offset) +
                          " do not fit the mapping of " + std::to_string(size) + " bytes");
}

}  // namespace

uint64_t check_spans(const Region& dst, const Region& src, std::span<const Span> spans) {
  uint64_t total = 0;
  for (size_t i = 0; i < spans.size(); ++i) {
    const Span& span = spans[i];
    if (!dst.holds(span.dst, span.bytes)) refuse_span(i, span, "dst", span.dst, dst.size());
    if (!src.holds(span.src, span.bytes)) refuse_span(i, span, "src", span.src, src.size());
    total += span.bytes;
  }
  if (dst.same_file(src)) refuse_overlap(dst, src, spans);
  return total;
}

uint64_t check_sum_spans(const Region& dst, const Region& src, std::span<const Span> spans) {
  uint64_t total = 0;
  std::vector<Span> copied;
  copied.reserve(spans.size());
  for (size_t i = 0; i < spans.size(); ++i) {
    const Span& span = spans[i];
    const bool moves = span.dst != kNotCopied;
    if (moves && !dst.holds(span.dst, span.bytes)) {
      refuse_span(i, span, "dst", span.dst, dst.size());
    }
    if (!src.holds(span.src, span.bytes)) refuse_span(i, span, "src", span.src, src.size());
    if (moves) copied.push_back(span), total += span.bytes;
  }
  if (dst.same_file(src)) refuse_overlap(dst, src, copied);
  return total;
}

}  // namespace kvd
