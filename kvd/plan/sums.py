"""Which spans carry checksums, and which bytes a checksum runs over.

The checksum of a span (one layer and shard of a block) runs over rows [0, tokens) of its parts, in
their order in the layout. It is computed by whoever copies the span, while copying.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvd.plan.runs import BlockRows, SummedSpans, add_rows

MODES: Final = ("off", "sampled", "always")

SAMPLE_EVERY: Final = 8
"""With `sampled`, of so many consecutive layers one of each block has a checksum, another one in
the next block: a byte that goes wrong is as likely to be seen in any layer."""


ZERO_SAID: Final = (1 << 32) - 1
"""How a CRC of 0 is said, since 0 says that there is none."""


class BadSpan(NamedTuple):
    """A copied span whose checksum is not what it must be."""

    block: int
    expected: int
    got: int


def is_summed(mode: str, block: int, layer: int) -> bool:
    """Whether a block's span of this layer has a checksum, by configuration."""
    return mode == "always" or (mode == "sampled" and (block + layer) % SAMPLE_EVERY == 0)


def read_rows(spans: SummedSpans, start: int, end: int, src: BlockRows) -> None:
    """Add tokens [start, end) of one part to the checksum of the group, without copying them."""
    at = start
    while at < end:
        offset, run = src.locate(at)
        count = min(run, end - at)
        spans.read(offset, count * src.row_bytes)
        at += count


def add_group(
    spans: SummedSpans,
    covered: tuple[int, int],
    copied: tuple[int, int],
    parts: Sequence[tuple[BlockRows, BlockRows]],
) -> None:
    """Begin a group: the checksum of tokens `covered`, of which `copied` are copied too.

    Args:
        covered, copied: [start, end) tokens; `copied` may reach beyond `covered` nowhere.
        parts: (destination, source) of each part of the span, in order.
    """
    spans.begin_group()
    start, end = copied
    for dst, src in parts:
        if covered[0] < start:
            read_rows(spans, covered[0], start, src)
        add_rows(spans, start, end, dst, src)
        if end < covered[1]:
            read_rows(spans, end, covered[1], src)


def add_block_groups(
    spans: SummedSpans, blocks: range, parts: Sequence[tuple[BlockRows, BlockRows]]
) -> None:
    """`add_group` of consecutive whole blocks of a sequence, each a group, all of it copied.

    Args: parts: as for `add_group`.
    Raises: IndexError when a block is not there.
    """
    size = parts[0][0].block_tokens if parts else 1
    is_even = all(rows.block_tokens == size for part in parts for rows in part)
    if not (parts and is_even and len(blocks) > 1):
        for at in blocks:
            tokens = (at * size, (at + 1) * size)
            add_group(spans, tokens, tokens, parts)
        return
    offsets = [[_block_offsets(rows, blocks) for rows in part] for part in parts]
    spans.add_groups(
        [dst for dst, _ in offsets],
        [src for _, src in offsets],
        [size * src.row_bytes for _, src in parts],
    )


def _block_offsets(rows: BlockRows, blocks: range) -> list[int]:
    """Byte offsets of consecutive blocks of a sequence."""
    skipped = rows.first_token // rows.block_tokens
    ids = rows.ids[blocks.start - skipped : blocks.stop - skipped]
    if blocks.start < skipped or len(ids) != len(blocks):
        raise IndexError(f"{blocks} lies outside {len(rows.ids)} blocks")
    base, stride = rows.base, rows.block_stride
    return [base + at * stride for at in ids]
