// Several threads that share one copy out among them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "copy.hpp"

namespace kvd {

// Most threads of one call; two saturate what one core's copy leaves of a memory channel.
constexpr size_t kTeamMax = 16;

// As the kernel itself, with up to so many threads: the calling one, and helpers that live as long
// as the call. Each takes the next batch of pieces when it is done with its last, so a helper that
// comes late, or not at all, costs nothing but its help. On return every byte is ordered before any
// later store of the calling thread.
void copy_in_team(CopyFn copy, uint8_t* dst, const uint8_t* src, std::span<const Span> spans,
                  size_t threads);

// The same with checksums; a group is not divided.
void copy_sums_in_team(CopySumFn copy, uint8_t* dst, const uint8_t* src,
                       std::span<const Span> spans, std::span<const uint32_t> counts,
                       uint32_t* sums, size_t threads);

}  // namespace kvd
