// CRC-32C (Castagnoli): polynomial 0x1EDC6F41, reflected, start and end inverted.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvd {

// CRC of `bytes` continued from `seed`, the CRC of what came before (0 for nothing).
uint32_t crc32c(uint32_t seed, const uint8_t* data, size_t bytes);
// The same from tables alone, whatever the CPU offers.
uint32_t crc32c_table(uint32_t seed, const uint8_t* data, size_t bytes);

}  // namespace kvd
