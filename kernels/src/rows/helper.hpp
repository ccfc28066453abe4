// One thread that helps another with its work, for as long as both like.
//
// Work that can be helped with is cut into pieces that whoever comes next takes (an atomic counter
// in the work itself), so a helper that comes late, or not at all, costs nothing but its help: the
// owner does what the helper did not take. end() waits for what the helper has in hand, which
// depends on nobody else.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

#include "../sync.hpp"

namespace kvd::rows {

class Helper {
 public:
  using Work = void (*)(void* context);

  // Starts the thread; std::system_error when there is none to be had. After work it looks for more
  // for spin_ns before it sleeps: waking an idle CPU takes longer than many a copy.
  explicit Helper(int64_t spin_ns);
  ~Helper();
  Helper(const Helper&) = delete;
  Helper& operator=(const Helper&) = delete;

  // Offers work(context) to the thread. False when somebody else's work is with it.
  bool begin(Work work, void* context) noexcept;
  // Ends what begin() returned true for: takes the work back, or waits until it has returned.
  void end() noexcept;

 private:
  enum State : uint32_t { kIdle, kBegun, kTaken, kEnded, kLeaving };

  void run() noexcept;
  bool wait_for_work() noexcept;  // false when the thread is to leave
  void leave_owners_cpu() const noexcept;

  std::atomic<uint32_t> state_{kIdle};
  std::atomic_flag owned_ = ATOMIC_FLAG_INIT;
  std::atomic<bool> asleep_{false};
  Work work_ = nullptr;
  void* context_ = nullptr;
  int owners_cpu_ = -1;
  const int64_t spin_ns_;
  const int process_;
  std::mutex mutex_;
  Condition woken_;
  std::thread thread_;
};

// A moment inside a loop that waits for another thread.
inline void pause_cpu() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace kvd::rows
