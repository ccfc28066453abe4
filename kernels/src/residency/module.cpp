// The extension module kvd_kernels._residency.
#include "bind.hpp"

NB_MODULE(_residency, module) {
  module.doc() = "Native part of kvd_kernels.residency; import that instead.";
  nanobind::set_leak_warnings(false);
  kvd::residency::bind_tables(module);
  kvd::residency::bind_step(module);
}
