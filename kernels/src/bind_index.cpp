// Python class BlockIndex and function scan_headers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>

#include "block_index.hpp"
#include "columns.hpp"
#include "convert.hpp"
#include "header_scan.hpp"

namespace kvd {
namespace {

constexpr int64_t kMaxU32 = std::numeric_limits<uint32_t>::max();

// `filling` is touched under the interpreter lock alone: while `load` runs without it, every other
// call is refused.
struct Index {
  BlockIndex keys;
  bool filling = false;
};

constexpr const char* kClassDoc =
    R"(Where ready blocks are found: (namespace, 32-byte hash) -> block.

Open addressing in memory of its own: no key is a Python object, the room is fixed by capacity, and
pages come as keys are put. Not thread-safe without the interpreter lock. Defined by
reference.py::BlockIndex.

Args:
    capacity: most keys, 0 to 2**31. 40 bytes of address space for each slot, of which at most three
        quarters are taken.

namespace is 0 to 2**32 - 1, block 0 to 2**31 - 1, block_hash bytes-like of 32 bytes; other values
raise ValueError. While load runs in another thread every call raises RuntimeError.)";

constexpr const char* kPrefixDoc =
    R"(Return the blocks of the longest run of leading hashes present.

hashes: [n, 32] bytes-like, first block first; ValueError for a broken last hash.)";

constexpr const char* kPutDoc =
    R"(Add a key. ValueError for one that is there already, OverflowError when the index is full.)";

constexpr const char* kClearDoc =
    R"(Forget every key and make room for capacity keys; None keeps the room as it is.

OSError without address space for it; nothing has changed then.)";

constexpr const char* kLoadDoc =
    R"(Put the keys of many blocks; return those whose key is there already, in order.

N blocks. states: [N] u8, of which 2 (ready) counts. namespaces: [N] u32. hashes: [N, 32] u8; all
C-contiguous. Of two blocks with one key the first has it. The interpreter lock is released.

Raises ValueError when a column has another length or is misaligned, or the index has no room for
all; nothing was put then.)";

constexpr const char* kScanDoc =
    R"(Read the block headers of pool metadata (layout v1) into columns.

N blocks, one entry of each column for each. Only a header that is ready, whole and of use fills
its entries; everything else reads as reset there.

Args:
    meta: the metadata.
    offset: byte of block 0's header in it, a multiple of 4; 128 bytes for each block.
    digests: [K, 32] bytes-like, the namespaces in order of their numbers.
    tokens_max: most tokens of a block, 1 to 2**32 - 1.
    states: [N] u8, out: 0 reset, 1 filling, 2 ready.
    namespaces: [N] u32, out: number of the namespace.
    hashes: [N, 32] u8, out.
    tokens: [N] u32, out.
All columns are C-contiguous writable buffers, which must hold zeros.

Returns (torn, odd): blocks whose header is neither reset, filling nor ready with the right
checksum; ready blocks of no use, with a namespace that is none of digests, or with a count of
tokens outside 1 to tokens_max. The interpreter lock is released. Defined by
reference.py::scan_headers.

Raises:
    IndexError: the headers lie outside the mapping.
    ValueError: a column has another length or is read-only, digests are not whole, offset is
        misaligned, or the mapping is closed.)";

Index& idle(Index& self) {
  if (self.filling) throw std::runtime_error("the index is being filled by another thread");
  return self;
}

uint32_t space_of(nb::handle value) {
  return static_cast<uint32_t>(integer_within(value, "namespace", 0, kMaxU32));
}

// A hash borrowed from its object.
class Hash {
 public:
  explicit Hash(nb::handle value) : bytes_(value, "block_hash") {
    if (bytes_.size() != BlockIndex::kHashBytes) {
      throw std::invalid_argument("block_hash must have 32 bytes, not " +
                                  std::to_string(bytes_.size()));
    }
  }
  const uint8_t* data() const noexcept { return bytes_.data(); }

 private:
  Bytes bytes_;
};

uint64_t capacity_of(nb::handle value) {
  return static_cast<uint64_t>(
      integer_within(value, "capacity", 0, static_cast<int64_t>(BlockIndex::kMaxCapacity)));
}

void construct(Index* self, nb::handle capacity) {
  new (self) Index{BlockIndex(capacity_of(capacity))};
}

void clear(Index& self, nb::handle capacity) {
  BlockIndex& keys = idle(self).keys;
  keys.clear(capacity.is_none() ? keys.capacity() : capacity_of(capacity));
}

nb::object get(Index& self, nb::handle space, nb::handle hash) {
  const std::optional<uint32_t> block = idle(self).keys.get(space_of(space), Hash(hash).data());
  return block ? nb::object(nb::int_(*block)) : nb::object(nb::none());
}

nb::object prefix(Index& self, nb::handle space, nb::handle hashes) {
  const Bytes bytes(hashes, "hashes");
  if (bytes.size() % BlockIndex::kHashBytes != 0) {
    throw std::invalid_argument("hashes has " + std::to_string(bytes.size()) +
                                " bytes, which is not a multiple of 32");
  }
  std::vector<uint32_t> found;
  idle(self).keys.prefix(space_of(space), bytes.data(), bytes.size() / BlockIndex::kHashBytes,
                         found);
  nb::object blocks = nb::steal(PyList_New(static_cast<Py_ssize_t>(found.size())));
  if (!blocks.is_valid()) throw nb::python_error();
  for (size_t n = 0; n < found.size(); ++n) {
    PyObject* block = PyLong_FromUnsignedLong(found[n]);
    if (block == nullptr) throw nb::python_error();
    PyList_SET_ITEM(blocks.ptr(), static_cast<Py_ssize_t>(n), block);
  }
  return blocks;
}

void put(Index& self, nb::handle space, nb::handle hash, nb::handle block) {
  const auto number = static_cast<uint32_t>(
      integer_within(block, "block", 0, static_cast<int64_t>(BlockIndex::kMaxCapacity) - 1));
  BlockIndex& keys = idle(self).keys;
  const BlockIndex::Put how = keys.put(space_of(space), Hash(hash).data(), number);
  if (how == BlockIndex::Put::kKnown) {
    throw std::invalid_argument("the key of block " + std::to_string(number) +
                                " is in the index already");
  }
  if (how == BlockIndex::Put::kFull) {
    throw std::overflow_error("the index is full: it has room for " +
                              std::to_string(keys.capacity()) + " keys");
  }
}

void remove(Index& self, nb::handle space, nb::handle hash) {
  if (!idle(self).keys.remove(space_of(space), Hash(hash).data())) {
    throw nb::key_error("no such key in the index");
  }
}

nb::object list_of(const std::vector<uint32_t>& blocks) {
  nb::list list;
  for (const uint32_t block : blocks) list.append(block);
  return std::move(list);
}

// Marks an index as being filled for as long as it lives.
class Filling {
 public:
  explicit Filling(Index& index) : index_(index) { index.filling = true; }
  ~Filling() { index_.filling = false; }
  Filling(const Filling&) = delete;
  Filling& operator=(const Filling&) = delete;

 private:
  Index& index_;
};

nb::object load(Index& self, nb::handle states, nb::handle namespaces, nb::handle hashes) {
  const Bytes of_states(states, "states");
  const Bytes of_spaces(namespaces, "namespaces");
  const Bytes of_hashes(hashes, "hashes");
  const uint64_t count = of_states.size();
  const uint32_t* spaces = column<const uint32_t>(of_spaces, "namespaces", count);
  const uint8_t* all = column<const uint8_t>(of_hashes, "hashes", count, BlockIndex::kHashBytes);
  BlockIndex& keys = idle(self).keys;
  const auto ready = static_cast<uint64_t>(
      std::count(of_states.data(), of_states.data() + count, kReadyState));
  if (ready > keys.capacity() - keys.size()) {
    throw std::invalid_argument("the index has room for " +
                                std::to_string(keys.capacity() - keys.size()) +
                                " more keys, not for " + std::to_string(ready));
  }
  std::vector<uint32_t> known;
  {
    const Filling filling(self);
    const Unlocked unlocked;
    known = keys.load({of_states.data(), count}, spaces, all);
  }
  return list_of(known);
}

nb::object scan(const Mapping& meta, nb::handle offset, nb::handle digests, nb::handle tokens_max,
                nb::handle states, nb::handle namespaces, nb::handle hashes, nb::handle tokens) {
  const Bytes of_digests(digests, "digests");
  const Bytes of_states(states, "states");
  const Bytes of_spaces(namespaces, "namespaces");
  const Bytes of_hashes(hashes, "hashes");
  const Bytes of_tokens(tokens, "tokens");
  const uint64_t count = of_states.size();
  const BlockColumns columns{
      {column_out<uint8_t>(of_states, "states", count), count},
      column_out<uint32_t>(of_spaces, "namespaces", count),
      column_out<uint8_t>(of_hashes, "hashes", count, BlockIndex::kHashBytes),
      column_out<uint32_t>(of_tokens, "tokens", count)};
  column<const uint8_t>(of_digests, "digests", of_digests.size() / kDigestBytes, kDigestBytes);
  const Known known{{of_digests.data(), of_digests.size()},
                    static_cast<uint32_t>(integer_within(tokens_max, "tokens_max", 1, kMaxU32))};
  const nb::object length = nb::steal(PyLong_FromUnsignedLongLong(count * kHeaderBytes));
  const Range range = range_within(*meta.region, offset, length);
  if (range.offset % sizeof(uint32_t) != 0) {
    throw std::invalid_argument("offset " + std::to_string(range.offset) +
                                " must be a multiple of 4");
  }
  Scan found;
  {
    const Lease lease(meta.region);
    const Unlocked unlocked;
    found = scan_headers(meta.region->data() + range.offset, known, columns);
  }
  return nb::make_tuple(list_of(found.torn), list_of(found.odd));
}

}  // namespace

void bind_index(nb::module_& module) {
  nb::class_<Index>(module, "BlockIndex", kClassDoc)
      .def("__init__", construct, nb::arg("capacity"),
           nb::sig("def __init__(self, capacity: int) -> None"))
      .def("get", get, nb::arg("namespace"), nb::arg("block_hash"),
           nb::sig("def get(self, namespace: int, block_hash: Buffer) -> int | None"),
           "Return the block with this key, None when there is none.")
      .def("prefix", prefix, nb::arg("namespace"), nb::arg("hashes"),
           nb::sig("def prefix(self, namespace: int, hashes: Buffer) -> list[int]"), kPrefixDoc)
      .def("put", put, nb::arg("namespace"), nb::arg("block_hash"), nb::arg("block"),
           nb::sig("def put(self, namespace: int, block_hash: Buffer, block: int) -> None"),
           kPutDoc)
      .def("remove", remove, nb::arg("namespace"), nb::arg("block_hash"),
           nb::sig("def remove(self, namespace: int, block_hash: Buffer) -> None"),
           "Remove a key; KeyError when it is not there.")
      .def("clear", clear, nb::arg("capacity") = nb::none(),
           nb::sig("def clear(self, capacity: int | None = None) -> None"), kClearDoc)
      .def("load", load, nb::arg("states"), nb::arg("namespaces"), nb::arg("hashes"),
           nb::sig("def load(self, states: Buffer, namespaces: Buffer, hashes: Buffer) "
                   "-> list[int]"),
           kLoadDoc)
      .def("__len__", [](Index& self) { return idle(self).keys.size(); })
      .def_prop_ro(
          "capacity", [](Index& self) { return idle(self).keys.capacity(); },
          "Most keys that the index has room for.")
      .def_prop_ro(
          "slot_bytes", [](Index& self) { return idle(self).keys.slot_bytes(); },
          "Address space of all slots, of which only pages with a key are resident.");
  module.def("scan_headers", scan, nb::arg("meta"), nb::arg("offset"), nb::arg("digests"),
             nb::arg("tokens_max"), nb::arg("states"), nb::arg("namespaces"), nb::arg("hashes"),
             nb::arg("tokens"),
             nb::sig("def scan_headers(meta: Mapping, offset: int, digests: Buffer, "
                     "tokens_max: int, states: Buffer, namespaces: Buffer, hashes: Buffer, "
                     "tokens: Buffer) -> tuple[list[int], list[int]]"),
             kScanDoc);
}

}  // namespace kvd
