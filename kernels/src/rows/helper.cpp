// The states of a helper: idle -> begun -> taken -> ended -> idle; begun -> idle when taken back.
#include "helper.hpp"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

namespace kvd::rows {
namespace {

constexpr int kSpinsBetweenLooks = 64;  // at the clock, or before giving way

}  // namespace

Helper::Helper(int64_t spin_ns) : spin_ns_(spin_ns), process_(getpid()) {
  // No signal is for a helper: handlers belong to the threads of whoever calls.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Helper::~Helper() {
  if (getpid() != process_) {  // a forked child has no such thread
    thread_.detach();
    return;
  }
  state_.store(kLeaving, std::memory_order_release);
  {
    const std::lock_guard lock(mutex_);
    woken_.notify_one();
  }
  thread_.join();
}

bool Helper::begin(Work work, void* context) noexcept {
  if (owned_.test_and_set(std::memory_order_acquire)) return false;
  work_ = work;
  context_ = context;
  owners_cpu_ = sched_getcpu();
  // Sequentially consistent here and in wait_for_work(): either the thread sees the work before it
  // sleeps, or it is seen asleep here.
  state_.store(kBegun, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst)) {
    const std::lock_guard lock(mutex_);
    woken_.notify_one();
  }
  return true;
}

void Helper::end() noexcept {
  uint32_t state = kBegun;
  if (!state_.compare_exchange_strong(state, kIdle, std::memory_order_acq_rel)) {
    for (int spins = 0; state_.load(std::memory_order_acquire) != kEnded; ++spins) {
      pause_cpu();
      if (spins % kSpinsBetweenLooks == kSpinsBetweenLooks - 1) std::this_thread::yield();
    }
    state_.store(kIdle, std::memory_order_relaxed);
  }
  owned_.clear(std::memory_order_release);
}

bool Helper::wait_for_work() noexcept {
  const int64_t until = monotonic_ns() + spin_ns_;
  for (int spins = 0;; ++spins) {
    const uint32_t state = state_.load(std::memory_order_acquire);
    if (state == kBegun || state == kLeaving) return state == kBegun;
    pause_cpu();
    if (spins % kSpinsBetweenLooks == 0 && monotonic_ns() >= until) break;
  }
  std::unique_lock lock(mutex_);
  asleep_.store(true, std::memory_order_seq_cst);
  uint32_t state = state_.load(std::memory_order_seq_cst);
  for (; state != kBegun && state != kLeaving; state = state_.load(std::memory_order_seq_cst)) {
    woken_.wait(lock);
  }
  asleep_.store(false, std::memory_order_relaxed);
  return state == kBegun;
}

// The scheduler may wake the thread on the CPU of its owner, who goes on working there, while
// others are idle; it would take milliseconds to part them, longer than most work here.
void Helper::leave_owners_cpu() const noexcept {
  if (sched_getcpu() != owners_cpu_ || owners_cpu_ < 0 || owners_cpu_ >= CPU_SETSIZE) return;
  cpu_set_t others;
  if (sched_getaffinity(process_, sizeof others, &others) != 0) return;
  CPU_CLR(static_cast<size_t>(owners_cpu_), &others);
  if (CPU_COUNT(&others) != 0) sched_setaffinity(0, sizeof others, &others);
}

void Helper::run() noexcept {
  while (wait_for_work()) {
    uint32_t state = kBegun;
    if (!state_.compare_exchange_strong(state, kTaken, std::memory_order_acq_rel)) continue;
    leave_owners_cpu();
    work_(context_);
    state_.store(kEnded, std::memory_order_release);
  }
}

}  // namespace kvd::rows
