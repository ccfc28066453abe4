#include "header_scan.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>

#include "crc32c.hpp"

namespace kvd {
namespace {

// State words of headers, which no single wrong byte turns into one another ...
constexpr uint32_t kWordReset = 0;
constexpr uint32_t kWordFilling = 0x46494C4C;
constexpr uint32_t kWordReady = 0x52454459;
// ... and states as columns have them.
constexpr uint8_t kReset = 0;
constexpr uint8_t kFilling = 1;
constexpr uint8_t kReady = 2;

constexpr uint64_t kNamespaceAt = 8;
constexpr uint64_t kHashAt = 40;
constexpr uint64_t kTokensAt = 72;
constexpr uint64_t kCrcAt = kHeaderBytes - 4;
constexpr uint64_t kBatch = 16;  // places in the index whose memory is on its way at once

uint32_t load32(const uint8_t* data) {
  uint32_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

// Numbers digests in the order of their first appearance. Blocks of one namespace come in runs.
class Spaces {
 public:
  uint32_t number_of(const uint8_t* digest) {
    if (!digests_.empty() && std::memcmp(digests_[last_].data(), digest, sizeof(Digest)) == 0) {
      return last_;
    }
    const std::string key(reinterpret_cast<const char*>(digest), sizeof(Digest));
    const auto [at, is_new] = numbers_.emplace(key, static_cast<uint32_t>(digests_.size()));
    if (is_new) {
      Digest own;
      std::memcpy(own.data(), digest, sizeof own);
      digests_.push_back(own);
    }
    last_ = at->second;
    return last_;
  }
  std::vector<Digest>& digests() { return digests_; }

 private:
  std::vector<Digest> digests_;
  std::unordered_map<std::string, uint32_t> numbers_;
  uint32_t last_ = 0;
};

class Scanner {
 public:
  Scanner(BlockIndex& index, const BlockColumns& columns) : index_(index), columns_(columns) {}

  void read(uint32_t block, const uint8_t* header) {
    const uint32_t word = __atomic_load_n(reinterpret_cast<const uint32_t*>(header),
                                          __ATOMIC_ACQUIRE);
    columns_.states[block] = word == kWordFilling ? kFilling : kReset;
    if (word == kWordReady && crc32c(0, header + 4, kCrcAt - 4) == load32(header + kCrcAt)) {
      const uint32_t space = spaces_.number_of(header + kNamespaceAt);
      index_.prefetch(space, header + kHashAt);
      columns_.spaces[block] = space;
      batch_[waiting_++] = {block, header};
    } else if (word != kWordFilling && word != kWordReset) {
      scan_.torn.push_back(block);
    }
    if (waiting_ == kBatch) take();
  }

  Scan finish() {
    take();
    scan_.spaces = std::move(spaces_.digests());
    return std::move(scan_);
  }

 private:
  struct Found {
    uint32_t block;
    const uint8_t* header;
  };

  // Puts what was read into the index; the first block of a key has it.
  void take() {
    for (uint64_t n = 0; n < waiting_; ++n) {
      const auto [block, header] = batch_[n];
      uint32_t& space = columns_.spaces[block];
      if (index_.put(space, header + kHashAt, block) != BlockIndex::Put::kAdded) {
        scan_.duplicates.push_back(block);
        space = 0;
        continue;
      }
      columns_.states[block] = kReady;
      columns_.tokens[block] = load32(header + kTokensAt);
      std::memcpy(columns_.hashes + block * BlockIndex::kHashBytes, header + kHashAt,
                  BlockIndex::kHashBytes);
    }
    waiting_ = 0;
  }

  BlockIndex& index_;
  const BlockColumns& columns_;
  Spaces spaces_;
  Scan scan_;
  std::array<Found, kBatch> batch_{};
  uint64_t waiting_ = 0;
};

}  // namespace

Scan scan_headers(const uint8_t* headers, uint64_t count, BlockIndex& index,
                  const BlockColumns& columns) {
  Scanner scanner(index, columns);
  for (uint64_t block = 0; block < count; ++block) {
    scanner.read(static_cast<uint32_t>(block), headers + block * kHeaderBytes);
  }
  return scanner.finish();
}

}  // namespace kvd
