#include "bind_spans.hpp"

#include <initializer_list>

namespace kvd {

bool holds_words(const Py_buffer& view, Py_ssize_t width, std::string_view words) {
  std::string_view format = view.format == nullptr ? "B" : view.format;
  if (format.size() == 2 && std::string_view("@=<").find(format[0]) != std::string_view::npos) {
    format.remove_prefix(1);
  }
  if (format.size() != 1) return false;
  const std::string_view kinds = view.itemsize == width ? words : view.itemsize == 1 ? "Bbc" : "";
  return kinds.find(format[0]) != std::string_view::npos;
}

void require_rows(const Bytes& spans, size_t words, const char* row) {
  if (!holds_words(spans.view(), 8, "QLql")) {
    const std::string format = spans.view().format == nullptr ? "B" : spans.view().format;
    throw nb::type_error(("spans must be native u64 " + std::string(row) +
                          " or bytes, not format '" + format +
                          "': use array('Q') or numpy uint64")
                             .c_str());
  }
  if (spans.size() % (words * sizeof(uint64_t)) != 0) {
    throw std::invalid_argument("spans has " + std::to_string(spans.size()) +
                                " bytes, which is not a multiple of " +
                                std::to_string(words * sizeof(uint64_t)) + ": give " + row +
                                " of u64 each");
  }
}

size_t team_size(nb::handle threads) {
  return static_cast<size_t>(integer_within(threads, "threads", 1, kTeamMax));
}

Groups::Groups(nb::handle counts, nb::handle sums) : sums_(sums, "sums") {
  const Bytes lent(counts, "counts");
  for (const Bytes* words : std::initializer_list<const Bytes*>{&lent, &sums_}) {
    if (!holds_words(words->view(), 4, "ILil") || words->size() % sizeof(uint32_t) != 0) {
      throw nb::type_error("counts and sums must be native u32 words: use array('I')");
    }
  }
  if (sums_.view().readonly != 0) throw std::invalid_argument("sums is read-only");
  if (sums_.size() != lent.size()) {
    throw std::invalid_argument("sums has " + std::to_string(sums_.size() / 4) + " words for " +
                                std::to_string(lent.size() / 4) + " groups");
  }
  own->counts = private_copy<uint32_t>(lent);
  own->sums = private_copy<uint32_t>(sums_);
}

void GroupSums::require_total(size_t spans) const {
  uint64_t total = 0;
  for (const uint32_t count : counts) total += count;
  if (total != spans) {
    throw std::invalid_argument("counts add up to " + std::to_string(total) + ", not to the " +
                                std::to_string(spans) + " spans");
  }
}

void Groups::store() const {
  if (!own->sums.empty()) std::memcpy(sums_.view().buf, own->sums.data(), sums_.size());
}

uint64_t run_copy(const std::shared_ptr<Region>& dst, const std::shared_ptr<Region>& src,
                  const std::vector<Span>& spans, CopyFn copy, CopyTeam& team, size_t threads) {
  const Lease dst_lease(dst);
  const Lease src_lease(src);
  dst->require_writable();
  const uint64_t total = check_spans(*dst, *src, spans);
  copy_in_team(team, copy, dst->data(), src->data(), spans, threads);
  return total;
}

uint64_t run_copy(const std::shared_ptr<Region>& dst, const std::shared_ptr<Region>& src,
                  const std::vector<Span>& spans, GroupSums& groups, CopySumFn copy,
                  CopyTeam& team, size_t threads) {
  const Lease dst_lease(dst);
  const Lease src_lease(src);
  dst->require_writable();
  groups.require_total(spans.size());
  const uint64_t total = check_sum_spans(*dst, *src, spans);
  copy_sums_in_team(team, copy, dst->data(), src->data(), spans, groups.counts,
                    groups.sums.data(), threads);
  return total;
}

}  // namespace kvd
