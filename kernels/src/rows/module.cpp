// The extension module kvd_kernels._rows.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "kernels.hpp"

NB_MODULE(_rows, module) {
  module.doc() = "Native part of kvd_kernels.rows; import that instead.";
  nanobind::set_leak_warnings(false);
  // The class lives as long as the module.
  nanobind::exception<kvd::rows::Hole>(module, "HoleError", PyExc_ValueError);
  module.def("row_kernels", kvd::rows::row_kernels,
             "Return the names of the kernels this CPU can run, best first, \"scalar\" last.");
  kvd::rows::bind_copier(module);
  kvd::rows::bind_attention(module);
}
