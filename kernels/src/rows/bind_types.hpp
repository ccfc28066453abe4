// What Python calls BlockTables, RowList and RowCopier: the C++ objects and the memory they name.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "arrays.hpp"
#include "copier.hpp"

namespace kvd::rows {

// In each of these the arrays outlive the object that uses them.
struct PyTables {
  Array tables;
  Array written;
  std::optional<Array> rows;
  std::shared_ptr<BlockTables> core;
};

struct PyRowList {
  std::vector<Array> arrays;
  std::unique_ptr<RowList> core;
  std::vector<uint64_t> source_bytes;
};

struct PyCopier {
  PyCopier(nb::handle tables_of, std::vector<Array> arrays_of, std::shared_ptr<RowCopier> core_of)
      : tables(nb::borrow(tables_of)), arrays(std::move(arrays_of)), core(std::move(core_of)) {}
  PyCopier(const PyCopier&) = delete;
  PyCopier& operator=(const PyCopier&) = delete;

  nb::object tables;
  std::vector<Array> arrays;
  std::shared_ptr<RowCopier> core;
};

constexpr int64_t kSpinNs = 50'000;  // as long as waking an idle CPU takes

}  // namespace kvd::rows
