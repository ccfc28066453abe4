// How long a thread may run before others of its CPU have their turn.
#pragma once

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace kvd {

// Asks for long turns for the calling thread: they come later for that, and who wakes up for a
// moment goes first. Linux from 6.12 on; what came before takes no notice. Where it is refused, as
// for a thread under a real-time policy, nothing is changed.
inline void ask_for_long_turns() noexcept {
  constexpr uint64_t kTurnNs = 20'000'000;
  constexpr uint64_t kKeepPolicy = 0x08;
  struct {  // sched_attr of sched_setattr(2), its first version
    uint32_t size;
    uint32_t policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } turns{};
  errno = 0;
  turns.nice = getpriority(PRIO_PROCESS, 0);
  if (errno != 0) return;
  turns.size = sizeof turns;
  turns.flags = kKeepPolicy;
  turns.runtime = kTurnNs;
  static_cast<void>(syscall(SYS_sched_setattr, 0, &turns, 0));
}

}  // namespace kvd
