// The choice of a kernel, and the one that runs everywhere.
#include "kernels.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>

#include "kernels_scalar.hpp"

namespace kvd::residency {
namespace {

bool runs_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("bmi") != 0 &&
         __builtin_cpu_supports("popcnt") != 0;
#else
  return false;
#endif
}

bool runs_avx512() {
#if defined(__x86_64__)
  return runs_avx2() && __builtin_cpu_supports("avx512f") != 0 &&
         __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512bw") != 0;
#else
  return false;
#endif
}

constexpr Kernel kScalar{"scalar",    scan_scalar,   partition_scalar, emit_scalar, inspect_scalar,
                         list_scalar, lookup_scalar, sweep_scalar,     forget_scalar,
                         put_scalar};

// Best first.
std::vector<const Kernel*> all_kernels() {
  std::vector<const Kernel*> kernels;
  if (runs_avx512()) kernels.push_back(avx512_kernel());
  if (runs_avx2()) kernels.push_back(avx2_kernel());
  kernels.push_back(neon_kernel());  // every aarch64 has it
  kernels.push_back(&kScalar);
  std::erase(kernels, nullptr);
  return kernels;
}

}  // namespace

const Kernel& scalar_kernel() noexcept { return kScalar; }

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const Kernel* kernel : all_kernels()) names.emplace_back(kernel->name);
  return names;
}

const Kernel& find_kernel(std::string_view name) {
  const std::vector<const Kernel*> kernels = all_kernels();
  if (name == "auto") return *kernels.front();
  std::string known = "auto";
  for (const Kernel* kernel : kernels) {
    if (name == kernel->name) return *kernel;
    known += std::string(", ") + kernel->name;
  }
  throw std::invalid_argument("kernel is '" + std::string(name) + "' but this CPU runs " + known);
}

}  // namespace kvd::residency
