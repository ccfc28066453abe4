#include "copy_queue.hpp"

#include <stdexcept>
#include <string>
#include <utility>

#include "signals.hpp"
#include "slice.hpp"

namespace kvd {

struct CopyQueue::Job {
  Work work;
  uint64_t result = 0;
  std::exception_ptr error;
  bool begun = false;
  bool ended = false;
};

void CopyQueue::require_own_process() const {
  if (mark_.same_process()) return;
  throw std::invalid_argument("the queue belongs to the parent process: make one here");
}

uint64_t CopyQueue::submit(Work work) {
  require_own_process();
  const Taken job = std::make_shared<Job>();
  job->work = std::move(work);
  const std::lock_guard lock(mutex_);
  if (closing_) throw std::invalid_argument("the queue is closed");
  if (!thread_.joinable()) {
    const SignalsBlocked blocked;
    thread_ = std::thread([this] { run(); });
  }
  jobs_.emplace(++last_, job);
  queue_.push_back(job);
  work_came_.notify_one();
  return last_;
}

// Of an end nobody is told before helpers can come to the next copy: whoever is woken takes this
// thread's CPU, and where there are no more the helpers would have nothing to do meanwhile.
void CopyQueue::run() {
  ask_for_long_turns();
  CopyTeam team;
  std::unique_lock lock(mutex_);
  while (true) {
    if (queue_.empty()) {
      lock.unlock();
      team.opened();
      lock.lock();
    }
    while (queue_.empty() && !closing_) work_came_.wait(lock);
    if (queue_.empty()) return;
    // Given up under the lock again, so never the last share: whoever takes the ticket has that.
    const Taken job = std::move(queue_.front());
    queue_.pop_front();
    job->begun = true;
    lock.unlock();
    try {
      job->result = job->work(team);
    } catch (...) {
      job->error = std::current_exception();
    }
    team.opened();  // where it shared nothing out
    lock.lock();
    job->ended = true;
    ++events_;
    team.once_open([this] { tell(); });
  }
}

void CopyQueue::tell() {
  const std::lock_guard lock(mutex_);
  ended_.notify_all();
  news_.notify_all();
}

CopyQueue::Taken CopyQueue::take(uint64_t ticket) {
  require_own_process();
  const std::lock_guard lock(mutex_);
  const auto found = jobs_.find(ticket);
  if (found == jobs_.end()) {
    throw std::invalid_argument("ticket " + std::to_string(ticket) +
                                " is none that is still to be finished");
  }
  Taken taken = std::move(found->second);
  jobs_.erase(found);
  return taken;
}

uint64_t CopyQueue::outcome(const Taken& taken) {
  std::unique_lock lock(mutex_);
  while (!taken->ended) ended_.wait(lock);
  if (taken->error) std::rethrow_exception(taken->error);
  return taken->result;
}

bool CopyQueue::cancel(uint64_t ticket) {
  require_own_process();
  Taken dropped;  // freed after the lock
  const std::lock_guard lock(mutex_);
  const auto found = jobs_.find(ticket);
  if (found == jobs_.end() || found->second->begun) return false;
  dropped = std::move(found->second);
  std::erase(queue_, dropped);
  jobs_.erase(found);
  return true;
}

uint64_t CopyQueue::wait(uint64_t seen) {
  require_own_process();
  std::unique_lock lock(mutex_);
  while (events_ == seen && !closing_) news_.wait(lock);
  return events_;
}

void CopyQueue::rouse() {
  require_own_process();
  const std::lock_guard lock(mutex_);
  ++events_;
  news_.notify_all();
}

void CopyQueue::close() {
  if (!mark_.same_process()) return;
  const std::lock_guard ending(ending_);
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    for (const Taken& job : queue_) {
      job->error = std::make_exception_ptr(std::invalid_argument("the queue was closed before it"));
      job->ended = true;
    }
    queue_.clear();
    work_came_.notify_all();
    ended_.notify_all();
    news_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace kvd
