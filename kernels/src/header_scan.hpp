// Reads the block headers of pool metadata (layout v1) that an earlier life of the daemon wrote.
//
//   header, 128 bytes: state u32 | seq u32 | namespace 32 | hash 32 | tokens u32 | flags u32
//                      | zeros | crc32c u32 (last 4 bytes) of bytes 4 .. 123
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvd {

constexpr uint64_t kHeaderBytes = 128;
constexpr uint64_t kDigestBytes = 32;

// Where the scan writes, one entry for each block: arrays of the caller.
struct BlockColumns {
  std::span<uint8_t> states;
  uint32_t* spaces;
  uint8_t* hashes;
  uint32_t* tokens;
};

// What a ready header may say. digests: of the namespaces, in order of their numbers.
struct Known {
  std::span<const uint8_t> digests;
  uint32_t tokens_max;
};

struct Scan {
  std::vector<uint32_t> torn;
  std::vector<uint32_t> odd;
};

// Scans one header for each state, in order of their blocks.
Scan scan_headers(const uint8_t* headers, const Known& known, const BlockColumns& columns);

}  // namespace kvd
