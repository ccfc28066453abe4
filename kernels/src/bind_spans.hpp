// Arguments of copies: lists of spans, groups of them, how many threads.
#pragma once

#include <bit>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "convert.hpp"
#include "copy_team.hpp"

namespace kvd {

static_assert(std::endian::native == std::endian::little, "'<' is taken for native by holds_words");

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

// How many spans each group of a copy has, and their checksums so far. Borrows nothing of Python.
struct GroupSums {
  std::vector<uint32_t> counts;
  std::vector<uint32_t> sums;

  void require_total(size_t spans) const;  // std::invalid_argument
};

// The groups of a call: a copy of what the caller gives, and where their checksums go. Lives and
// dies under the interpreter lock; `own` may outlive it.
class Groups {
 public:
  Groups(nb::handle counts, nb::handle sums);

  void store() const;  // into the lent sums

  const std::shared_ptr<GroupSums> own = std::make_shared<GroupSums>();

 private:
  Bytes sums_;
};

// Checks all spans, then copies, by up to so many threads of the team; without the interpreter
// lock. Throws as check_spans, and std::invalid_argument when a mapping is closed or dst is
// read-only.
uint64_t run_copy(const std::shared_ptr<Region>& dst, const std::shared_ptr<Region>& src,
                  const std::vector<Span>& spans, CopyFn copy, CopyTeam& team, size_t threads);
// The same with checksums, into groups.sums.
uint64_t run_copy(const std::shared_ptr<Region>& dst, const std::shared_ptr<Region>& src,
                  const std::vector<Span>& spans, GroupSums& groups, CopySumFn copy,
                  CopyTeam& team, size_t threads);

}  // namespace kvd
