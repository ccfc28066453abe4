// Clock, condition variable and the pause of a spinning thread.
#pragma once

#include <pthread.h>
#include <time.h>

#include <cstdint>
#include <limits>
#include <mutex>

namespace kvd {

constexpr int64_t kNsPerSecond = 1'000'000'000;
constexpr int64_t kForever = std::numeric_limits<int64_t>::max();  // a deadline that never comes

inline int64_t monotonic_ns() noexcept {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * kNsPerSecond + now.tv_nsec;
}

inline timespec to_timespec(int64_t ns) noexcept {
  return {static_cast<time_t>(ns / kNsPerSecond), static_cast<long>(ns % kNsPerSecond)};
}

// Lets the core do something else for a moment while a thread looks again and again.
inline void pause_cpu() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" : : : "memory");  // yield is a no-op on most cores; isb really waits
#endif
}

// Unlike std::condition_variable it waits on the monotonic clock with every glibc (std needs 2.30),
// and it is never destroyed: glibc keeps nothing to free, and in a forked child the destruction
// would wait for waiting threads that do not exist there.
class Condition {
 public:
  Condition() {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&condition_, &attributes);
    pthread_condattr_destroy(&attributes);
  }
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;

  // May return early; the caller checks its own condition.
  void wait(std::unique_lock<std::mutex>& lock, int64_t deadline_ns = kForever) {
    pthread_mutex_t* mutex = lock.mutex()->native_handle();
    if (deadline_ns == kForever) {
      pthread_cond_wait(&condition_, mutex);
      return;
    }
    const timespec deadline = to_timespec(deadline_ns);
    pthread_cond_timedwait(&condition_, mutex, &deadline);
  }
  void notify_one() noexcept { pthread_cond_signal(&condition_); }
  void notify_all() noexcept { pthread_cond_broadcast(&condition_); }

 private:
  pthread_cond_t condition_;
};

}  // namespace kvd
