// Python functions copy_spans, copy_sums, checksum_spans, copy_kernels and crc32c.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>

#include "bind_spans.hpp"
#include "convert.hpp"
#include "copy.hpp"
#include "copy_team.hpp"
#include "crc32c.hpp"

namespace kvd {
namespace {

constexpr const char* kCopyDoc =
    R"(Copy byte ranges from one mapping into another; return the bytes moved.

N spans; spans: [N, 3] native u64, C-contiguous, rows of (dst_offset, src_offset, nbytes): an
array('Q'), a numpy uint64 array, or bytes of 24 * N. Offsets are bytes from the start of each
mapping, with no alignment asked for (64-byte aligned destinations are fastest). nbytes may be 0.

The list is copied and all of it is checked first: on an error not one byte has moved. Spans are
copied in the order given. Destinations of one call must not overlap each other (not checked: such
bytes are those of either span). On return all bytes are ordered before a later store_u64 or
store_u32 of this thread, which may publish them. The interpreter lock is released, and close() of
either mapping waits for the copy. Deterministic; defined by reference.py::copy_spans.

Args:
    dst: writable mapping.
    src: mapping read from; may be dst, or map the same file.
    spans: see above.
    kernel: "auto", or one of copy_kernels().
    threads: 1 to 16 that share the spans out in pieces of 256 KiB or more, in no order then; the
        calling one and helpers that live as long as the call.

Raises:
    IndexError: names the first span that does not fit a mapping.
    ValueError: dst is read-only, a mapping is closed, the kernel does not run on this CPU, the list
        is not a whole number of triples, threads is out of range, or both mappings show one file
        and a destination overlaps a source.
    TypeError: spans is not a buffer of u64 or bytes.)";

constexpr const char* kSumsDoc =
    R"(Copy byte ranges as copy_spans does, and checksum them in groups; return the bytes moved.

N spans in G groups; spans: [N, 3] as for copy_spans; counts: [G] native u32, how many spans in turn
each group has, their sum is N. sums: [G] native u32, writable: sums[g] becomes the CRC-32C of the
source bytes of group g in the order of its spans, continued from what it was (0 to begin with, so
one group may go on in another call). Several threads do not divide a group. A span whose dst_offset
is 2**64 - 1 (NOT_COPIED) is only read: it counts in the checksum and no byte of it moves.

What is summed are the bytes that were copied, read again while the cache holds them. Everything
else is as in copy_spans, checks included; sums is written at the end, never on an error. Defined by
reference.py::copy_sums.

Raises: as copy_spans; ValueError also when counts do not add up to N or sums has not G words.)";

constexpr const char* kChecksumDoc =
    R"(Checksum byte ranges of a mapping group by group.

N ranges in G groups; ranges: [N, 2] native u64, rows of (offset, nbytes); counts and sums as for
copy_sums. The interpreter lock is released. Defined by reference.py::checksum_spans.

Raises: IndexError, ValueError and TypeError as copy_sums.)";

constexpr const char* kCrcDoc = R"(Return the CRC-32C (Castagnoli) of data, 0 to 2**32 - 1.

seed is the CRC of the bytes before, so crc32c(b, crc32c(a)) == crc32c(a + b). Uses the CPU's
instruction where there is one. The interpreter lock is released above 16 KiB. data: C-contiguous,
bytes-like. ValueError for a seed outside 0 to 2**32 - 1. Defined by reference.py::crc32c.)";

uint64_t copy_spans(const Mapping& dst, const Mapping& src, nb::handle spans,
                    const std::string& kernel, nb::handle threads) {
  const size_t size = team_size(threads);
  const CopyFn copy = find_copy_kernel(kernel).copy;
  const Bytes bytes(spans, "spans");
  require_rows(bytes, 3, kTriples);
  const Unlocked unlocked;
  CopyTeam team;
  return run_copy(dst.region, src.region, private_copy<Span>(bytes), copy, team, size);
}

uint64_t copy_sums(const Mapping& dst, const Mapping& src, nb::handle spans, nb::handle counts,
                   nb::handle sums, const std::string& kernel, nb::handle threads) {
  const size_t size = team_size(threads);
  const CopySumFn copy = find_copy_kernel(kernel).copy_sum;
  const Bytes bytes(spans, "spans");
  require_rows(bytes, 3, kTriples);
  Groups groups(counts, sums);
  uint64_t total = 0;
  {
    const Unlocked unlocked;
    CopyTeam team;
    total = run_copy(dst.region, src.region, private_copy<Span>(bytes), *groups.own, copy, team,
                     size);
  }
  groups.store();
  return total;
}

struct Pair {
  uint64_t offset;
  uint64_t bytes;
};

void checksum_spans(const Mapping& src, nb::handle ranges, nb::handle counts, nb::handle sums) {
  const Lease lease(src.region);
  const Bytes bytes(ranges, "spans");
  require_rows(bytes, 2, kPairs);
  Groups groups(counts, sums);
  {
    const Unlocked unlocked;
    std::vector<Span> spans;
    for (const Pair& range : private_copy<Pair>(bytes)) {
      spans.push_back({kNotCopied, range.offset, range.bytes});
    }
    groups.own->require_total(spans.size());
    check_sum_spans(*src.region, *src.region, spans);
    find_copy_kernel("scalar").copy_sum(nullptr, src.region->data(), spans, groups.own->counts,
                                        groups.own->sums.data());
  }
  groups.store();
}

uint32_t crc32c_of(nb::handle data, nb::handle seed) {
  const auto start = static_cast<uint32_t>(
      integer_within(seed, "seed", 0, std::numeric_limits<uint32_t>::max()));
  const Bytes bytes(data, "data");
  if (bytes.size() <= kKeepLockBytes) return crc32c(start, bytes.data(), bytes.size());
  const Unlocked unlocked;
  return crc32c(start, bytes.data(), bytes.size());
}

uint32_t crc32c_table_of(nb::handle data) {
  const Bytes bytes(data, "data");
  return crc32c_table(0, bytes.data(), bytes.size());
}

}  // namespace

void bind_ops(nb::module_& module) {
  module.def("copy_spans", copy_spans, nb::arg("dst"), nb::arg("src"), nb::arg("spans"),
             nb::kw_only(), nb::arg("kernel") = "auto", nb::arg("threads") = 1,
             nb::sig("def copy_spans(dst: Mapping, src: Mapping, spans: Buffer, *, "
                     "kernel: str = \"auto\", threads: int = 1) -> int"),
             kCopyDoc);
  module.def("copy_sums", copy_sums, nb::arg("dst"), nb::arg("src"), nb::arg("spans"),
             nb::arg("counts"), nb::arg("sums"), nb::kw_only(), nb::arg("kernel") = "auto",
             nb::arg("threads") = 1,
             nb::sig("def copy_sums(dst: Mapping, src: Mapping, spans: Buffer, counts: Buffer, "
                     "sums: Buffer, *, kernel: str = \"auto\", threads: int = 1) -> int"),
             kSumsDoc);
  module.def("checksum_spans", checksum_spans, nb::arg("src"), nb::arg("spans"), nb::arg("counts"),
             nb::arg("sums"),
             nb::sig("def checksum_spans(src: Mapping, spans: Buffer, counts: Buffer, "
                     "sums: Buffer) -> None"),
             kChecksumDoc);
  module.def("copy_kernels", copy_kernels, nb::sig("def copy_kernels() -> list[str]"),
             "Return the copy kernels this CPU runs, best first; \"scalar\" (memcpy) is the last.");
  module.def("crc32c", crc32c_of, nb::arg("data"), nb::arg("seed") = 0,
             nb::sig("def crc32c(data: Buffer, seed: int = 0) -> int"), kCrcDoc);
  module.def("crc32c_table", crc32c_table_of, nb::arg("data"),
             nb::sig("def crc32c_table(data: Buffer) -> int"),
             "crc32c without the CPU's instruction, so that a test can reach that path anywhere.");
}

}  // namespace kvd
