#include "copy_team.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "signals.hpp"
#include "slice.hpp"

namespace kvd {
namespace {

// A batch takes at least 20 us, far more than taking it, and a small part of the copy, so that all
// end at about the same time. Threads that are far from each other copy faster: so it is not small.
constexpr uint64_t kBatchBytesMin = uint64_t{256} << 10;
constexpr uint64_t kBatchBytesMax = uint64_t{4} << 20;
constexpr uint64_t kBatchesOfThread = 16;

uint64_t batch_bytes(std::span<const Span> spans, size_t threads) noexcept {
  uint64_t total = 0;
  for (const Span& span : spans) total += span.bytes;
  return std::clamp(total / (threads * kBatchesOfThread), kBatchBytesMin, kBatchBytesMax);
}

// How long a thread looks for what is about to happen before it sleeps: as long as a batch. Copies
// of a stream follow one another as closely, and to be woken takes longer.
constexpr int64_t kSpinNs = 30'000;

constexpr int kNice = 8;

template <typename Ready>
bool spin(const Ready& ready) noexcept {
  const int64_t end = monotonic_ns() + kSpinNs;
  do {
    for (int turn = 0; turn < 64; ++turn) {
      if (ready()) return true;
      pause_cpu();
    }
  } while (monotonic_ns() < end);
  return false;
}

struct Batch {
  size_t first_span;
  size_t num_spans;
  size_t first_group;
  size_t num_groups;
};

// The CPUs that a helper may use. Where the others are busy for the moment in which it is woken,
// the kernel puts it on that of its caller, and both take turns until the next balancing, which is
// about as long as a whole copy takes.
class OwnCpus {
 public:
  OwnCpus() noexcept { known_ = sched_getaffinity(0, sizeof allowed_, &allowed_) == 0; }

  // Leaves a CPU for any other, until it is asked to keep off another one.
  void keep_off(int cpu) noexcept {
    // Of a machine with more CPUs than the mask has bits nothing is known, and nothing is changed.
    if (!known_ || cpu < 0 || cpu >= CPU_SETSIZE || cpu == left_) return;
    left_ = cpu;
    cpu_set_t others = allowed_;
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others) > 0) sched_setaffinity(0, sizeof others, &others);
  }

 private:
  cpu_set_t allowed_;
  bool known_;
  int left_ = -1;
};

// Spans of at most so many bytes each; the cuts keep the alignment of a span's start.
std::vector<Span> cut(std::span<const Span> spans, uint64_t most) {
  std::vector<Span> pieces;
  pieces.reserve(spans.size());
  for (Span rest : spans) {
    while (rest.bytes > most) {
      pieces.push_back({rest.dst, rest.src, most});
      rest.dst += most, rest.src += most, rest.bytes -= most;
    }
    pieces.push_back(rest);
  }
  return pieces;
}

// Whole groups in turn until a batch has so many bytes.
std::vector<Batch> batches_of(std::span<const Span> spans, std::span<const uint32_t> counts,
                              uint64_t least) {
  std::vector<Batch> batches;
  Batch batch{0, 0, 0, 0};
  uint64_t bytes = 0;
  for (const uint32_t count : counts) {
    for (size_t end = batch.num_spans + count; batch.num_spans < end; ++batch.num_spans) {
      bytes += spans[batch.first_span + batch.num_spans].bytes;
    }
    ++batch.num_groups;
    if (bytes < least) continue;
    batches.push_back(batch);
    batch = {batch.first_span + batch.num_spans, 0, batch.first_group + batch.num_groups, 0};
    bytes = 0;
  }
  if (batch.num_groups != 0) batches.push_back(batch);
  return batches;
}

}  // namespace

CopyTeam::~CopyTeam() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    ++tasks_;
    came_.notify_all();
  }
  for (std::thread& helper : helpers_) helper.join();
}

void CopyTeam::run(size_t count, size_t threads, const std::function<void(size_t)>& work) {
  const size_t places = std::min(threads, count) - (count != 0);
  try {
    const SignalsBlocked blocked;
    while (helpers_.size() < places) helpers_.emplace_back([this] { help(); });
  } catch (const std::system_error&) {
    // No thread to be had: those that are here do it all.
  }
  {
    const std::lock_guard lock(mutex_);
    next_ = 0, count_ = count, work_ = &work, places_ = places, caller_cpu_ = sched_getcpu();
    ++tasks_;
    if (places != 0) came_.notify_all();
  }
  opened();
  for (size_t i = next_++; i < count; i = next_++) work(i);
  await_helpers();
}

void CopyTeam::opened() {
  if (then_) std::exchange(then_, nullptr)();
}

// Lets nobody in any more, and waits for those that are.
void CopyTeam::await_helpers() {
  std::unique_lock lock(mutex_);
  places_ = 0;
  if (inside_ == 0) return;
  lock.unlock();
  const bool are_out = spin([this] { return inside_.load(std::memory_order_acquire) == 0; });
  lock.lock();
  while (!are_out && inside_ != 0) left_.wait(lock);
}

void CopyTeam::help() {
  // A helper takes what is left of the CPUs: whoever keeps the books goes first. Where that may not
  // be said, it shares with them.
  setpriority(PRIO_PROCESS, 0, std::max(kNice, getpriority(PRIO_PROCESS, 0)));
  ask_for_long_turns();
  OwnCpus cpus;
  uint64_t seen = 0;
  while (true) {
    spin([&] { return tasks_.load(std::memory_order_acquire) != seen; });
    std::unique_lock lock(mutex_);
    while (tasks_ == seen) came_.wait(lock);
    seen = tasks_;
    if (ending_) return;
    if (places_ == 0) continue;
    --places_;
    ++inside_;
    const size_t count = count_;
    const auto& work = *work_;
    const int taken = caller_cpu_;
    lock.unlock();
    cpus.keep_off(taken);
    for (size_t i = next_++; i < count; i = next_++) work(i);
    lock.lock();
    if (--inside_ == 0) left_.notify_one();
  }
}

void copy_in_team(CopyTeam& team, CopyFn copy, uint8_t* dst, const uint8_t* src,
                  std::span<const Span> spans, size_t threads) {
  if (threads < 2) {
    team.opened();
    return copy(dst, src, spans);
  }
  const uint64_t size = batch_bytes(spans, threads);
  const std::vector<Span> pieces = cut(spans, size);
  const std::vector<uint32_t> each(pieces.size(), 1);
  const std::vector<Batch> batches = batches_of(pieces, each, size);
  team.run(batches.size(), threads, [&](size_t i) {
    copy(dst, src, std::span(pieces).subspan(batches[i].first_span, batches[i].num_spans));
  });
}

void copy_sums_in_team(CopyTeam& team, CopySumFn copy, uint8_t* dst, const uint8_t* src,
                       std::span<const Span> spans, std::span<const uint32_t> counts,
                       uint32_t* sums, size_t threads) {
  if (threads < 2) {
    team.opened();
    return copy(dst, src, spans, counts, sums);
  }
  const uint64_t size = batch_bytes(spans, threads);
  const std::vector<Batch> batches = batches_of(spans, counts, size);
  team.run(batches.size(), threads, [&](size_t i) {
    const Batch& batch = batches[i];
    copy(dst, src, spans.subspan(batch.first_span, batch.num_spans),
         counts.subspan(batch.first_group, batch.num_groups), sums + batch.first_group);
  });
}

}  // namespace kvd
