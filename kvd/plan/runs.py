"""Which bytes to copy: row ranges of block lists, joined into as few spans as possible."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_TRIPLE_BYTES: Final = 24


class CopySpans:
    """Triples (destination offset, source offset, bytes) of one copy, neighbours joined."""

    def __init__(self) -> None:
        """Nothing to copy yet."""
        self._triples = array("Q")
        self._shift = (0, 0)
        self.num_bytes = 0

    def shifted(self, dst: int, src: int) -> CopySpans:
        """The same pieces with both ends moved by so many bytes; neither is added to any more."""
        spans = CopySpans()
        spans._triples, spans.num_bytes = self._triples, self.num_bytes
        spans._shift = (self._shift[0] + dst, self._shift[1] + src)
        return spans

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

    def add_apart(self, dsts: Sequence[int], srcs: Sequence[int], nbytes: int) -> None:
        """Add pieces of one size, of which none continues another: faster than one by one."""
        count = len(dsts)
        words = array("Q", bytes(_TRIPLE_BYTES * count))
        words[0::3], words[1::3] = array("Q", dsts), array("Q", srcs)
        words[2::3] = array("Q", (nbytes,)) * count
        self._triples.extend(words)
        self.num_bytes += count * nbytes

    def extend(self, other: CopySpans) -> None:
        """Add all pieces of another list."""
        triples = other._triples
        for at in range(0, len(triples), 3):
            self.add(triples[at], triples[at + 1], triples[at + 2])

    @property
    def buffer(self) -> array[int]:
        """Native u64 triples, as `kvd_kernels.host.copy_spans` takes them."""
        if any(self._shift):
            triples = self._triples[:]
            for end, shift in enumerate(self._shift):
                triples[end::3] = array("Q", [at + shift for at in triples[end::3]])
            self._triples, self._shift = triples, (0, 0)
        return self._triples

    @property
    def unshifted(self) -> tuple[array[int], int, int]:
        """Triples, and what is to be added to each destination and source: for who adds faster."""
        return self._triples, *self._shift

    def __len__(self) -> int:
        return len(self._triples) // 3


NOT_COPIED = (1 << 64) - 1
"""Destination of what is only read; as `kvd_kernels.host.NOT_COPIED`."""


class SummedSpans(CopySpans):
    """A copy whose pieces are checksummed in groups.

    It belongs to the copy until that has ended. Then `sums` holds the CRC-32C of each group: of its
    source bytes, in the order in which they were added.
    """

    def __init__(self) -> None:
        """Nothing to copy yet, and no group."""
        super().__init__()
        self.counts = array("I")
        self.sums = array("I")

    def shifted(self, dst: int, src: int) -> CopySpans:
        """Raises TypeError: the checksums are those of one copy."""
        raise TypeError("pieces with checksums belong to one copy")

    def begin_group(self) -> None:
        """What is added from now on is summed together."""
        self.counts.append(0)
        self.sums.append(0)

    def add(self, dst: int, src: int, nbytes: int) -> None:
        """Add a piece to the present group; it is joined only to one of the same group."""
        self.num_bytes += nbytes
        self._add(dst, src, nbytes)

    def add_apart(self, dsts: Sequence[int], srcs: Sequence[int], nbytes: int) -> None:
        """Add pieces to the present group; as for `CopySpans`."""
        super().add_apart(dsts, srcs, nbytes)
        self.counts[-1] += len(dsts)

    def add_groups(
        self, dsts: Sequence[Sequence[int]], srcs: Sequence[Sequence[int]], sizes: Sequence[int]
    ) -> None:
        """Add many groups of one shape: faster than one by one, and nothing is joined.

        Args:
            dsts, srcs: [part][group], byte offsets.
            sizes: [part], bytes.
        """
        count, width = len(dsts[0]), 3 * len(sizes)
        words = array("Q", bytes(_TRIPLE_BYTES * count * len(sizes)))
        for part, nbytes in enumerate(sizes):
            words[3 * part :: width] = array("Q", dsts[part])
            words[3 * part + 1 :: width] = array("Q", srcs[part])
            words[3 * part + 2 :: width] = array("Q", (nbytes,)) * count
        self._triples.extend(words)
        self.counts.extend(array("I", (len(sizes),)) * count)
        self.sums.extend(array("I", (0,)) * count)
        self.num_bytes += count * sum(sizes)

    def read(self, src: int, nbytes: int) -> None:
        """Add a piece that is summed and not copied."""
        self._add(NOT_COPIED, src, nbytes)

    def _add(self, dst: int, src: int, nbytes: int) -> None:
        triples = self._triples
        if self.counts[-1]:
            last_dst, last_src, last = triples[-3], triples[-2], triples[-1]
            joins = dst == last_dst if dst == NOT_COPIED else last_dst + last == dst
            if joins and last_src + last == src:
                triples[-1] = last + nbytes
                return
        triples.extend((dst, src, nbytes))
        self.counts[-1] += 1


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of one part of one sequence, laid out in blocks.

    base:         byte offset of block id 0.
    block_stride: bytes from one block id to the next.
    block_tokens: rows of a block.
    row_bytes:    bytes of a row; rows of a block are contiguous.
    ids:          block ids; ids[0] holds the tokens [first_token, first_token + block_tokens).
    first_token:  a multiple of block_tokens.
    """

    base: int
    block_stride: int
    block_tokens: int
    row_bytes: int
    ids: Sequence[int]
    first_token: int = 0

    def locate(self, token: int) -> tuple[int, int]:
        """(byte offset of the token's row, rows that follow contiguously, this one included).

        Raises: IndexError for a token outside the blocks.
        """
        index, row = divmod(token - self.first_token, self.block_tokens)
        if index < 0 or index >= len(self.ids):
            raise IndexError(f"token {token} lies outside {len(self.ids)} blocks")
        offset = self.base + self.ids[index] * self.block_stride + row * self.row_bytes
        return offset, self.block_tokens - row


def add_rows(spans: CopySpans, start: int, end: int, dst: BlockRows, src: BlockRows) -> None:
    """Add the copy of tokens [start, end) of one part; the block sizes may differ.

    Raises: ValueError when the row sizes differ, IndexError when a token has no block.
    """
    if dst.row_bytes != src.row_bytes:
        raise ValueError(f"rows of {src.row_bytes} bytes do not fit rows of {dst.row_bytes}")
    at = _add_blocks(spans, start, end, dst, src)
    while at < end:
        dst_at, dst_run = dst.locate(at)
        src_at, src_run = src.locate(at)
        count = min(dst_run, src_run, end - at)
        spans.add(dst_at, src_at, count * dst.row_bytes)
        at += count


def _add_neighbours(
    spans: CopySpans, dst: BlockRows, src: BlockRows, to: Sequence[int], of: Sequence[int]
) -> None:
    """Add blocks that follow each other without a gap where their ids do: each run at once."""
    nbytes, at = dst.block_stride, 0
    while at < len(to):
        end = at + 1
        while end < len(to) and to[end] - to[at] == end - at == of[end] - of[at]:
            end += 1
        spans.add(dst.base + to[at] * nbytes, src.base + of[at] * nbytes, (end - at) * nbytes)
        at = end


def _add_blocks(spans: CopySpans, start: int, end: int, dst: BlockRows, src: BlockRows) -> int:
    """Add all whole blocks of [start, end) at once, where both ends have blocks of one size.

    Returns: the first token that is left to add.
    """
    size, nbytes = dst.block_tokens, dst.block_tokens * dst.row_bytes
    num = (end - start) // size
    first, skipped = divmod(start - dst.first_token, size)
    other, askew = divmod(start - src.first_token, size)
    if src.block_tokens != size or num < 2 or skipped or askew:
        return start
    if not (0 <= first <= len(dst.ids) - num and 0 <= other <= len(src.ids) - num):
        return start  # and says which token has no block
    if dst.block_stride == nbytes and src.block_stride == nbytes:
        _add_neighbours(spans, dst, src, dst.ids[first : first + num], src.ids[other : other + num])
        return start + num * size
    spans.add(dst.locate(start)[0], src.locate(start)[0], nbytes)
    spans.add_apart(
        [dst.base + at * dst.block_stride for at in dst.ids[first + 1 : first + num]],
        [src.base + at * src.block_stride for at in src.ids[other + 1 : other + num]],
        nbytes,
    )
    return start + num * size
