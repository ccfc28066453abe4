// Zeroed memory whose pages come when they are touched, at an address that never changes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvd::residency {

class Memory {
 public:
  // Throws std::bad_alloc.
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  uint8_t* data() const noexcept { return data_; }
  size_t size() const noexcept { return size_; }

 private:
  uint8_t* data_;
  size_t size_;
};

// Hands out arrays one behind another, each at a cache line; without memory it only counts.
class Carver {
 public:
  explicit Carver(uint8_t* base) : base_(base) {}

  template <typename T>
  T* take(size_t count) {
    const size_t at = used_;
    used_ += (count * sizeof(T) + kLine - 1) / kLine * kLine;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  size_t used() const noexcept { return used_; }

 private:
  static constexpr size_t kLine = 64;
  uint8_t* base_;
  size_t used_ = 0;
};

}  // namespace kvd::residency
