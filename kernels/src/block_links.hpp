// Queues of blocks as rings of links in two arrays of the caller (kvd.core.block_queues): taking
// many blocks out at once, at the speed of memory.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvd {

// `total` blocks, then one head for each queue. home: 0 for a block in no queue, else 1 + queue.
struct BlockLinks {
  std::span<int32_t> after;
  std::span<int32_t> before;
  std::span<uint8_t> home;
};

// Takes blocks out of their queues; those in none stay there. Returns how many left each queue.
// std::out_of_range for a block that is none, std::invalid_argument for links that lead outside;
// the blocks before it have been taken out then.
std::vector<uint64_t> unlink_blocks(const BlockLinks& links, std::span<const int64_t> blocks);

// Puts blocks start .. stop - 1, none of them in a queue, at the end of one. std::out_of_range
// unless 0 <= start < stop <= blocks and the queue is one; nothing changes then.
void link_range(const BlockLinks& links, uint64_t queue, uint64_t start, uint64_t stop);

// Sets marks[block] to 1 for each block; returns whether any of them has a home. Of equal length.
// std::out_of_range for a block that is none; those before it have been marked then.
bool mark_blocks(std::span<uint8_t> marks, std::span<const uint8_t> home,
                 std::span<const int64_t> blocks);

}  // namespace kvd
