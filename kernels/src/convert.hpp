// Python arguments into C++ values, with errors that name the field.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>

#include "region.hpp"
#include "unlocked.hpp"

namespace kvd {

namespace nb = nanobind;

// What Python calls Mapping: the object owns nothing but a share of the region.
struct Mapping {
  std::shared_ptr<Region> region;

  // Unmapping many small pages takes long, and nobody else can reach the object any more.
  ~Mapping() {
    const Unlocked unlocked;
    region.reset();
  }
};

struct Range {
  uint64_t offset;
  uint64_t length;
};

// Any object with __index__; TypeError names the field. Values that do not fit saturate, so that a
// range check refuses them.
int64_t integer(nb::handle value, const char* field);
// The same, but within [low, high]: ValueError names field, value and range.
int64_t integer_within(nb::handle value, const char* field, int64_t low, int64_t high);
// [offset, offset + length) of an open region; IndexError names offset, length and size.
// A length of None reaches to the end.
Range range_within(const Region& region, nb::handle offset, nb::handle length);

// A contiguous byte buffer borrowed from a Python object.
class Bytes {
 public:
  Bytes(nb::handle source, const char* field);  // TypeError or BufferError
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  const uint8_t* data() const noexcept { return static_cast<const uint8_t*>(view_.buf); }
  uint64_t size() const noexcept { return static_cast<uint64_t>(view_.len); }
  const Py_buffer& view() const noexcept { return view_; }

 private:
  Py_buffer view_;
};

// Below this an operation takes less time than handing the interpreter lock over twice.
constexpr uint64_t kKeepLockBytes = 16384;

void bind_mapping(nb::module_& module);
void bind_ops(nb::module_& module);
void bind_gate(nb::module_& module);
void bind_index(nb::module_& module);
void bind_links(nb::module_& module);
void bind_queue(nb::module_& module);

}  // namespace kvd
