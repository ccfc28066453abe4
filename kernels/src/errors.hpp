// The two failures that have no standard C++ exception with the right Python counterpart.
// std::out_of_range becomes IndexError and std::invalid_argument ValueError by themselves.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace kvd {

// A system call failed: becomes OSError(code, text), so PermissionError and friends come out right.
class OsError : public std::exception {
 public:
  OsError(int code, std::string text) : code_(code), text_(std::move(text)) {}
  int code() const noexcept { return code_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  int code_;
  std::string text_;
};

// Memory is still lent out: becomes BufferError.
class StillViewed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace kvd
