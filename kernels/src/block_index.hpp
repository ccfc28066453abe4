// Hash table (namespace, 32-byte hash) -> block.
//
// Open addressing with linear probing over one anonymous mapping, so that no key is an object and
// pages come only as keys are put. At most three quarters of the slots are taken: the room is fixed
// by clear(), and nothing is ever rehashed. A removed key leaves no mark; those behind it in its
// run move up instead, so that look-ups never slow down with age.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

namespace kvd {

constexpr uint8_t kReadyState = 2;  // of a block that look-ups may find

class BlockIndex {
 public:
  static constexpr uint64_t kHashBytes = 32;
  static constexpr uint64_t kMaxCapacity = 1ULL << 31;  // a block is a u32, with one value to spare

  enum class Put { kAdded, kKnown, kFull };

  explicit BlockIndex(uint64_t capacity) { clear(capacity); }
  ~BlockIndex();
  BlockIndex(const BlockIndex&) = delete;
  BlockIndex& operator=(const BlockIndex&) = delete;

  uint64_t size() const noexcept { return size_; }
  uint64_t capacity() const noexcept { return capacity_; }
  uint64_t slot_bytes() const noexcept { return (mask_ + 1) * sizeof(Slot); }

  // Forgets every key; from now on there is room for so many. OsError without memory: nothing
  // has changed then.
  void clear(uint64_t capacity);

  std::optional<uint32_t> get(uint32_t space, const uint8_t* hash) const noexcept;
  // Appends the blocks of the longest run of leading hashes present; `count` hashes in a row.
  void prefix(uint32_t space, const uint8_t* hashes, uint64_t count,
              std::vector<uint32_t>& found) const;
  Put put(uint32_t space, const uint8_t* hash, uint32_t block) noexcept;
  bool remove(uint32_t space, const uint8_t* hash) noexcept;
  // Puts the keys of all blocks in kReadyState, of which there must be room for all; returns those
  // whose key is there already, under a block before them or from earlier.
  std::vector<uint32_t> load(std::span<const uint8_t> states, const uint32_t* spaces,
                             const uint8_t* hashes);

 private:
  // Fetches the place of a key into the cache, for a look-up that comes soon.
  void prefetch(uint32_t space, const uint8_t* hash) const noexcept {
    __builtin_prefetch(&slots_[home(space, words_of(hash))]);
  }

  struct Words {
    uint64_t word[4];
    bool operator==(const Words&) const = default;
  };
  struct Slot {
    uint32_t held;  // block + 1; 0 is an empty slot, which is what fresh memory holds
    uint32_t space;
    Words hash;
  };

  static Words words_of(const uint8_t* hash) noexcept {
    Words words;
    std::memcpy(&words, hash, sizeof words);
    return words;
  }
  uint64_t home(uint32_t space, const Words& hash) const noexcept;
  // The slot of a key, or the empty one that ends its run.
  uint64_t find(uint32_t space, const Words& hash) const noexcept;

  Slot* slots_ = nullptr;
  uint64_t mask_ = 0;
  uint64_t size_ = 0;
  uint64_t capacity_ = 0;
};

}  // namespace kvd
