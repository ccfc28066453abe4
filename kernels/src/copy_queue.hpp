// Copies one after another in a thread of their own, so that a stream of them has no gaps in which
// an interpreter would have to be woken.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "region.hpp"
#include "sync.hpp"

namespace kvd {

class CopyQueue {
 public:
  // Copies and returns the bytes moved; what it throws is the outcome of its ticket.
  using Work = std::function<uint64_t()>;

  CopyQueue() = default;
  ~CopyQueue();
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

  // Queues work; the thread is started with the first. Returns a ticket: 1, 2, 3 ...
  // std::invalid_argument once closed or in a forked child, std::system_error without a thread.
  uint64_t submit(Work work);

  // Waits until the work of a ticket has ended; returns what it returned or throws what it threw.
  // The outcome, and what the work held, is given up with it: the caller's thread frees it.
  // std::invalid_argument for a ticket that is none or was finished or cancelled before.
  uint64_t finish(uint64_t ticket);

  // Takes work that has not begun out of the queue, and frees it; false when it has, or is none.
  bool cancel(uint64_t ticket);

  // Waits until work has ended or `rouse` was called since `seen` was returned (0 at first);
  // returns at once when one has, and when the queue is closed.
  uint64_t wait(uint64_t seen);
  void rouse();

  // Waits for the work that runs, drops what has not begun, ends the thread. Idempotent.
  void close();

 private:
  struct Job {
    Work work;
    uint64_t result = 0;
    std::exception_ptr error;
    bool begun = false;
    bool ended = false;
  };

  void run();
  void require_own_process() const;

  ForkMark mark_;
  std::mutex mutex_;
  Condition work_came_;
  Condition ended_;
  Condition news_;  // ends, calls of rouse, and the close
  std::map<uint64_t, std::shared_ptr<Job>> jobs_;  // not finished, in order of their tickets
  std::deque<std::shared_ptr<Job>> queue_;
  uint64_t last_ = 0;
  uint64_t events_ = 0;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace kvd
