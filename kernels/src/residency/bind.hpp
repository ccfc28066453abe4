// What the two halves of the extension module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>

#include "arguments.hpp"
#include "tables.hpp"

namespace kvd::residency {

inline Table table_of(const Tables& tables, nb::handle table) {
  return tables.table(within(table, "table", 0, tables.num_tables() - 1));
}

// A memoryview that keeps the owner of its memory alive.
template <typename T>
nb::object view_of(T* data, std::initializer_list<size_t> shape, nb::handle owner) {
  return nb::cast(nb::ndarray<nb::memview, T>(data, shape, owner));
}

void bind_tables(nb::module_& module);
void bind_step(nb::module_& module);

}  // namespace kvd::residency
