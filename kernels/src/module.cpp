// The extension module kvd_kernels._host: argument conversion, errors, and the list of bindings.
#include <nanobind/nanobind.h>

#include <limits>

#include "convert.hpp"
#include "errors.hpp"

namespace kvd {

namespace {

// The value of anything with __index__; `fits` is false, and the value the nearest, beyond 64 bits.
int64_t index_of(nb::handle value, const char* field, bool& fits) {
  if (PyIndex_Check(value.ptr()) == 0) {
    PyErr_Format(PyExc_TypeError, "%s must be an int, not %s", field,
                 Py_TYPE(value.ptr())->tp_name);
    throw nb::python_error();
  }
  const nb::object exact = nb::steal(PyNumber_Index(value.ptr()));
  if (!exact.is_valid()) throw nb::python_error();
  int overflow = 0;
  const int64_t number = PyLong_AsLongLongAndOverflow(exact.ptr(), &overflow);
  fits = overflow == 0;
  if (fits) return number;
  return overflow > 0 ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int64_t>::min();
}

}  // namespace

int64_t integer(nb::handle value, const char* field) {
  bool fits = false;
  return index_of(value, field, fits);
}

int64_t integer_within(nb::handle value, const char* field, int64_t low, int64_t high) {
  bool fits = false;
  const int64_t number = index_of(value, field, fits);
  if (fits && low <= number && number <= high) return number;
  PyErr_Format(PyExc_ValueError, "%s is %S but must be %lld to %lld", field, value.ptr(),
               static_cast<long long>(low), static_cast<long long>(high));
  throw nb::python_error();
}

Range range_within(const Region& region, nb::handle offset, nb::handle length) {
  region.require_open();
  const int64_t begin = integer(offset, "offset");
  const auto size = static_cast<int64_t>(region.size());
  const int64_t count = length.is_none() ? size - begin : integer(length, "length");
  const Range range{static_cast<uint64_t>(begin), static_cast<uint64_t>(count)};
  if (begin >= 0 && begin <= size && count >= 0 && region.holds(range.offset, range.length)) {
    return range;
  }
  PyErr_Format(PyExc_IndexError, "offset %S with length %S lies outside the mapping of size %lld",
               offset.ptr(), length.ptr(), static_cast<long long>(size));
  throw nb::python_error();
}

Bytes::Bytes(nb::handle source, const char* field) {
  if (PyObject_CheckBuffer(source.ptr()) == 0) {
    PyErr_Format(PyExc_TypeError, "%s must be a bytes-like object, not %s", field,
                 Py_TYPE(source.ptr())->tp_name);
    throw nb::python_error();
  }
  if (PyObject_GetBuffer(source.ptr(), &view_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
    throw nb::python_error();
  }
}

namespace {

void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const OsError& failed) {
    const nb::object value =
        nb::steal(PyObject_CallFunction(PyExc_OSError, "is", failed.code(), failed.what()));
    // OSError(errno, text) makes the subclass that fits the errno.
    if (value.is_valid()) PyErr_SetObject(value.type().ptr(), value.ptr());
  } catch (const StillViewed& viewed) {
    PyErr_SetString(PyExc_BufferError, viewed.what());
  }
}

}  // namespace
}  // namespace kvd

NB_MODULE(_host, module) {
  module.doc() = "Native part of kvd_kernels.host; import that instead.";
  // Objects that live until the interpreter ends are no leak worth a line on a daemon's stderr.
  nanobind::set_leak_warnings(false);
  nanobind::register_exception_translator(kvd::translate);
  kvd::bind_mapping(module);
  kvd::bind_ops(module);
  kvd::bind_gate(module);
  kvd::bind_index(module);
  kvd::bind_links(module);
  kvd::bind_queue(module);
}
