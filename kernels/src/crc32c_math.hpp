// Arithmetic of CRC-32C that its implementations share: the polynomial, and moving a CRC along.
//
// A CRC state followed by n zero bytes is the state times x^(8n) modulo the polynomial. States are
// reflected: bit 31 is x^0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvd {

constexpr uint32_t kPolynomial = 0x82F63B78U;  // 0x1EDC6F41 with its bits reversed

// a * b modulo the polynomial.
constexpr uint32_t multiply_crc(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (; a != 0; a <<= 1) {
    if ((a & 0x80000000U) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1) != 0 ? kPolynomial : 0);
  }
  return product;
}

// x^power modulo the polynomial.
constexpr uint32_t crc_power(size_t power) {
  uint32_t result = 0x80000000U;  // 1
  uint32_t square = 0x40000000U;  // x
  for (; power != 0; power >>= 1) {
    if ((power & 1) != 0) result = multiply_crc(result, square);
    square = multiply_crc(square, square);
  }
  return result;
}

inline uint64_t load64(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

}  // namespace kvd
