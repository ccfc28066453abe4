// The interpreter lock, given up for a while.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace kvd {

// Without the interpreter lock while it lives.
//
// When the interpreter has ended, Python ends each thread that asks for the lock again, by
// unwinding its stack. The frames here cannot be unwound so: that would end the process with an
// error, although all went well. Such a thread sleeps instead until the process is gone.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      while (true) pause();
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace kvd
