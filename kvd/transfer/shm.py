"""The `shm` transfer engine: both kvds on one host, rows copied once between mapped files.

What it can enforce: a granted read touches only files that the producer handed out, read-only; the
copy runs in this process, so it ends with it (the pidfd of this process is its fence).

Rows of a pool whose kvd keeps checksums are compared with those while they are copied: where one
differs, the read has failed and the block is named, so that its kvd drops it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from kvd.core.transfer_types import Source, SourceKind
from kvd.plan.layout import BlockLayout, RegionLayout
from kvd.plan.runs import BlockRows, CopySpans, SummedSpans, add_rows
from kvd.plan.sums import ZERO_SAID, BadSpan, add_group
from kvd.wire.layout import DeviceLayout, ResidentPart
from kvd.wire.sum_layout import SumView
from kvd_kernels.host import Mapping, copy_spans, copy_sums

MAIN_PART = "main"


class CopyRefused(ValueError):
    """A read that cannot be copied as asked; its text goes into the transfer's failure."""


class SumsDiffer(ValueError):
    """Pool blocks hold other bytes than had been saved; what was copied must not be used."""

    def __init__(self, layer: int, bad: list[BadSpan]) -> None:
        block, expected, got = bad[0]
        super().__init__(
            f"checksum_mismatch: layer {layer}, pool block {block}: {got:08x} instead of "
            f"{expected:08x}"
        )
        self.bad = bad


@dataclass(frozen=True, slots=True)
class ProducerMemory:
    """Where a producer's rows are: a member's slots, and the pool of its kvd.

    sums: what the checksums of the pool's spans must be, None where none are kept.
    sums_memory: the memory behind it.
    """

    device: Mapping
    device_layout: DeviceLayout
    pool: Mapping | None
    block_layout: BlockLayout | None
    sums: SumView | None = None
    sums_memory: Mapping | None = None

    def close(self) -> None:
        """Unmap what is the member's own; waits for copies out of it."""
        self.device.close()
        if self.sums_memory is not None:
            self.sums_memory.close()


@dataclass(frozen=True, slots=True)
class ResidentMemory:
    """A consumer member's device memory with the parts that it keeps resident."""

    device: Mapping
    parts: tuple[ResidentPart, ...]


@dataclass(frozen=True, slots=True)
class Destination:
    """Where rows land: the main part in the region, other parts in the ranks' device memory.

    blocks: engine block ids; blocks[0] holds token first_token, a multiple of block_tokens.
    """

    region: Mapping
    layout: RegionLayout
    blocks: tuple[int, ...]
    first_token: int
    residents: tuple[ResidentMemory, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One copy between two mappings."""

    dst: Mapping
    src: Mapping
    spans: CopySpans


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The copies of one read, in order.

    expected: for each group of the summed pieces (all have the same groups) the pool block and its
        checksum, None where none is known. One piece goes on with the checksums of the last.
    """

    layer: int
    pieces: list[Piece]
    expected: list[tuple[int, int] | None]


def plan_read(
    layer: int, start: int, end: int, source: Source, memory: ProducerMemory, to: Destination
) -> ReadPlan:
    """The copies of rows [start, end) of one layer, all parts.

    Raises: CopyRefused when the two sides do not fit each other.
    """
    try:
        groups = _groups(layer, start, end, source, memory)
        pieces = []
        for part, src, rows in _source_parts(layer, start, source, memory):
            pieces.extend(_to_destination(part, layer, groups, (src, rows), to))
    except (IndexError, KeyError, ValueError) as error:
        raise CopyRefused(f"layer {layer}: {error}") from error
    expected = [known for _, _, known in groups]
    return ReadPlan(layer, pieces, expected if any(expected) else [])


def copy(plan: ReadPlan, kernel: str = "auto") -> int:
    """Perform the copies; returns the bytes moved. The interpreter lock is free meanwhile.

    Raises: SumsDiffer: what was copied is wrong.
    """
    moved = 0
    sums = array("I", [0]) * len(plan.expected)
    for piece in plan.pieces:
        spans = piece.spans
        if isinstance(spans, SummedSpans):
            moved += copy_sums(
                piece.dst, piece.src, spans.buffer, spans.counts, sums, kernel=kernel
            )
        else:
            moved += copy_spans(piece.dst, piece.src, spans.buffer, kernel=kernel)
    bad = [
        BadSpan(*known, got)
        for known, got in zip(plan.expected, sums, strict=True)
        if known is not None and (got or ZERO_SAID) != known[1]
    ]
    if bad:
        raise SumsDiffer(plan.layer, bad)
    return moved


_Range = tuple[int, int]
"""[start, end) tokens."""

_Group = tuple[_Range, _Range, tuple[int, int] | None]
"""What the checksum covers, what is copied, and (block, checksum) where one is known."""


def _groups(
    layer: int, start: int, end: int, source: Source, memory: ProducerMemory
) -> list[_Group]:
    """Divide rows [start, end) by pool blocks where these have checksums; else leave them whole."""
    layout, sums = memory.block_layout, memory.sums
    if source.kind is not SourceKind.POOL or layout is None or sums is None:
        return [((start, end), (start, end), None)]
    size = layout.block_tokens
    span = layer * layout.spec.num_shards + source.shard
    groups: list[_Group] = []
    for at, first in enumerate(range(start - start % size, end, size)):
        block = source.blocks[at]
        copied = (max(start, first), min(end, first + size))
        known = sums.get(span, block)
        if known is not None and copied[1] <= first + known.tokens <= first + size:
            groups.append(((first, first + known.tokens), copied, (block, known.crc)))
        else:
            groups.append((copied, copied, None))
    return groups


def _source_parts(
    layer: int, start: int, source: Source, memory: ProducerMemory
) -> list[tuple[str, Mapping, BlockRows]]:
    device = memory.device_layout
    first = start - start % device.block_tokens
    wanted = (
        {span.part for span in memory.block_layout.spans(layer, source.shard)}
        if memory.block_layout is not None
        else None
    )
    found: list[tuple[str, Mapping, BlockRows]] = []
    if source.kind is SourceKind.SLOT:
        slot = source.ref.slot
        base = device.slot_offsets[slot]
        for area in device.kinds[device.slot_kinds[slot]]:
            if wanted is not None and area.part not in wanted:
                continue
            stride = device.block_tokens * area.row_bytes
            rows = BlockRows(
                base + area.offset,
                stride,
                device.block_tokens,
                area.row_bytes,
                source.blocks,
                first,
            )
            found.append((area.part, memory.device, rows))
        return found
    layout = memory.block_layout
    if memory.pool is None or layout is None:
        raise ValueError("the producer has no pool")
    first = start - start % layout.block_tokens
    for span in layout.spans(layer, source.shard):
        rows = BlockRows(
            span.offset, layout.stride, layout.block_tokens, span.row_bytes, source.blocks, first
        )
        found.append((span.part, memory.pool, rows))
    return found


def _to_destination(
    part: str,
    layer: int,
    groups: list[_Group],
    source: tuple[Mapping, BlockRows],
    to: Destination,
) -> list[Piece]:
    src, rows = source
    size = to.layout.block_tokens
    targets: list[tuple[Mapping, int]] = []
    if part == MAIN_PART:
        targets.append((to.region, to.layout.row_offset(layer, 0, 0)))
    else:
        for resident in to.residents:
            for kept in resident.parts:
                if kept.part == part and layer in kept.layers:
                    targets.append((resident.device, kept.layers[layer]))
        if not targets:
            raise ValueError(f"part {part} has no destination")
    if part == MAIN_PART and rows.row_bytes != to.layout.row_bytes:
        raise ValueError(f"rows of {rows.row_bytes} bytes do not fit rows of {to.layout.row_bytes}")
    pieces = []
    for number, (dst, base) in enumerate(targets):
        into = BlockRows(
            base, size * rows.row_bytes, size, rows.row_bytes, to.blocks, to.first_token
        )
        # The checksum runs over each part once, however many ranks get it.
        summed = number == 0 and any(known for _, _, known in groups)
        pieces.append(Piece(dst, src, _spans(groups, into, rows, summed=summed)))
    return pieces


def _spans(groups: list[_Group], into: BlockRows, rows: BlockRows, *, summed: bool) -> CopySpans:
    if summed:
        with_sums = SummedSpans()
        for covered, copied, _ in groups:
            add_group(with_sums, covered, copied, [(into, rows)])
        return with_sums
    spans = CopySpans()
    for _, (start, end), _ in groups:
        add_rows(spans, start, end, into, rows)
    return spans
