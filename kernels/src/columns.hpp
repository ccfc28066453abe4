// Arrays of numbers that the caller lends: their length and alignment are checked before use.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "convert.hpp"

namespace kvd {

// A column, checked for its length and alignment.
template <typename Word>
Word* column(const Bytes& bytes, const char* name, uint64_t count, uint64_t width = 1) {
  const uint64_t wanted = count * width * sizeof(Word);
  if (bytes.size() != wanted) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(bytes.size()) +
                                " bytes, not " + std::to_string(wanted));
  }
  if (wanted > 0 && reinterpret_cast<uintptr_t>(bytes.view().buf) % alignof(Word) != 0) {
    throw std::invalid_argument(std::string(name) + " is misaligned");
  }
  return static_cast<Word*>(bytes.view().buf);
}

// One that is written to.
template <typename Word>
Word* column_out(const Bytes& bytes, const char* name, uint64_t count, uint64_t width = 1) {
  if (bytes.view().readonly != 0) {
    throw std::invalid_argument(std::string(name) + " is read-only");
  }
  return column<Word>(bytes, name, count, width);
}

}  // namespace kvd
