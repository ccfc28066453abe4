// How far strides reach in memory, without a sum that could overflow.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "layout.hpp"

namespace kvd::rows {

// The start of the last row that strides reach; offsets and strides beyond kExtentMax are refused
// with std::invalid_argument.
class Extent {
 public:
  Extent(std::string what, uint64_t offset) : what_(std::move(what)), end_(offset) { check(); }

  Extent& reach(uint64_t stride, uint64_t count) {
    const auto more = static_cast<unsigned __int128>(stride) * (count - 1);
    end_ += more > kExtentMax ? kExtentMax : static_cast<uint64_t>(more);
    check();
    return *this;
  }

  void fit(uint64_t row_bytes, uint64_t bytes) const {
    if (end_ + row_bytes <= bytes) return;
    throw std::invalid_argument(what_ + " ends at byte " + std::to_string(end_ + row_bytes) +
                                " of " + std::to_string(bytes) +
                                ": give it more memory, or smaller strides");
  }

 private:
  void check() const {
    if (end_ < kExtentMax) return;
    throw std::invalid_argument(what_ + " has an offset or a stride above 2**62");
  }

  std::string what_;
  uint64_t end_;
};

}  // namespace kvd::rows
