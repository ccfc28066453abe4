// Arguments of copies: lists of spans, groups of them, how many threads.
#pragma once

#include <bit>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "convert.hpp"
#include "copy_team.hpp"

namespace kvd {

static_assert(std::endian::native == std::endian::little, "'<' is taken for native in bind_spans.cpp");

constexpr const char* kTriples = "triples (dst_offset, src_offset, nbytes)";
constexpr const char* kPairs = "pairs (offset, nbytes)";

// Whether a buffer is of such words, by their format and width, or of plain bytes.
bool holds_words(const Py_buffer& view, Py_ssize_t width, std::string_view words);
// TypeError or ValueError unless `spans` is made of rows of so many u64.
void require_rows(const Bytes& spans, size_t words, const char* row);
// 1 to kTeamMax.
size_t team_size(nb::handle threads);

// The caller's array may change between the check and the copy, and it may be misaligned.
template <typename Item>
std::vector<Item> private_copy(const Bytes& items) {
  std::vector<Item> own(items.size() / sizeof(Item));
  if (!own.empty()) std::memcpy(own.data(), items.data(), items.size());
  return own;
}

// The groups of a call: how many spans each has, and where their checksums go.
class Groups {
 public:
  Groups(nb::handle counts, nb::handle sums);

  void require_total(size_t spans) const;
  void store();

  std::vector<uint32_t> own_counts;
  std::vector<uint32_t> own_sums;

 private:
  Bytes counts_;
  Bytes sums_;
};

// Checks all spans, then copies; without the interpreter lock. Throws as check_spans, and
// std::invalid_argument when a mapping is closed or dst is read-only.
uint64_t run_copy(const std::shared_ptr<Region>& dst, const std::shared_ptr<Region>& src,
                  const std::vector<Span>& spans, CopyFn copy, size_t team);
// The same with checksums, into groups.own_sums.
uint64_t run_copy(const std::shared_ptr<Region>& dst, const std::shared_ptr<Region>& src,
                  const std::vector<Span>& spans, Groups& groups, CopySumFn copy, size_t team);

}  // namespace kvd
