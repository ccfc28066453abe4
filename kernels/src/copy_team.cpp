#include "copy_team.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "signals.hpp"

namespace kvd {
namespace {

// A batch takes about 50 us: far more than taking it, far less than a layer.
constexpr uint64_t kBatchBytes = uint64_t{512} << 10;

struct Batch {
  size_t first_span;
  size_t num_spans;
  size_t first_group;
  size_t num_groups;
};

// Keeps a helper off the CPU that its caller works on. Otherwise, where the other CPUs are busy for
// the moment in which it is made, the kernel puts it there, and both take turns until the next
// balancing, which is about as long as a whole copy takes.
void keep_off(int cpu) noexcept {
  cpu_set_t allowed;  // of a machine with more CPUs than it has bits: fails, and nothing is changed
  if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  CPU_CLR(cpu, &allowed);
  if (CPU_COUNT(&allowed) > 0) sched_setaffinity(0, sizeof allowed, &allowed);
}

// Runs work(i) for i in [0, count) once each, in no order.
template <typename Work>
void share_out(size_t count, size_t threads, const Work& work) {
  std::atomic<size_t> next{0};
  const auto take = [&] {
    for (size_t i = next++; i < count; i = next++) work(i);
  };
  const int here = sched_getcpu();
  const auto help = [&] {
    keep_off(here);
    take();
  };
  std::vector<std::thread> helpers;
  helpers.reserve(threads);
  try {
    const SignalsBlocked blocked;
    while (helpers.size() + 1 < std::min(threads, count)) helpers.emplace_back(help);
  } catch (const std::system_error&) {
    // No thread to be had: those that are here do it all.
  }
  take();
  for (std::thread& helper : helpers) helper.join();
}

// Spans of at most kBatchBytes each; the cuts keep the alignment of a span's start.
std::vector<Span> cut(std::span<const Span> spans) {
  std::vector<Span> pieces;
  pieces.reserve(spans.size());
  for (Span rest : spans) {
    while (rest.bytes > kBatchBytes) {
      pieces.push_back({rest.dst, rest.src, kBatchBytes});
      rest.dst += kBatchBytes, rest.src += kBatchBytes, rest.bytes -= kBatchBytes;
    }
    pieces.push_back(rest);
  }
  return pieces;
}

// Whole groups in turn until a batch has kBatchBytes.
std::vector<Batch> batches_of(std::span<const Span> spans, std::span<const uint32_t> counts) {
  std::vector<Batch> batches;
  Batch batch{0, 0, 0, 0};
  uint64_t bytes = 0;
  for (const uint32_t count : counts) {
    for (size_t end = batch.num_spans + count; batch.num_spans < end; ++batch.num_spans) {
      bytes += spans[batch.first_span + batch.num_spans].bytes;
    }
    ++batch.num_groups;
    if (bytes < kBatchBytes) continue;
    batches.push_back(batch);
    batch = {batch.first_span + batch.num_spans, 0, batch.first_group + batch.num_groups, 0};
    bytes = 0;
  }
  if (batch.num_groups != 0) batches.push_back(batch);
  return batches;
}

}  // namespace

void copy_in_team(CopyFn copy, uint8_t* dst, const uint8_t* src, std::span<const Span> spans,
                  size_t threads) {
  if (threads < 2) return copy(dst, src, spans);
  const std::vector<Span> pieces = cut(spans);
  const std::vector<uint32_t> each(pieces.size(), 1);
  const std::vector<Batch> batches = batches_of(pieces, each);
  share_out(batches.size(), threads, [&](size_t i) {
    copy(dst, src, std::span(pieces).subspan(batches[i].first_span, batches[i].num_spans));
  });
}

void copy_sums_in_team(CopySumFn copy, uint8_t* dst, const uint8_t* src,
                       std::span<const Span> spans, std::span<const uint32_t> counts,
                       uint32_t* sums, size_t threads) {
  if (threads < 2) return copy(dst, src, spans, counts, sums);
  const std::vector<Batch> batches = batches_of(spans, counts);
  share_out(batches.size(), threads, [&](size_t i) {
    const Batch& batch = batches[i];
    copy(dst, src, spans.subspan(batch.first_span, batch.num_spans),
         counts.subspan(batch.first_group, batch.num_groups), sums + batch.first_group);
  });
}

}  // namespace kvd
