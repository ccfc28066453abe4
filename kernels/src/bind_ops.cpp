// Python functions copy_spans, copy_kernels and crc32c.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <bit>
#include <cstring>
#include <limits>
#include <string_view>

#include "convert.hpp"
#include "copy.hpp"
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

Raises:
    IndexError: names the first span that does not fit a mapping.
    ValueError: dst is read-only, a mapping is closed, the kernel does not run on this CPU, the list
        is not a whole number of triples, or both mappings show one file and a destination overlaps
        a source.
    TypeError: spans is not a buffer of u64 or bytes.)";

constexpr const char* kCrcDoc = R"(Return the CRC-32C (Castagnoli) of data, 0 to 2**32 - 1.

seed is the CRC of the bytes before, so crc32c(b, crc32c(a)) == crc32c(a + b). Uses the CPU's
instruction where there is one. The interpreter lock is released above 16 KiB. data: C-contiguous,
bytes-like. ValueError for a seed outside 0 to 2**32 - 1. Defined by reference.py::crc32c.)";

static_assert(std::endian::native == std::endian::little, "'<' is taken for native below");

bool holds_u64_or_bytes(const Py_buffer& view) {
  std::string_view format = view.format == nullptr ? "B" : view.format;
  if (format.size() == 2 && std::string_view("@=<").find(format[0]) != std::string_view::npos) {
    format.remove_prefix(1);
  }
  if (format.size() != 1) return false;
  const std::string_view kinds = view.itemsize == 8 ? "QLql" : view.itemsize == 1 ? "Bbc" : "";
  return kinds.find(format[0]) != std::string_view::npos;
}

void require_triples(const Bytes& spans) {
  if (!holds_u64_or_bytes(spans.view())) {
    const std::string format = spans.view().format == nullptr ? "B" : spans.view().format;
    throw nb::type_error(("spans must be native u64 triples or bytes, not format '" + format +
                          "': use array('Q') or numpy uint64")
                             .c_str());
  }
  if (spans.size() % sizeof(Span) != 0) {
    throw std::invalid_argument("spans has " + std::to_string(spans.size()) +
                                " bytes, which is not a multiple of 24: give (dst_offset, "
                                "src_offset, nbytes) as three u64 each");
  }
}

// The caller's array may change between the check and the copy, and it may be misaligned.
std::vector<Span> private_copy(const Bytes& spans) {
  std::vector<Span> own(spans.size() / sizeof(Span));
  if (!own.empty()) std::memcpy(own.data(), spans.data(), spans.size());
  return own;
}

uint64_t copy_spans(const Mapping& dst, const Mapping& src, nb::handle spans,
                    const std::string& kernel) {
  const CopyFn copy = find_copy_kernel(kernel);
  const Lease dst_lease(dst.region);
  const Lease src_lease(src.region);
  dst.region->require_writable();
  const Bytes bytes(spans, "spans");
  require_triples(bytes);
  const nb::gil_scoped_release unlocked;
  const std::vector<Span> checked = private_copy(bytes);
  const uint64_t total = check_spans(*dst.region, *src.region, checked);
  copy(dst.region->data(), src.region->data(), checked);
  return total;
}

uint32_t crc32c_of(nb::handle data, nb::handle seed) {
  const auto start = static_cast<uint32_t>(
      integer_within(seed, "seed", 0, std::numeric_limits<uint32_t>::max()));
  const Bytes bytes(data, "data");
  if (bytes.size() <= kKeepLockBytes) return crc32c(start, bytes.data(), bytes.size());
  const nb::gil_scoped_release unlocked;
  return crc32c(start, bytes.data(), bytes.size());
}

uint32_t crc32c_table_of(nb::handle data) {
  const Bytes bytes(data, "data");
  return crc32c_table(0, bytes.data(), bytes.size());
}

}  // namespace

void bind_ops(nb::module_& module) {
  module.def("copy_spans", copy_spans, nb::arg("dst"), nb::arg("src"), nb::arg("spans"),
             nb::kw_only(), nb::arg("kernel") = "auto",
             nb::sig("def copy_spans(dst: Mapping, src: Mapping, spans: Buffer, *, "
                     "kernel: str = \"auto\") -> int"),
             kCopyDoc);
  module.def("copy_kernels", copy_kernels, nb::sig("def copy_kernels() -> list[str]"),
             "Return the copy kernels this CPU runs, best first; \"scalar\" (memcpy) is the last.");
  module.def("crc32c", crc32c_of, nb::arg("data"), nb::arg("seed") = 0,
             nb::sig("def crc32c(data: Buffer, seed: int = 0) -> int"), kCrcDoc);
  module.def("crc32c_table", crc32c_table_of, nb::arg("data"),
             nb::sig("def crc32c_table(data: Buffer) -> int"),
             "crc32c without the CPU's instruction, so that a test can reach that path anywhere.");
}

}  // namespace kvd
