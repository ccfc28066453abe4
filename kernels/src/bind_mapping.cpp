// Python class Mapping.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <limits>

#include "convert.hpp"

namespace kvd {
namespace {

constexpr auto kMaxInt = std::numeric_limits<int64_t>::max();

constexpr const char* kClassDoc =
    R"(One shared mapping of [offset, offset + length) of a file descriptor.

The descriptor may be closed afterwards. The mapping is left out of core files and is not inherited
by fork: used in a forked child it raises ValueError, and views must not be touched there.

Args:
    fd: descriptor of a memfd or another file that can be mapped shared.
    length: bytes to map, at least 1.
    writable: map for reading and writing, else for reading only.
    offset: first byte in the file, a multiple of its page size.

Raises:
    ValueError: the file is shorter than offset + length (touching it would be a SIGBUS), length is
        below 1, or offset is misaligned.
    OSError: the system refuses, e.g. PermissionError for writable=True on a read-only descriptor
        or on a file sealed against new writers.

Offsets and lengths of the methods are bytes from the start of the mapping. One outside raises
IndexError with offset, length and size; every method but close raises ValueError once closed.)";

constexpr const char* kCloseDoc =
    R"(Unmap, after every copy, read, write and populate in flight has ended. Idempotent.

The interpreter lock is released while it waits. BufferError while views or gate waiters use the
mapping; nothing changes then.)";

constexpr const char* kPageDoc =
    R"(Return the page size the kernel uses for this mapping, in KiB (4, 2048, ...).

Reads KernelPageSize in /proc/self/smaps, which costs time in proportion to the memory mapped by the
process: ask once, not per operation. OSError where /proc is missing.)";

constexpr const char* kViewDoc =
    R"(Return a memoryview of unsigned bytes onto the mapping, without a copy.

It is read-only unless the mapping is writable; without a length it reaches to the end. The view
keeps the memory mapped: close() raises BufferError while one is alive.)";

constexpr const char* kReadDoc =
    "Copy length bytes out. The interpreter lock is released above 16 KiB.";

constexpr const char* kWriteDoc =
    R"(Copy all of data (C-contiguous, bytes-like) in.

The interpreter lock is released above 16 KiB. Readers may see it torn: publish it with store_u64.
ValueError when the mapping is read-only.)";

constexpr const char* kPopulateDoc =
    R"(Make every page that the range touches resident and mapped; contents are kept.

Returns the way used: "madvise" (MADV_POPULATE_WRITE, or READ on a read-only mapping; Linux 5.14),
or "touch" where the kernel lacks it or use_madvise is False. Either way the kernel takes the faults
inside a system call, so a page that cannot be had is an OSError (ENOMEM), never a SIGBUS. The
interpreter lock is released.)";

constexpr const char* kLoad64Doc =
    "Read the native u64 at offset (a multiple of 8, else ValueError) with acquire order.";
constexpr const char* kLoad32Doc =
    "Read the native u32 at offset (a multiple of 4, else ValueError) with acquire order.";

constexpr const char* kStore64Doc =
    R"(Write the native u64 at offset (a multiple of 8) with release order.

Whoever loads it sees every byte written here before. ValueError for a misaligned offset, a value
outside 0 to 2**64 - 1, or a read-only mapping.)";

constexpr const char* kStore32Doc =
    R"(Write the native u32 at offset (a multiple of 4) with release order.

Errors as store_u64, for values outside 0 to 2**32 - 1.)";

Region& open_region(const Mapping& self) {
  self.region->require_open();
  return *self.region;
}

void construct(Mapping* self, nb::handle fd, nb::handle length, bool writable, nb::handle offset) {
  const auto descriptor =
      static_cast<int>(integer_within(fd, "fd", 0, std::numeric_limits<int>::max()));
  const auto bytes = static_cast<uint64_t>(integer_within(length, "length", 1, kMaxInt));
  const auto begin = static_cast<uint64_t>(integer_within(offset, "offset", 0, kMaxInt));
  new (self) Mapping{std::make_shared<Region>(descriptor, bytes, writable, begin)};
}

void close_mapping(Mapping& self) {
  self.region->begin_close();
  const Unlocked unlocked;
  self.region->finish_close();
}

nb::object view(nb::handle self, nb::handle offset, nb::handle length) {
  const Range range = range_within(*nb::cast<Mapping&>(self).region, offset, length);
  const nb::object whole = nb::steal(PyMemoryView_FromObject(self.ptr()));
  if (!whole.is_valid()) throw nb::python_error();
  return whole[nb::slice(static_cast<Py_ssize_t>(range.offset),
                         static_cast<Py_ssize_t>(range.offset + range.length), Py_ssize_t{1})];
}

nb::bytes read_bytes(const Mapping& self, nb::handle offset, nb::handle length) {
  const Range range = range_within(*self.region, offset, length);
  nb::object result =
      nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(range.length)));
  if (!result.is_valid()) throw nb::python_error();
  char* target = PyBytes_AS_STRING(result.ptr());
  if (range.length <= kKeepLockBytes) {
    std::memcpy(target, self.region->data() + range.offset, range.length);
  } else {
    const Lease lease(self.region);
    const Unlocked unlocked;
    std::memcpy(target, self.region->data() + range.offset, range.length);
  }
  return nb::borrow<nb::bytes>(result);
}

void write_bytes(Mapping& self, nb::handle offset, nb::handle data) {
  open_region(self).require_writable();
  const Bytes bytes(data, "data");
  const nb::object length = nb::steal(PyLong_FromUnsignedLongLong(bytes.size()));
  const Range range = range_within(*self.region, offset, length);
  // The source may be a view of this very mapping, hence memmove.
  if (range.length <= kKeepLockBytes) {
    std::memmove(self.region->data() + range.offset, bytes.data(), range.length);
  } else {
    const Lease lease(self.region);
    const Unlocked unlocked;
    std::memmove(self.region->data() + range.offset, bytes.data(), range.length);
  }
}

template <typename Word>
Word* word_at(const Region& region, nb::handle offset) {
  const nb::object width = nb::steal(PyLong_FromSize_t(sizeof(Word)));
  const Range range = range_within(region, offset, width);
  if (range.offset % sizeof(Word) != 0) {
    throw std::invalid_argument("offset " + std::to_string(range.offset) +
                                " must be a multiple of " + std::to_string(sizeof(Word)));
  }
  return reinterpret_cast<Word*>(region.data() + range.offset);
}

template <typename Word>
Word load(const Mapping& self, nb::handle offset) {
  return __atomic_load_n(word_at<Word>(*self.region, offset), __ATOMIC_ACQUIRE);
}

template <typename Word>
void store(Mapping& self, nb::handle offset, nb::handle value) {
  open_region(self).require_writable();
  Word* word = word_at<Word>(*self.region, offset);
  const nb::object exact = nb::steal(PyNumber_Index(value.ptr()));
  if (!exact.is_valid()) throw nb::python_error();
  const unsigned long long number = PyLong_AsUnsignedLongLong(exact.ptr());
  const bool failed = PyErr_Occurred() != nullptr;
  if (failed || number > std::numeric_limits<Word>::max()) {
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "value %S does not fit an unsigned word of %zu bytes",
                 value.ptr(), sizeof(Word));
    throw nb::python_error();
  }
  __atomic_store_n(word, static_cast<Word>(number), __ATOMIC_RELEASE);
}

const char* populate(const Mapping& self, nb::handle offset, nb::handle length, bool use_madvise) {
  const Range range = range_within(*self.region, offset, length);
  const Lease lease(self.region);
  const Unlocked unlocked;
  return self.region->populate(range.offset, range.length, use_madvise);
}

uint64_t smaps_page_kb(const Mapping& self) {
  const Lease lease(self.region);
  const Unlocked unlocked;
  return self.region->kernel_page_kb();
}

int get_buffer(PyObject* self, Py_buffer* out, int flags) {
  try {
    Region& region = *nb::cast<Mapping&>(nb::handle(self)).region;
    region.pin();
    const auto size = static_cast<Py_ssize_t>(region.size());
    if (PyBuffer_FillInfo(out, self, region.data(), size, region.writable() ? 0 : 1, flags) == 0) {
      return 0;
    }
    region.unpin();
  } catch (const std::invalid_argument& closed) {
    PyErr_SetString(PyExc_ValueError, closed.what());
    out->obj = nullptr;
  }
  return -1;
}

void release_buffer(PyObject* self, Py_buffer*) {
  nb::cast<Mapping&>(nb::handle(self)).region->unpin();
}

const PyType_Slot kSlots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
    {Py_bf_releasebuffer, reinterpret_cast<void*>(release_buffer)},
    {0, nullptr},
};

void bind_words(nb::class_<Mapping>& mapping) {
  mapping
      .def("load_u64", load<uint64_t>, nb::arg("offset"),
           nb::sig("def load_u64(self, offset: int) -> int"), kLoad64Doc)
      .def("store_u64", store<uint64_t>, nb::arg("offset"), nb::arg("value"),
           nb::sig("def store_u64(self, offset: int, value: int) -> None"), kStore64Doc)
      .def("load_u32", load<uint32_t>, nb::arg("offset"),
           nb::sig("def load_u32(self, offset: int) -> int"), kLoad32Doc)
      .def("store_u32", store<uint32_t>, nb::arg("offset"), nb::arg("value"),
           nb::sig("def store_u32(self, offset: int, value: int) -> None"), kStore32Doc);
}

void bind_bytes(nb::class_<Mapping>& mapping) {
  mapping
      .def("view", view, nb::arg("offset") = 0, nb::arg("length") = nb::none(),
           nb::sig("def view(self, offset: int = 0, length: int | None = None) -> memoryview"),
           kViewDoc)
      .def("read_bytes", read_bytes, nb::arg("offset"), nb::arg("length"),
           nb::sig("def read_bytes(self, offset: int, length: int) -> bytes"), kReadDoc)
      .def("write_bytes", write_bytes, nb::arg("offset"), nb::arg("data"),
           nb::sig("def write_bytes(self, offset: int, data: Buffer) -> None"), kWriteDoc)
      .def("populate", populate, nb::arg("offset"), nb::arg("length"), nb::kw_only(),
           nb::arg("use_madvise") = true,
           nb::sig("def populate(self, offset: int, length: int, *, use_madvise: bool = True) "
                   "-> str"),
           kPopulateDoc);
}

}  // namespace

void bind_mapping(nb::module_& module) {
  nb::class_<Mapping> mapping(module, "Mapping", nb::type_slots(kSlots), nb::is_final(), kClassDoc);
  mapping
      .def("__init__", construct, nb::arg("fd"), nb::arg("length"), nb::kw_only(),
           nb::arg("writable"), nb::arg("offset") = 0,
           nb::sig("def __init__(self, fd: int, length: int, *, writable: bool, offset: int = 0) "
                   "-> None"))
      .def_prop_ro(
          "size", [](const Mapping& self) { return self.region->size(); },
          "Mapped bytes, as asked for.")
      .def_prop_ro(
          "address",
          [](const Mapping& self) { return reinterpret_cast<uintptr_t>(open_region(self).data()); },
          "Address of byte 0 in this process, for drivers that register memory.")
      .def_prop_ro(
          "writable", [](const Mapping& self) { return self.region->writable(); },
          "Whether stores are allowed.")
      .def_prop_ro(
          "closed", [](const Mapping& self) { return !self.region->open(); },
          "Whether close() has begun, or this is a forked child.")
      .def("close", close_mapping, kCloseDoc)
      .def("smaps_page_kb", smaps_page_kb, kPageDoc);
  bind_bytes(mapping);
  bind_words(mapping);
}

}  // namespace kvd
