"""The checksum area of a pool: one word for each span of each block, written by kvd alone.

::

    byte 0        4096
    | header      | word of span 0, block 0 | span 0, block 1 ... | span 1, block 0 ...   (u64 each)

    header   magic 8s | version u32 | zeros u32 | block count u64 | span count u64
             | layout digest 32s                                           (little endian)
    word     tokens u32 << 32 | crc32c u32; 0: none is known

A span is (layer, shard): `layer * num_shards + shard`. Its checksum runs over rows [0, tokens) of
each of its parts, one part after the other. Members map the area to read only; it is sealed, so
that nobody but the kvd that made it can write. A word counts only while kvd lets the span be read:
it belongs to what the last ended save of the span wrote.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

MAGIC: Final = b"KVDSUMS1"
VERSION: Final = 1
HEADER_BYTES: Final = 4096
WORD_BYTES: Final = 8

_HEADER: Final = struct.Struct("<8sIIQQ32s")
_U32: Final = (1 << 32) - 1


class SumShape(NamedTuple):
    """Which pool an area belongs to: its counts, and the 32 bytes that name its layout."""

    block_count: int
    num_spans: int
    digest: bytes


class Sum(NamedTuple):
    """Checksum of rows [0, tokens) of a span."""

    tokens: int
    crc: int


class SumMapping(Protocol):
    """What reading takes of a mapping."""

    @property
    def size(self) -> int:
        """Bytes mapped."""

    def read_bytes(self, offset: int, length: int, /) -> bytes:
        """Return a copy of some bytes."""

    def load_u64(self, offset: int, /) -> int:
        """Load a word with acquire order."""


def area_bytes(shape: SumShape) -> int:
    """Bytes of an area, not rounded to OS pages."""
    return HEADER_BYTES + shape.block_count * shape.num_spans * WORD_BYTES


def word_offset(shape: SumShape, span: int, block: int) -> int:
    """Byte offset of a span's word.

    Raises: IndexError: no such span or block.
    """
    if not (0 <= span < shape.num_spans and 0 <= block < shape.block_count):
        raise IndexError(f"span {span} of block {block} is outside {shape[:2]}")
    return HEADER_BYTES + (span * shape.block_count + block) * WORD_BYTES


def pack_header(shape: SumShape) -> bytes:
    """The header, without the zeros behind it."""
    return _HEADER.pack(MAGIC, VERSION, 0, *shape)


def make_word(tokens: int, crc: int) -> int:
    """The word of a checksum.

    Raises: ValueError: tokens is not 1 to 2^32 - 1, or crc no u32.
    """
    if not (0 < tokens <= _U32 and 0 <= crc <= _U32):
        raise ValueError(f"checksum {crc} of {tokens} tokens does not fit a word")
    return tokens << 32 | crc


class SumView:
    """Reads an area."""

    def __init__(self, mapping: SumMapping) -> None:
        """Open an area.

        Raises: ValueError: the memory is none, or is cut short.
        """
        if mapping.size < HEADER_BYTES:
            raise ValueError(f"a checksum area has at least {HEADER_BYTES} bytes")
        header = mapping.read_bytes(0, _HEADER.size)
        magic, version, _, block_count, num_spans, digest = _HEADER.unpack(header)
        if magic != MAGIC or version != VERSION:
            raise ValueError(f"not a checksum area of version {VERSION}: {magic!r} {version}")
        self.shape = SumShape(block_count, num_spans, digest)
        if area_bytes(self.shape) > mapping.size:
            raise ValueError(
                f"the checksum area needs {area_bytes(self.shape)} bytes, it has {mapping.size}"
            )
        self._mapping = mapping

    def get(self, span: int, block: int) -> Sum | None:
        """What a span's checksum must be, None when none is known.

        Raises: IndexError: no such span or block.
        """
        word = self._mapping.load_u64(word_offset(self.shape, span, block))
        return Sum(word >> 32, word & _U32) if word else None

    def full(self, span: int, blocks: Sequence[int], tokens: int) -> list[tuple[int, int]] | None:
        """(block, checksum) of each block's span, if each has one over `tokens` tokens.

        Raises: IndexError: no such span or block.
        """
        if not blocks:
            return []
        base, load = word_offset(self.shape, span, 0), self._mapping.load_u64
        word_offset(self.shape, span, min(blocks))
        word_offset(self.shape, span, max(blocks))
        words = [load(base + block * WORD_BYTES) for block in blocks]
        if any(word >> 32 != tokens for word in words):
            return None
        return [(block, word & _U32) for block, word in zip(blocks, words, strict=True)]
