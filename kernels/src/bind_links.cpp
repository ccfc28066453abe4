// Python functions unlink_blocks, link_range and mark_blocks.
#include <nanobind/nanobind.h>

#include <limits>

#include "block_links.hpp"
#include "columns.hpp"
#include "convert.hpp"

namespace kvd {
namespace {

constexpr int64_t kMaxU32 = std::numeric_limits<uint32_t>::max();

constexpr const char* kUnlinkDoc =
    R"(Take blocks out of the queues that links in arrays keep; return how many left each queue.

N blocks, Q queues. after, before: [N + Q] i32, neighbours in a ring, of which entry N + q is the
head of queue q. home: [N] u8, 0 for a block in no queue, else 1 + queue; C-contiguous writable
buffers, changed in place. blocks: any numbers of blocks; those in no queue are passed over.
Returns [Q] counts. Defined by reference.py::unlink_blocks.

Raises:
    IndexError: names the first block that is none; those before it have left.
    ValueError: a buffer has the wrong length or is read-only, or links lead outside.
    TypeError: blocks is not a list of int.)";

constexpr const char* kLinkDoc =
    R"(Put blocks start .. stop - 1, none of them in a queue, at the end of a queue.

Arrays as for unlink_blocks, changed in place. Defined by reference.py::link_range.

Raises:
    IndexError: a block or the queue is none, or the range is empty; nothing changes then.
    ValueError: a buffer has the wrong length or is read-only, or links lead outside.)";

constexpr const char* kMarkDoc =
    R"(Set marks[block] to 1 for each block; return whether home[block] is not 0 for any of them.

N blocks. marks: [N] u8, changed in place. home: [N] u8; both C-contiguous. Defined by
reference.py::mark_blocks. IndexError, ValueError and TypeError as for unlink_blocks.)";

std::vector<int64_t> numbers_of(nb::handle blocks) {
  if (PyList_Check(blocks.ptr()) == 0) throw nb::type_error("blocks must be a list of int");
  const auto count = static_cast<size_t>(PyList_GET_SIZE(blocks.ptr()));
  std::vector<int64_t> numbers(count);
  for (size_t n = 0; n < count; ++n) {
    PyObject* item = PyList_GET_ITEM(blocks.ptr(), static_cast<Py_ssize_t>(n));
    if (PyLong_Check(item) == 0) throw nb::type_error("blocks must be a list of int");
    int overflow = 0;
    numbers[n] = PyLong_AsLongLongAndOverflow(item, &overflow);
    if (overflow != 0) numbers[n] = -1;
  }
  return numbers;
}

// The caller's arrays stay borrowed as long as this lives.
struct Links {
  Links(nb::handle after, nb::handle before, nb::handle home)
      : of_after(after, "after"), of_before(before, "before"), of_home(home, "home") {}

  BlockLinks checked() const;

  Bytes of_after;
  Bytes of_before;
  Bytes of_home;
};

BlockLinks Links::checked() const {
  const uint64_t total = of_home.size();
  const uint64_t nodes = of_after.size() / sizeof(int32_t);
  if (nodes < total || nodes > total + std::numeric_limits<uint8_t>::max()) {
    throw std::invalid_argument("after has " + std::to_string(nodes) + " entries for " +
                                std::to_string(total) + " blocks and up to 255 queues");
  }
  return {{column_out<int32_t>(of_after, "after", nodes), nodes},
          {column_out<int32_t>(of_before, "before", nodes), nodes},
          {column_out<uint8_t>(of_home, "home", total), total}};
}

nb::object unlink(nb::handle after, nb::handle before, nb::handle home, nb::handle blocks) {
  const Links links(after, before, home);
  nb::list left;
  for (const uint64_t count : unlink_blocks(links.checked(), numbers_of(blocks))) {
    left.append(count);
  }
  return std::move(left);
}

void link(nb::handle after, nb::handle before, nb::handle home, nb::handle queue, nb::handle start,
          nb::handle stop) {
  const Links links(after, before, home);
  const auto number = [](nb::handle value, const char* name) {
    return static_cast<uint64_t>(integer_within(value, name, 0, kMaxU32));
  };
  link_range(links.checked(), number(queue, "queue"), number(start, "start"),
             number(stop, "stop"));
}

bool mark(nb::handle marks, nb::handle home, nb::handle blocks) {
  const Bytes of_marks(marks, "marks");
  const Bytes of_home(home, "home");
  const uint64_t total = of_home.size();
  const std::span<uint8_t> to{column_out<uint8_t>(of_marks, "marks", total), total};
  return mark_blocks(to, {of_home.data(), total}, numbers_of(blocks));
}

}  // namespace

void bind_links(nb::module_& module) {
  module.def("unlink_blocks", unlink, nb::arg("after"), nb::arg("before"), nb::arg("home"),
             nb::arg("blocks"),
             nb::sig("def unlink_blocks(after: Buffer, before: Buffer, home: Buffer, "
                     "blocks: list[int]) -> list[int]"),
             kUnlinkDoc);
  module.def("link_range", link, nb::arg("after"), nb::arg("before"), nb::arg("home"),
             nb::arg("queue"), nb::arg("start"), nb::arg("stop"),
             nb::sig("def link_range(after: Buffer, before: Buffer, home: Buffer, queue: int, "
                     "start: int, stop: int) -> None"),
             kLinkDoc);
  module.def("mark_blocks", mark, nb::arg("marks"), nb::arg("home"), nb::arg("blocks"),
             nb::sig("def mark_blocks(marks: Buffer, home: Buffer, blocks: list[int]) -> bool"),
             kMarkDoc);
}

}  // namespace kvd
