#include "block_links.hpp"

#include <stdexcept>
#include <string>

namespace kvd {
namespace {

constexpr size_t kAhead = 8;  // blocks whose links are on their way at once

size_t checked(int64_t block, size_t total) {
  if (static_cast<size_t>(block) < total) return static_cast<size_t>(block);
  throw std::out_of_range("block " + std::to_string(block) + " is outside the " +
                          std::to_string(total) + " blocks of the pool");
}

}  // namespace

std::vector<uint64_t> unlink_blocks(const BlockLinks& links, std::span<const int64_t> blocks) {
  const size_t total = links.home.size();
  const size_t nodes = links.after.size();
  std::vector<uint64_t> left_queue(nodes - total);
  for (size_t n = 0; n < blocks.size(); ++n) {
    if (n + kAhead < blocks.size()) {
      const auto soon = static_cast<size_t>(blocks[n + kAhead]);
      if (soon < total) {
        __builtin_prefetch(&links.after[soon], 1);
        __builtin_prefetch(&links.before[soon], 1);
        __builtin_prefetch(&links.home[soon], 1);
      }
    }
    const size_t block = checked(blocks[n], total);
    const size_t home = links.home[block];
    if (home == 0) continue;
    const auto next = static_cast<size_t>(links.after[block]);
    const auto last = static_cast<size_t>(links.before[block]);
    if (next >= nodes || last >= nodes || home > left_queue.size()) {
      throw std::invalid_argument("the links of block " + std::to_string(block) +
                                  " lead outside its queue");
    }
    links.after[last] = static_cast<int32_t>(next);
    links.before[next] = static_cast<int32_t>(last);
    links.home[block] = 0;
    ++left_queue[home - 1];
  }
  return left_queue;
}

bool mark_blocks(std::span<uint8_t> marks, std::span<const uint8_t> home,
                 std::span<const int64_t> blocks) {
  bool has_home = false;
  for (const int64_t number : blocks) {
    const size_t block = checked(number, marks.size());
    marks[block] = 1;
    has_home |= home[block] != 0;
  }
  return has_home;
}

}  // namespace kvd
