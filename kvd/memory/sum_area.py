"""The checksum area of the pool: kvd writes, members map it to read; layout in `kvd.wire`.

It is a file of its own, because the metadata is never handed out. Like a gate page it is sealed
against further writers once it is mapped here, so no engine can make wrong bytes look right. A
later life of kvd cannot write it either: it copies it (`adopt`).

A block's words are trusted when its header says so (`FLAG_SUMS`): the header is written last, after
the words. Adoption checks nothing: a block's first load afterwards is verified like any other.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack
from typing import Final

from kvd.core.errors import LocalError
from kvd.core.units import align_up, format_size
from kvd.wire.sum_layout import (
    WORD_BYTES,
    Sum,
    SumShape,
    SumView,
    area_bytes,
    make_word,
    pack_header,
    word_offset,
)
from kvd_kernels.host import Mapping

FLAG_SUMS: Final = 1
"""Flag of a block's header: the area's words of this block are of its present content."""

SUM_BYTES: Final = 4
"""Bytes of a checksum in a `save_ended`; 0 there is none, and a CRC of 0 is said as all ones."""

_F_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1; not among Python's constants
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
_COPY_BYTES: Final = 1 << 16


class SumArea:
    """The checksums of all spans of a pool; none is known at first."""

    def __init__(self, shape: SumShape) -> None:
        """Make the area; its pages come as they are written.

        Raises: LocalError(memory_short): the kernel refused the file or its mapping.
        """
        self.shape: Final = shape
        size = align_up(area_bytes(shape), os.sysconf("SC_PAGE_SIZE"))
        with ExitStack() as undo:
            try:
                fd = os.memfd_create("kvd-pool-sums", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                undo.callback(os.close, fd)
                os.ftruncate(fd, size)
                mapping = Mapping(fd, size, writable=True)
                undo.callback(mapping.close)
            except OSError as error:
                raise LocalError(
                    "memory_short",
                    region="checksums of the pool",
                    need=format_size(size),
                    free="a part",
                    limit=f"the kernel refused: {error.strerror}",
                    fix="Free memory on this host, or set pool.checksums = off.",
                ) from error
            mapping.write_bytes(0, pack_header(shape))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            undo.pop_all()
        self._fd = fd
        self._mapping = mapping
        self._view = SumView(mapping)

    @classmethod
    def adopt(cls, fd: int, shape: SumShape) -> SumArea:
        """Make an area with the words of another life's; that one stays as it is.

        Args: shape: of the pool now; it may have fewer blocks than it had.
        Raises: ValueError: it is no area of this pool. LocalError(memory_short).
        """
        old = Mapping(fd, os.fstat(fd).st_size, writable=False)
        try:
            was = SumView(old).shape
            if was[1:] != shape[1:] or was.block_count < shape.block_count:
                raise ValueError("the checksum area belongs to another pool")
            area = cls(shape)
            for span in range(shape.num_spans):
                area._copy(old, word_offset(was, span, 0), word_offset(shape, span, 0))
        finally:
            old.close()
        return area

    def _copy(self, old: Mapping, start: int, to: int) -> None:
        """Copy the words of one span; pages of zeros stay untouched."""
        total = self.shape.block_count * WORD_BYTES
        for at in range(0, total, _COPY_BYTES):
            words = old.read_bytes(start + at, min(_COPY_BYTES, total - at))
            if words.count(0) != len(words):
                self._mapping.write_bytes(to + at, words)

    @property
    def fd(self) -> int:
        """The file; owned by the area, duplicated by sending it. It can only be mapped to read."""
        return self._fd

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._mapping.size

    def store(
        self, span: int, blocks: tuple[int, ...], tokens: tuple[int, ...], sums: bytes
    ) -> None:
        """Record what a save of one span into some blocks has written.

        Args:
            tokens: rows of the span that are valid in each block.
            sums: 4 bytes for each block, or b"" when nothing is known of any.
        Raises: IndexError: no such span or block.
        """
        crcs = memoryview(sums).cast("I") if sums else (0,) * len(blocks)
        for block, count, crc in zip(blocks, tokens, crcs, strict=True):
            word = make_word(count, crc) if crc and count else 0
            self._mapping.store_u64(word_offset(self.shape, span, block), word)

    def get(self, span: int, block: int) -> Sum | None:
        """What is known of a span."""
        return self._view.get(span, block)

    def forget(self, block: int) -> None:
        """Nothing is known of any span of a block: its header has no FLAG_SUMS."""
        for span in range(self.shape.num_spans):
            self._mapping.store_u64(word_offset(self.shape, span, block), 0)

    def close(self) -> None:
        """Unmap and close; members keep the area as it is. Idempotent."""
        if self._fd < 0:
            return
        self._mapping.close()
        os.close(self._fd)
        self._fd = -1
