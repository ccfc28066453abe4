"""The `shm` transfer engine: both kvds on one host, rows copied once between mapped files.

What it can enforce: a granted read touches only files that the producer handed out, read-only; the
copy runs in this process, so it ends with it (the pidfd of this process is its fence).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvd.core.transfer_types import Source, SourceKind
from kvd.plan.layout import BlockLayout, RegionLayout
from kvd.plan.runs import BlockRows, CopySpans, add_rows
from kvd.wire.layout import DeviceLayout, ResidentPart
from kvd_kernels.host import Mapping, copy_spans

MAIN_PART = "main"


class CopyRefused(ValueError):
    """A read that cannot be copied as asked; its text goes into the transfer's failure."""


@dataclass(frozen=True, slots=True)
class ProducerMemory:
    """Where a producer's rows are: a member's slots, and the pool of its kvd."""

    device: Mapping
    device_layout: DeviceLayout
    pool: Mapping | None
    block_layout: BlockLayout | None


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


def plan_read(
    layer: int, start: int, end: int, source: Source, memory: ProducerMemory, to: Destination
) -> list[Piece]:
    """The copies of rows [start, end) of one layer, all parts.

    Raises: CopyRefused when the two sides do not fit each other.
    """
    try:
        pieces = []
        for part, src, rows in _source_parts(layer, start, source, memory):
            pieces.extend(_to_destination(part, layer, start, end, (src, rows), to))
    except (IndexError, KeyError, ValueError) as error:
        raise CopyRefused(f"layer {layer}: {error}") from error
    return pieces


def copy(pieces: list[Piece], kernel: str = "auto") -> int:
    """Perform the copies; returns the bytes moved. The interpreter lock is free meanwhile."""
    return sum(copy_spans(p.dst, p.src, p.spans.buffer, kernel=kernel) for p in pieces)


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
    start: int,
    end: int,
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
    pieces = []
    for dst, base in targets:
        spans = CopySpans()
        into = BlockRows(
            base, size * rows.row_bytes, size, rows.row_bytes, to.blocks, to.first_token
        )
        if part == MAIN_PART and rows.row_bytes != to.layout.row_bytes:
            raise ValueError(
                f"rows of {rows.row_bytes} bytes do not fit rows of {to.layout.row_bytes}"
            )
        add_rows(spans, start, end, into, rows)
        pieces.append(Piece(dst, src, spans))
    return pieces
