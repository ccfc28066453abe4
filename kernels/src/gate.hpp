// Sleeping on the words of a gate page. Theory of operation:
//
// The writer (another process) stores a slot's word with release order and then adds to an eventfd.
// Any number of threads wait for words of their own. A thread first spins on its word, then sleeps.
// Among the sleepers one at a time is the *leader*: it alone polls and consumes the eventfd; the
// others wait on a condition variable. So a lone sleeper costs one wake, like a bare eventfd.
//
// No wake is lost:
//   * The leader checks its word under the mutex after taking the lead and before it polls. A word
//     stored later is followed by an eventfd write that nobody else can consume: poll returns.
//   * A follower checks its word under the mutex before it waits. The leader broadcasts under the
//     mutex after it consumed. So either the follower was waiting and is woken, or it takes the
//     mutex after the leader did, hence after the store, and sees the word.
//   * Whoever leaves while nobody leads wakes one follower, which leads on.
//
// Hangup (end of file on the connection, or close()) is sticky: once seen, no wait returns "free".
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "region.hpp"
#include "sync.hpp"

namespace kvd {

// A file descriptor of our own: a duplicate, so that its number cannot be reused under us.
class OwnFd {
 public:
  OwnFd(int fd, const char* name);  // duplicates; OsError naming it
  explicit OwnFd(int fd) noexcept : fd_(fd) {}
  ~OwnFd();
  OwnFd(const OwnFd&) = delete;
  OwnFd& operator=(const OwnFd&) = delete;
  int get() const noexcept { return fd_; }
  void close() noexcept;

 private:
  int fd_;
};

enum class Outcome { kNone, kFree, kQuarantined, kTimeout, kHangup, kInterrupted };

struct WaitResult {
  Outcome outcome;
  int64_t epoch;
};

struct GateCounts {
  uint64_t waits;     // wait() calls
  uint64_t spins;     // waits that ended while spinning
  uint64_t wakes;     // times the eventfd was consumed
  uint64_t timeouts;  // waits that ended at their deadline
  uint64_t hangups;   // waits that ended by hangup
};

class Gate {
 public:
  // Pins the page until close(). std::invalid_argument for a layout that does not fit it.
  Gate(std::shared_ptr<Region> page, int event_fd, int hangup_fd, uint64_t first_word,
       uint64_t stride);
  ~Gate();
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  uint64_t slots() const noexcept { return slots_; }

  // Outcome of the word as it is now, kNone to go on waiting. Never blocks. Call it before wait().
  WaitResult poll_word(uint64_t slot, int64_t after_epoch);
  // Sleeps until the word allows it, the deadline, a hangup, or a signal (kInterrupted).
  WaitResult wait(uint64_t slot, int64_t after_epoch, int64_t deadline_ns, int64_t spin_until_ns);

  void count(const WaitResult& result) noexcept;  // once per finished wait
  GateCounts counts() const noexcept;
  bool hung_up();
  void close() noexcept;

 private:
  class Visit;
  void require_own_process() const;  // std::invalid_argument in a forked child
  WaitResult check(uint64_t slot, int64_t after_epoch) const noexcept;
  WaitResult spin(uint64_t slot, int64_t after_epoch, int64_t until_ns) noexcept;
  WaitResult sleep(uint64_t slot, int64_t after_epoch, int64_t deadline_ns);
  // Polls as the leader; the lock is released meanwhile. False when a signal ended the sleep.
  bool lead(std::unique_lock<std::mutex>& lock, int64_t deadline_ns);
  void consume_event() noexcept;

  std::shared_ptr<Region> page_;
  uint64_t slots_;
  const uint8_t* words_;
  uint64_t stride_;
  OwnFd event_;
  OwnFd hangup_;
  OwnFd stop_;  // readable for ever once close() began, so every poll returns
  std::atomic<bool> hung_up_{false};
  std::atomic<bool> closing_{false};
  std::atomic<uint64_t> visitors_{0};  // threads that may touch the page or the descriptors
  std::mutex mutex_;
  Condition followers_;
  Condition empty_;
  bool led_ = false;
  uint64_t sleeping_ = 0;  // followers
  bool closed_ = false;
  std::atomic<uint64_t> waits_{0}, spins_{0}, wakes_{0}, timeouts_{0}, hangups_{0};
};

}  // namespace kvd
