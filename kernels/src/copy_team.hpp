// Several threads that share one copy out among them.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "copy.hpp"
#include "sync.hpp"

namespace kvd {

// Most threads of one call; two saturate what one core's copy leaves of a memory channel.
constexpr size_t kTeamMax = 16;

// A thread and its helpers. These stay from one task to the next: making one takes as long as a
// fifth of a layer's copy. Only one thread calls it, and the same destroys it.
class CopyTeam {
 public:
  CopyTeam() = default;
  ~CopyTeam();
  CopyTeam(const CopyTeam&) = delete;
  CopyTeam& operator=(const CopyTeam&) = delete;

  // Runs work(i) for i in [0, count) once each, in no order, in the calling thread and at most
  // threads - 1 helpers. Who is done takes the next i, so a helper that comes late, or not at all,
  // costs nothing but its help. What helpers have written is visible to the caller afterwards.
  void run(size_t count, size_t threads, const std::function<void(size_t)>& work);

  // Has something done by the caller's thread once helpers can come to its next task: what would
  // cost the caller its CPU, as it wakes another thread, then keeps no helper waiting.
  void once_open(std::function<void()> then) { then_ = std::move(then); }
  // Does it now, if it was not done yet.
  void opened();

 private:
  void help();
  void await_helpers();

  std::mutex mutex_;
  Condition came_;  // a task, or the end
  Condition left_;  // the last helper that was at the task
  std::vector<std::thread> helpers_;
  std::atomic<uint64_t> tasks_{0};  // changed under mutex_, and by the end, too
  std::atomic<size_t> inside_{0};   // helpers at the task; changed under mutex_
  std::atomic<size_t> next_{0};
  const std::function<void(size_t)>* work_ = nullptr;  // of an open task
  size_t count_ = 0;
  size_t places_ = 0;  // helpers that may still come to it
  int caller_cpu_ = -1;
  std::function<void()> then_;
  bool ending_ = false;
};

// As the kernel itself, by up to so many threads of a team. On return every byte is ordered before
// any later store of the calling thread.
void copy_in_team(CopyTeam& team, CopyFn copy, uint8_t* dst, const uint8_t* src,
                  std::span<const Span> spans, size_t threads);

// The same with checksums; a group is not divided.
void copy_sums_in_team(CopyTeam& team, CopySumFn copy, uint8_t* dst, const uint8_t* src,
                       std::span<const Span> spans, std::span<const uint32_t> counts,
                       uint32_t* sums, size_t threads);

}  // namespace kvd
