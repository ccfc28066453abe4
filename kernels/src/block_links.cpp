#include "block_links.hpp"

#include <stdexcept>
#include <string>

namespace kvd {
namespace {

constexpr size_t kAhead = 16;  // blocks whose links are on their way at once
constexpr size_t kNear = 8;    // blocks whose neighbours are on their way at once

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
    if (n + kNear < blocks.size()) {
      const auto soon = static_cast<size_t>(blocks[n + kNear]);
      if (soon < total) {
        const auto next = static_cast<size_t>(links.after[soon]);
        const auto last = static_cast<size_t>(links.before[soon]);
        if (next < nodes) __builtin_prefetch(&links.before[next], 1);
        if (last < nodes) __builtin_prefetch(&links.after[last], 1);
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

void link_range(const BlockLinks& links, uint64_t queue, uint64_t start, uint64_t stop) {
  const size_t total = links.home.size();
  const size_t head = total + queue;
  if (start >= stop || stop > total || head >= links.after.size()) {
    throw std::out_of_range("blocks " + std::to_string(start) + " to " + std::to_string(stop) +
                            " and queue " + std::to_string(queue) + " are not all in the pool");
  }
  const auto last = static_cast<size_t>(links.before[head]);
  if (last >= links.after.size()) {
    throw std::invalid_argument("the links of queue " + std::to_string(queue) + " lead outside it");
  }
  for (size_t block = start; block < stop; ++block) {
    links.after[block] = static_cast<int32_t>(block + 1);
    links.before[block] = static_cast<int32_t>(block) - 1;
    links.home[block] = static_cast<uint8_t>(queue + 1);
  }
  links.after[last] = static_cast<int32_t>(start);
  links.before[start] = static_cast<int32_t>(last);
  links.before[head] = static_cast<int32_t>(stop - 1);
  links.after[stop - 1] = static_cast<int32_t>(head);
}

bool mark_blocks(std::span<uint8_t> marks, std::span<const uint8_t> home,
                 std::span<const int64_t> blocks) {
  bool has_home = false;
  for (size_t n = 0; n < blocks.size(); ++n) {
    if (n + kAhead < blocks.size()) {
      const auto soon = static_cast<size_t>(blocks[n + kAhead]);
      if (soon < marks.size()) {
        __builtin_prefetch(&marks[soon], 1);
        __builtin_prefetch(&home[soon]);
      }
    }
    const size_t block = checked(blocks[n], marks.size());
    marks[block] = 1;
    has_home |= home[block] != 0;
  }
  return has_home;
}

}  // namespace kvd
