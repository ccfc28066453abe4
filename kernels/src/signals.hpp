// Threads of ours take no signals: handlers belong to the threads of whoever calls.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace kvd {

// Threads made while it lives inherit a mask that blocks all signals.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace kvd
