"""What a daemon must know of its earlier life beside the block headers: pool, members, regions.

It changes with joins and deaths, not with blocks, so it is written whole each time, into the half
of its memfd that does not hold the last one::

    half     seq u64 | length u32 | crc32c u32 of seq, length and document | document (msgpack)

The number goes last, with release order: a daemon that dies while it writes leaves the other half
as it was, with the highest number that has a whole document.
"""

from __future__ import annotations

import struct
from typing import Final, Protocol

import msgspec

from kvd_kernels.host import crc32c

HALF_BYTES: Final = 1 << 20
RECORD_BYTES: Final = 2 * HALF_BYTES
VERSION: Final = 1

_HEAD: Final = struct.Struct("<QII")


class PoolRecord(msgspec.Struct, array_like=True, frozen=True):
    """Layout of the pool; `namespaces` are (digest, hash probe) in the order of their numbers."""

    digest: bytes
    stride: int
    total: int
    block_tokens: int
    num_layers: int
    num_shards: int
    namespaces: list[tuple[bytes, bytes]]


class MemberRecord(msgspec.Struct, array_like=True, frozen=True):
    """A member, and the name under which its pidfd is kept."""

    engine: str
    member: str
    incarnation: int
    kept_as: str


class RegionRecord(msgspec.Struct, array_like=True, frozen=True):
    """A decode region, and the name under which its memory is kept."""

    name: str
    engine: str
    num_layers: int
    num_blocks: int
    block_tokens: int
    row_bytes: int
    kept_as: str


class NodeRecord(msgspec.Struct, array_like=True, frozen=True):
    """Everything; fields are only appended, with defaults."""

    version: int = VERSION
    pool: PoolRecord | None = None
    members: list[MemberRecord] = []
    regions: list[RegionRecord] = []


class RecordMapping(Protocol):
    """What the file needs of a mapping (`kvd_kernels.host.Mapping` has it)."""

    @property
    def size(self) -> int:
        """Bytes mapped."""

    def read_bytes(self, offset: int, length: int, /) -> bytes:
        """Return a copy of some bytes."""

    def write_bytes(self, offset: int, data: bytes, /) -> None:
        """Write some bytes, in any order."""

    def store_u64(self, offset: int, value: int, /) -> None:
        """Store a word with release order: after all writes before it."""


class RecordFile:
    """The two halves in a mapping of `RECORD_BYTES`; one process, one thread writes."""

    def __init__(self, mapping: RecordMapping) -> None:
        """Find the last whole record.

        Raises: ValueError: the mapping is too small, or its record is not one of this version.
        """
        if mapping.size < RECORD_BYTES:
            raise ValueError(f"a record needs {RECORD_BYTES} bytes, not {mapping.size}")
        self._mapping = mapping
        self._seq = 0
        self.last: NodeRecord | None = None
        """What was written last, None in a fresh file."""
        for half in (0, 1):
            seq, document = self._read_half(half)
            if document is not None and seq > self._seq:
                self._seq = seq
                self.last = _decoded(document)

    def write(self, record: NodeRecord) -> None:
        """Replace the record.

        Raises: ValueError: it is too large; nothing was written.
        """
        document = msgspec.msgpack.encode(record)
        if len(document) > HALF_BYTES - _HEAD.size:
            raise ValueError(f"a record of {len(document)} bytes is too large")
        seq = self._seq + 1
        at = (seq % 2) * HALF_BYTES
        self._mapping.store_u64(at, 0)
        packed = _HEAD.pack(seq, len(document), _crc(seq, document))
        self._mapping.write_bytes(at + 8, packed[8:] + document)
        self._mapping.store_u64(at, seq)
        self._seq = seq
        self.last = record

    def _read_half(self, half: int) -> tuple[int, bytes | None]:
        at = half * HALF_BYTES
        seq, length, crc = _HEAD.unpack(self._mapping.read_bytes(at, _HEAD.size))
        if seq == 0 or length > HALF_BYTES - _HEAD.size:
            return 0, None
        document = self._mapping.read_bytes(at + _HEAD.size, length)
        return seq, document if _crc(seq, document) == crc else None


def _crc(seq: int, document: bytes) -> int:
    return crc32c(struct.pack("<QI", seq, len(document)) + document)


def _decoded(document: bytes) -> NodeRecord:
    try:
        record = msgspec.msgpack.decode(document, type=NodeRecord)
    except msgspec.DecodeError as error:
        raise ValueError(f"the record of the earlier life cannot be read: {error}") from error
    if record.version != VERSION:
        raise ValueError(f"the record of the earlier life has version {record.version}")
    return record
