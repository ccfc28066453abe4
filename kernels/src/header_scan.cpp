#include "header_scan.hpp"

#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>

#include "block_index.hpp"
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

constexpr uint64_t kNamespaceAt = 8;
constexpr uint64_t kHashAt = 40;
constexpr uint64_t kTokensAt = 72;
constexpr uint64_t kCrcAt = kHeaderBytes - 4;

uint32_t load32(const uint8_t* data) {
  uint32_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

// Numbers of digests. Blocks of one namespace come in runs.
class Spaces {
 public:
  explicit Spaces(std::span<const uint8_t> digests) {
    const uint64_t count = digests.size() / kDigestBytes;
    for (uint64_t n = 0; n < count; ++n) {
      numbers_.emplace(text(&digests[n * kDigestBytes]), static_cast<uint32_t>(n));
    }
  }

  // False for a digest that is none of them.
  bool find(const uint8_t* digest, uint32_t& number) {
    if (last_ == nullptr || std::memcmp(last_, digest, kDigestBytes) != 0) {
      const auto at = numbers_.find(text(digest));
      if (at == numbers_.end()) return false;
      last_ = digest;
      last_number_ = at->second;
    }
    number = last_number_;
    return true;
  }

 private:
  static std::string_view text(const uint8_t* digest) {
    return {reinterpret_cast<const char*>(digest), kDigestBytes};
  }
  std::unordered_map<std::string_view, uint32_t> numbers_;
  const uint8_t* last_ = nullptr;
  uint32_t last_number_ = 0;
};

}  // namespace

Scan scan_headers(const uint8_t* headers, const Known& known, const BlockColumns& columns) {
  Spaces spaces(known.digests);
  Scan scan;
  for (uint64_t block = 0; block < columns.states.size(); ++block) {
    const uint8_t* header = headers + block * kHeaderBytes;
    const uint32_t word =
        __atomic_load_n(reinterpret_cast<const uint32_t*>(header), __ATOMIC_ACQUIRE);
    columns.states[block] = word == kWordFilling ? kFilling : kReset;
    if (word == kWordReset || word == kWordFilling) continue;
    if (word != kWordReady || crc32c(0, header + 4, kCrcAt - 4) != load32(header + kCrcAt)) {
      scan.torn.push_back(static_cast<uint32_t>(block));
      continue;
    }
    uint32_t space = 0;
    const uint32_t tokens = load32(header + kTokensAt);
    if (tokens == 0 || tokens > known.tokens_max || !spaces.find(header + kNamespaceAt, space)) {
      scan.odd.push_back(static_cast<uint32_t>(block));
      continue;
    }
    columns.states[block] = kReadyState;
    columns.spaces[block] = space;
    columns.tokens[block] = tokens;
    std::memcpy(columns.hashes + block * BlockIndex::kHashBytes, header + kHashAt,
                BlockIndex::kHashBytes);
  }
  return scan;
}

}  // namespace kvd
