#include "block_index.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "errors.hpp"

namespace kvd {
namespace {

constexpr uint64_t kAhead = 8;  // look-ups whose memory is on its way at once
constexpr uint64_t kMinSlots = 8;

// Both halves of a 128-bit product depend on all bits of both factors.
uint64_t fold(uint64_t a, uint64_t b) noexcept {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

BlockIndex::~BlockIndex() {
  if (slots_ != nullptr) munmap(slots_, slot_bytes());
}

void BlockIndex::clear(uint64_t capacity) {
  const uint64_t slots = std::bit_ceil(std::max(kMinSlots, capacity + capacity / 3 + 1));
  if (slots_ == nullptr || slots != mask_ + 1 || size_ > 0) {
    const uint64_t bytes = slots * sizeof(Slot);
    // A new mapping, since zeroing the old one would make all of it resident.
    void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) {
      throw OsError(errno, "an index of " + std::to_string(capacity) + " keys needs " +
                               std::to_string(bytes) + " bytes of address space");
    }
    if (slots_ != nullptr) munmap(slots_, slot_bytes());
    slots_ = static_cast<Slot*>(made);
    mask_ = slots - 1;
    size_ = 0;
  }
  capacity_ = capacity;
}

uint64_t BlockIndex::home(uint32_t space, const Words& hash) const noexcept {
  // Odd constants without a pattern; all of the hash counts, since not every engine's is sha256.
  const uint64_t low =
      fold(hash.word[0] ^ 0x9E3779B97F4A7C15U ^ space, hash.word[1] ^ 0xC2B2AE3D27D4EB4FU);
  const uint64_t high =
      fold(hash.word[2] ^ 0x165667B19E3779F9U, hash.word[3] ^ 0x27D4EB2F165667C5U);
  return fold(low ^ 0xD6E8FEB86659FD93U, high ^ 0xA0761D6478BD642FU) & mask_;
}

uint64_t BlockIndex::find(uint32_t space, const Words& hash) const noexcept {
  uint64_t at = home(space, hash);
  while (slots_[at].held != 0 && !(slots_[at].space == space && slots_[at].hash == hash)) {
    at = (at + 1) & mask_;
  }
  return at;
}

std::optional<uint32_t> BlockIndex::get(uint32_t space, const uint8_t* hash) const noexcept {
  const Slot& slot = slots_[find(space, words_of(hash))];
  if (slot.held == 0) return std::nullopt;
  return slot.held - 1;
}

void BlockIndex::prefix(uint32_t space, const uint8_t* hashes, uint64_t count,
                        std::vector<uint32_t>& found) const {
  for (uint64_t n = 0; n < std::min(kAhead, count); ++n) prefetch(space, hashes + n * kHashBytes);
  for (uint64_t n = 0; n < count; ++n) {
    if (n + kAhead < count) prefetch(space, hashes + (n + kAhead) * kHashBytes);
    const std::optional<uint32_t> block = get(space, hashes + n * kHashBytes);
    if (!block) return;
    found.push_back(*block);
  }
}

BlockIndex::Put BlockIndex::put(uint32_t space, const uint8_t* hash, uint32_t block) noexcept {
  const Words words = words_of(hash);
  Slot& slot = slots_[find(space, words)];
  if (slot.held != 0) return Put::kKnown;
  if (size_ == capacity_) return Put::kFull;
  slot = Slot{block + 1, space, words};
  ++size_;
  return Put::kAdded;
}

bool BlockIndex::remove(uint32_t space, const uint8_t* hash) noexcept {
  uint64_t hole = find(space, words_of(hash));
  if (slots_[hole].held == 0) return false;
  for (uint64_t at = (hole + 1) & mask_; slots_[at].held != 0; at = (at + 1) & mask_) {
    // A key may move up to the hole unless that lies before the place where its search begins.
    const uint64_t from_home = (at - home(slots_[at].space, slots_[at].hash)) & mask_;
    if (from_home >= ((at - hole) & mask_)) {
      slots_[hole] = slots_[at];
      hole = at;
    }
  }
  slots_[hole].held = 0;
  --size_;
  return true;
}

std::vector<uint32_t> BlockIndex::load(std::span<const uint8_t> states, const uint32_t* spaces,
                                       const uint8_t* hashes) {
  std::vector<uint32_t> known;
  // Keys of a large part of the room end up in every page: have large pages at once.
  if (size_ == 0 && states.size() >= capacity_ / 4) {
    madvise(slots_, slot_bytes(), MADV_HUGEPAGE);
  }
  for (size_t block = 0; block < states.size(); ++block) {
    const size_t soon = block + kAhead;
    if (soon < states.size() && states[soon] == kReadyState) {
      prefetch(spaces[soon], hashes + soon * kHashBytes);
    }
    if (states[block] != kReadyState) continue;
    const auto number = static_cast<uint32_t>(block);
    if (put(spaces[block], hashes + block * kHashBytes, number) != Put::kAdded) {
      known.push_back(number);
    }
  }
  return known;
}

}  // namespace kvd
