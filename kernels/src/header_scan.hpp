// Reads the block headers of pool metadata (layout v1) that an earlier life of the daemon wrote.
//
//   header, 128 bytes: state u32 | seq u32 | namespace 32 | hash 32 | tokens u32 | flags u32
//                      | zeros | crc32c u32 (last 4 bytes) of bytes 4 .. 123
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "block_index.hpp"

namespace kvd {

constexpr uint64_t kHeaderBytes = 128;

using Digest = std::array<uint8_t, 32>;

// Where the scan writes, one entry for each block: arrays of the caller.
struct BlockColumns {
  uint8_t* states;
  uint32_t* spaces;
  uint8_t* hashes;
  uint32_t* tokens;
};

struct Scan {
  std::vector<Digest> spaces;  // digest of each namespace, by the number it got
  std::vector<uint32_t> torn;
  std::vector<uint32_t> duplicates;
};

// Scans `count` headers, in order of their blocks. The index must have room for them all.
Scan scan_headers(const uint8_t* headers, uint64_t count, BlockIndex& index,
                  const BlockColumns& columns);

}  // namespace kvd
