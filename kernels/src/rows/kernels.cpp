// The choice of a kernel.
#include "kernels.hpp"

#include <array>

namespace kvd::rows {
namespace {

bool runs_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0;
#else
  return false;
#endif
}

bool runs_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
         __builtin_cpu_supports("f16c") != 0;
#else
  return false;
#endif
}

// Best first; null for what is not there.
std::array<const RowKernels*, 4> usable() {
  return {runs_avx512() ? rows_avx512() : nullptr, runs_avx2() ? rows_avx2() : nullptr,
          rows_neon(), rows_scalar()};
}

}  // namespace

std::vector<std::string> row_kernels() {
  std::vector<std::string> names;
  for (const RowKernels* kernels : usable()) {
    if (kernels != nullptr) names.emplace_back(kernels->name);
  }
  return names;
}

const RowKernels& find_row_kernels(std::string_view name) {
  for (const RowKernels* kernels : usable()) {
    if (kernels != nullptr && (name == "auto" || name == kernels->name)) return *kernels;
  }
  std::string known = "auto";
  for (const std::string& have : row_kernels()) known += ", " + have;
  throw std::invalid_argument("kernel '" + std::string(name) +
                              "' does not run on this CPU: use one of " + known);
}

Element element_named(std::string_view name) {
  if (name == "float32") return Element::kFloat32;
  if (name == "bfloat16") return Element::kBfloat16;
  if (name == "fp8") return Element::kFp8;
  throw std::invalid_argument("element is '" + std::string(name) +
                              "' but must be float32, bfloat16 or fp8");
}

}  // namespace kvd::rows
