// What a registered buffer must be.
#include "arrays.hpp"

#include <string_view>

namespace kvd::rows {
namespace {

struct Expected {
  Py_ssize_t width;
  std::string_view codes;
  const char* text;
};

Expected expected_of(Kind kind) {
  switch (kind) {
    case Kind::kInt32:
      return {4, "il", "int32"};
    case Kind::kInt64:
      return {8, "lq", "int64"};
    case Kind::kFloat32:
      return {4, "f", "float32"};
    case Kind::kBytes:
      break;
  }
  return {0, "", "bytes"};
}

bool is_of(const Py_buffer& view, const Expected& expected) {
  if (expected.width == 0) return true;
  std::string_view format = view.format == nullptr ? "B" : view.format;
  if (format.size() == 2 && std::string_view("@=<").find(format[0]) != std::string_view::npos) {
    format.remove_prefix(1);
  }
  return view.itemsize == expected.width && format.size() == 1 &&
         expected.codes.find(format[0]) != std::string_view::npos;
}

}  // namespace

Array::Array(nb::handle source, const char* name, Kind kind, int dimensions, bool writable) {
  if (PyObject_CheckBuffer(source.ptr()) == 0) {
    PyErr_Format(PyExc_TypeError, "%s must be an array, not %s", name,
                 Py_TYPE(source.ptr())->tp_name);
    throw nb::python_error();
  }
  if (PyObject_GetBuffer(source.ptr(), &view_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
    throw nb::python_error();
  }
  // What is refused below is given back: a constructor that throws runs no destructor.
  const Expected expected = expected_of(kind);
  if (!is_of(view_, expected)) {
    PyErr_Format(PyExc_TypeError, "%s must be an array of %s, not of format '%s'", name,
                 expected.text, view_.format);
  } else if (dimensions != 0 && view_.ndim != dimensions) {
    PyErr_Format(PyExc_ValueError, "%s has %d dimensions but must have %d", name, view_.ndim,
                 dimensions);
  } else if (writable && view_.readonly != 0) {
    PyErr_Format(PyExc_ValueError, "%s is read-only", name);
  } else if (view_.len == 0) {
    PyErr_Format(PyExc_ValueError, "%s is empty", name);
  } else {
    return;
  }
  PyBuffer_Release(&view_);
  throw nb::python_error();
}

void require_extent(const Array& array, const char* name, int dimension, size_t extent) {
  if (array.extent(dimension) == extent) return;
  PyErr_Format(PyExc_ValueError, "%s has %zu items in dimension %d but must have %zu", name,
               array.extent(dimension), dimension, extent);
  throw nb::python_error();
}

}  // namespace kvd::rows
