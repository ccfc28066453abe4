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

#include "copy_team.hpp"
#include "region.hpp"
#include "sync.hpp"

namespace kvd {

class CopyQueue {
 public:
  // Copies, with the helpers of the queue's thread, and returns the bytes moved; what it throws is
  // the outcome of its ticket.
  using Work = std::function<uint64_t(CopyTeam& team)>;

  struct Job;
  using Taken = std::shared_ptr<Job>;

  CopyQueue() = default;
  // Not in a forked child, where the thread is missing that may have been at work on all this:
  // leave it as it is there.
  ~CopyQueue() { close(); }
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

  // Queues work; the thread is started with the first. Returns a ticket: 1, 2, 3 ...
  // std::invalid_argument once closed or in a forked child, std::system_error without a thread.
  uint64_t submit(Work work);

  // Makes a ticket void and its outcome the caller's, whose thread frees what the work held.
  // std::invalid_argument for a ticket that is none or was taken or cancelled before.
  Taken take(uint64_t ticket);
  // Waits until that work has ended; returns what it returned or throws what it threw.
  uint64_t outcome(const Taken& taken);

  // Takes work that has not begun out of the queue, and frees it; false when it has, or is none.
  bool cancel(uint64_t ticket);

  // Waits until work has ended or `rouse` was called since `seen` was returned (0 at first);
  // returns at once when one has, and when the queue is closed.
  uint64_t wait(uint64_t seen);
  void rouse();

  // Waits for the work that runs, drops what has not begun, ends the thread. Idempotent; whoever
  // calls it meanwhile waits, too. Does nothing in a forked child.
  void close();

  bool in_own_process() const noexcept { return mark_.same_process(); }

 private:
  void run();
  void tell();
  void require_own_process() const;

  ForkMark mark_;
  std::mutex mutex_;
  Condition work_came_;
  Condition ended_;
  Condition news_;  // ends, calls of rouse, and the close
  std::map<uint64_t, Taken> jobs_;  // neither taken nor cancelled, in order of their tickets
  std::deque<Taken> queue_;         // not begun
  uint64_t last_ = 0;
  uint64_t events_ = 0;
  bool closing_ = false;
  std::mutex ending_;   // taken before mutex_
  std::thread thread_;  // made under mutex_ before closing_ is set, joined under ending_ after it
};

}  // namespace kvd
