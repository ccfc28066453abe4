"""Region layout v1: the metadata of a pool, in a memfd that is never handed out.

::

    byte 0          4096              4224
    | superblock    | header, block 0 | header, block 1 ...      (128 bytes each)

    superblock   magic 8s | version u32 | header bytes u32 | block stride u64 | block count u64
                 | data bytes u64 | layout digest 32s | crc32c u32 of all that   (little endian)
    header       state u32 | seq u32 | namespace 32s | hash 32s | tokens u32 | flags u32
                 | zeros | crc32c u32 (last 4 bytes) of bytes 4 .. 123

A commit writes seq .. crc while the state says filling, and then stores the state, one aligned word
with release order, last. So a daemon that dies at any instant leaves each block either as it was,
or filling, or ready with a header that is whole. The states are words that no single wrong byte
turns into one another; the checksum tells everything else. A header that is neither is *torn*:
never served, and counted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import Enum
from typing import Final, NamedTuple, Protocol

from kvd_kernels.host import crc32c

MAGIC: Final = b"KVDMETA1"
VERSION: Final = 1
SUPERBLOCK_BYTES: Final = 4096
HEADER_BYTES: Final = 128
DIGEST_BYTES: Final = 32

_SUPERBLOCK: Final = struct.Struct("<8sIIQQQ32s")
_HEADER_BODY: Final = struct.Struct("<I32s32sII")  # from seq on; then zeros up to the crc
_CRC: Final = struct.Struct("<I")
_BODY_BYTES: Final = HEADER_BYTES - 4 - _CRC.size
_SCAN_HEADERS: Final = 8192  # 1 MiB a read
_U32: Final = (1 << 32) - 1


class MetaMapping(Protocol):
    """What the table needs of a mapping (`kvd_kernels.host.Mapping` has it)."""

    @property
    def size(self) -> int:
        """Bytes mapped."""

    def read_bytes(self, offset: int, length: int, /) -> bytes:
        """Return a copy of some bytes."""

    def write_bytes(self, offset: int, data: bytes, /) -> None:
        """Write some bytes, in any order."""

    def load_u32(self, offset: int, /) -> int:
        """Load a word with acquire order."""

    def store_u32(self, offset: int, value: int, /) -> None:
        """Store a word with release order: after all writes before it."""

    def store_u64(self, offset: int, value: int, /) -> None:
        """Store a word with release order: after all writes before it."""


class BlockState(Enum):
    """What a header says of its block; TORN is a finding, never written."""

    RESET = 0
    FILLING = 0x46494C4C
    READY = 0x52454459
    TORN = -1


class Superblock(NamedTuple):
    """Shape of the pool: block_stride and data_bytes in bytes, layout_digest 32 bytes."""

    block_stride: int
    block_count: int
    data_bytes: int
    layout_digest: bytes


class Header(NamedTuple):
    """Header of one block; the fields from seq on mean something only when it is READY."""

    block: int
    state: BlockState
    seq: int
    namespace: bytes
    hash: bytes
    tokens: int
    flags: int


def meta_bytes(block_count: int) -> int:
    """Return the bytes of metadata for so many blocks, not rounded to OS pages."""
    return SUPERBLOCK_BYTES + block_count * HEADER_BYTES


def blocks_of(num_bytes: int) -> int:
    """Return how many blocks so much metadata can speak of."""
    return max(0, num_bytes - SUPERBLOCK_BYTES) // HEADER_BYTES


class MetaTable:
    """The headers of a pool's blocks; one process, one thread writes."""

    def __init__(self, mapping: MetaMapping) -> None:
        """Open metadata that `format` wrote, perhaps in an earlier life of the daemon.

        Raises: ValueError: not such metadata, another version, damaged, or cut short.
        """
        self._mapping = mapping
        self._superblock = _read_superblock(mapping)

    @classmethod
    def format(
        cls, mapping: MetaMapping, superblock: Superblock, *, fresh: bool = False
    ) -> MetaTable:
        """Void all headers and write the superblock; the magic goes last.

        Args:
            mapping: at least `meta_bytes(block_count)`; its old content is lost.
            fresh: the memory was never written, so that it is zero without being touched.
        Raises: ValueError: a field out of range, or the mapping or the data is too small; nothing
            has been written then.
        """
        _check_superblock(superblock, mapping.size)
        mapping.store_u64(0, 0)
        zeros = bytes(_SCAN_HEADERS * HEADER_BYTES)
        end = 8 if fresh else meta_bytes(superblock.block_count)
        for offset in range(8, end, len(zeros)):
            mapping.write_bytes(offset, zeros[: end - offset])
        packed = _pack_superblock(superblock)
        mapping.write_bytes(8, packed[8:])
        mapping.store_u64(0, int.from_bytes(MAGIC, "little"))
        return cls(mapping)

    @classmethod
    def resize(cls, mapping: MetaMapping, superblock: Superblock) -> MetaTable:
        """Write a superblock of fewer or more blocks; headers that go on to count stay.

        Raises: ValueError: as at open, or a field out of range; nothing has been written then.
        """
        _check_superblock(superblock, mapping.size)
        old = meta_bytes(cls(mapping).superblock.block_count)
        zeros = bytes(_SCAN_HEADERS * HEADER_BYTES)
        end = meta_bytes(superblock.block_count)
        for offset in range(old, end, len(zeros)):
            mapping.write_bytes(offset, zeros[: end - offset])
        mapping.store_u64(0, 0)
        mapping.write_bytes(8, _pack_superblock(superblock)[8:])
        mapping.store_u64(0, int.from_bytes(MAGIC, "little"))
        return cls(mapping)

    @property
    def superblock(self) -> Superblock:
        """Shape of the pool, checked at open."""
        return self._superblock

    def begin_fill(self, block: int) -> None:
        """Say that a block's content is being written: from now on it is not ready.

        Raises: IndexError: no such block.
        """
        self._mapping.store_u32(self._offset(block), BlockState.FILLING.value)

    def commit(
        self, block: int, namespace: bytes, block_hash: bytes, tokens: int, flags: int = 0
    ) -> None:
        """Make a block ready under its identity: fields and checksum first, the state last.

        Args: namespace, block_hash: 32 bytes each. tokens, flags: u32.
        Raises:
            IndexError: no such block.
            ValueError: a field out of range, or the block is not filling; nothing is written.
        """
        offset = self._offset(block)
        _check_digest("namespace", namespace)
        _check_digest("block_hash", block_hash)
        _check_u32("tokens", tokens)
        _check_u32("flags", flags)
        if self._mapping.load_u32(offset) != BlockState.FILLING.value:
            raise ValueError(f"block {block} is not filling: begin_fill comes before commit")
        (last_seq,) = _CRC.unpack(self._mapping.read_bytes(offset + 4, 4))
        seq = (last_seq + 1) & _U32
        body = _HEADER_BODY.pack(seq, namespace, block_hash, tokens, flags)
        body = body.ljust(_BODY_BYTES, b"\0")
        self._mapping.write_bytes(offset + 4, body + _CRC.pack(crc32c(body)))
        self._mapping.store_u32(offset, BlockState.READY.value)

    def free(self, block: int) -> None:
        """Say that a block holds nothing.

        Raises: IndexError: no such block.
        """
        self._mapping.store_u32(self._offset(block), BlockState.RESET.value)

    def read(self, block: int) -> Header:
        """Return the header of a block; a damaged one is TORN.

        Raises: IndexError: no such block.
        """
        return _parse_header(block, self._mapping.read_bytes(self._offset(block), HEADER_BYTES))

    def scan(self) -> Iterator[Header]:
        """Yield the headers of all blocks that are not reset, in order of the blocks."""
        reset = _CRC.pack(BlockState.RESET.value)
        count = self._superblock.block_count
        for first in range(0, count, _SCAN_HEADERS):
            num = min(_SCAN_HEADERS, count - first)
            data = self._mapping.read_bytes(self._offset(first), num * HEADER_BYTES)
            for index in range(num):
                at = index * HEADER_BYTES
                if data[at : at + 4] != reset:
                    yield _parse_header(first + index, data[at : at + HEADER_BYTES])

    def _offset(self, block: int) -> int:
        if not 0 <= block < self._superblock.block_count:
            raise IndexError(
                f"block {block} is outside the {self._superblock.block_count} blocks of the pool"
            )
        return SUPERBLOCK_BYTES + block * HEADER_BYTES


def _parse_header(block: int, data: bytes) -> Header:
    state_word, crc = _CRC.unpack_from(data)[0], _CRC.unpack_from(data, HEADER_BYTES - 4)[0]
    body = data[4 : 4 + _BODY_BYTES]
    state = _STATES.get(state_word, BlockState.TORN)
    if state is BlockState.READY and crc32c(body) != crc:
        state = BlockState.TORN
    return Header(block, state, *_HEADER_BODY.unpack_from(body))


_STATES: Final = {state.value: state for state in BlockState if state is not BlockState.TORN}


def _pack_superblock(superblock: Superblock) -> bytes:
    packed = _SUPERBLOCK.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        superblock.block_stride,
        superblock.block_count,
        superblock.data_bytes,
        superblock.layout_digest,
    )
    return packed + _CRC.pack(crc32c(packed))


def _read_superblock(mapping: MetaMapping) -> Superblock:
    if mapping.size < SUPERBLOCK_BYTES:
        raise ValueError(f"metadata has {mapping.size} bytes, less than its superblock")
    packed = mapping.read_bytes(0, _SUPERBLOCK.size)
    (crc,) = _CRC.unpack(mapping.read_bytes(_SUPERBLOCK.size, _CRC.size))
    magic, version, header_bytes, *shape = _SUPERBLOCK.unpack(packed)
    if magic != MAGIC:
        raise ValueError(f"not pool metadata: it starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION or header_bytes != HEADER_BYTES:
        raise ValueError(
            f"pool metadata version {version} with headers of {header_bytes} bytes is not known, "
            f"only version {VERSION} with {HEADER_BYTES}"
        )
    if crc32c(packed) != crc:
        raise ValueError("the superblock of the pool metadata is damaged: its checksum differs")
    superblock = Superblock(*shape)
    _check_superblock(superblock, mapping.size)
    return superblock


def _check_superblock(superblock: Superblock, mapping_bytes: int) -> None:
    stride, count = superblock.block_stride, superblock.block_count
    _check_digest("layout_digest", superblock.layout_digest)
    if stride <= 0 or count <= 0:
        raise ValueError(f"block_stride {stride} and block_count {count} must be positive")
    if stride * count > superblock.data_bytes or superblock.data_bytes >= 1 << 63:
        raise ValueError(
            f"{count} blocks of {stride} bytes do not fit in {superblock.data_bytes} bytes of data"
        )
    if meta_bytes(count) > mapping_bytes:
        raise ValueError(
            f"{count} blocks need {meta_bytes(count)} bytes of metadata, it has {mapping_bytes}"
        )


def _check_digest(name: str, value: bytes) -> None:
    if len(value) != DIGEST_BYTES:
        raise ValueError(f"{name} must have {DIGEST_BYTES} bytes, got {len(value)}")


def _check_u32(name: str, value: int) -> None:
    if not 0 <= value <= _U32:
        raise ValueError(f"{name} must be between 0 and 2^32 - 1, got {value}")
