// Python integers into ranges, with errors that name the argument.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace kvd::residency {

namespace nb = nanobind;

// Any object with __index__ within [low, high]. TypeError names the argument; ValueError names it,
// its value and the range.
inline int64_t within(nb::handle value, const char* name, int64_t low, int64_t high) {
  if (PyIndex_Check(value.ptr()) == 0) {
    PyErr_Format(PyExc_TypeError, "%s must be an int, not %s", name, Py_TYPE(value.ptr())->tp_name);
    throw nb::python_error();
  }
  const nb::object exact = nb::steal(PyNumber_Index(value.ptr()));
  if (!exact.is_valid()) throw nb::python_error();
  int overflow = 0;
  const int64_t number = PyLong_AsLongLongAndOverflow(exact.ptr(), &overflow);
  if (overflow == 0 && low <= number && number <= high) return number;
  PyErr_Format(PyExc_ValueError, "%s is %S but must be %lld to %lld", name, value.ptr(),
               static_cast<long long>(low), static_cast<long long>(high));
  throw nb::python_error();
}

}  // namespace kvd::residency
