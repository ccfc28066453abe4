// Buffers of Python objects, registered once: their addresses are fixed and they stay in memory as
// long as the object that took them lives.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

#include "layout.hpp"

namespace kvd::rows {

namespace nb = nanobind;

// Below this an operation takes less time than handing the interpreter lock over twice.
constexpr uint64_t kKeepLockBytes = 16384;

enum class Kind { kBytes, kInt32, kInt64, kFloat32 };

class Array {
 public:
  // A C-contiguous buffer of such items (kBytes: of any), with so many dimensions (0: any number).
  // TypeError, ValueError or BufferError name the argument.
  Array(nb::handle source, const char* name, Kind kind, int dimensions, bool writable);
  Array(Array&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  Array& operator=(Array&&) = delete;
  ~Array() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }

  template <typename Item>
  Item* data() const noexcept {
    return static_cast<Item*>(view_.buf);
  }
  uint64_t bytes() const noexcept { return static_cast<uint64_t>(view_.len); }
  bool writable() const noexcept { return view_.readonly == 0; }
  Memory memory() const noexcept { return {data<uint8_t>(), bytes(), writable()}; }
  size_t extent(int dimension) const noexcept {
    return static_cast<size_t>(view_.shape[dimension]);
  }

 private:
  Py_buffer view_{};
};

// ValueError unless the array has this extent in a dimension.
void require_extent(const Array& array, const char* name, int dimension, size_t extent);

void bind_copier(nb::module_& module);
void bind_attention(nb::module_& module);

}  // namespace kvd::rows
