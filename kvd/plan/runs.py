"""Which bytes to copy: row ranges of block lists, joined into as few spans as possible."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class CopySpans:
    """Triples (destination offset, source offset, bytes) of one copy, neighbours joined."""

    def __init__(self) -> None:
        """Nothing to copy yet."""
        self._triples = array("Q")
        self.num_bytes = 0

    def add(self, dst: int, src: int, nbytes: int) -> None:
        """Add a piece; it is joined to the last one when both ends continue it."""
        self.num_bytes += nbytes
        triples = self._triples
        if len(triples):
            last_dst, last_src, last = triples[-3], triples[-2], triples[-1]
            if last_dst + last == dst and last_src + last == src:
                triples[-1] = last + nbytes
                return
        triples.extend((dst, src, nbytes))

    def extend(self, other: CopySpans) -> None:
        """Add all pieces of another list."""
        triples = other._triples
        for at in range(0, len(triples), 3):
            self.add(triples[at], triples[at + 1], triples[at + 2])

    @property
    def buffer(self) -> array[int]:
        """Native u64 triples, as `kvd_kernels.host.copy_spans` takes them."""
        return self._triples

    def __len__(self) -> int:
        return len(self._triples) // 3


def row_pieces(start: int, end: int, block_tokens: int) -> list[tuple[int, int, int]]:
    """Divide token rows [start, end) at block edges.

    Returns: (index of the block counted from token 0, first row in it, number of rows).
    """
    pieces = []
    at = start
    while at < end:
        block, row = divmod(at, block_tokens)
        count = min(block_tokens - row, end - at)
        pieces.append((block, row, count))
        at += count
    return pieces


def add_rows(
    spans: CopySpans,
    rows: tuple[int, int],
    block_tokens: int,
    row_bytes: int,
    dst: tuple[int, int, Sequence[int]],
    src: tuple[int, int, Sequence[int]],
    first_block: int = 0,
) -> None:
    """Add the copy of token rows of one part between two block-wise areas.

    Args:
        rows: [start, end) of the sequence's tokens.
        dst, src: (byte offset of block 0, bytes from one block to the next, block ids). The
            block that holds token t is ids[t // block_tokens - first_block].
        first_block: index of the block that ids[0] stands for, on both sides.
    """
    dst_base, dst_stride, dst_ids = dst
    src_base, src_stride, src_ids = src
    for index, row, count in row_pieces(rows[0], rows[1], block_tokens):
        at = index - first_block
        spans.add(
            dst_base + dst_ids[at] * dst_stride + row * row_bytes,
            src_base + src_ids[at] * src_stride + row * row_bytes,
            count * row_bytes,
        )
