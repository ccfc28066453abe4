"""Offsets and sizes of everything that holds rows.

A *row* is one token's bytes of one part of one layer. A pool block holds `block_tokens` rows of
every (layer, part, shard), spans in that order, each aligned to 64 bytes, so that no two spans
share a cache line and every copy starts aligned.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import msgspec

from kvd.wire.layout import BlockLayoutSpec, DeviceLayout, Part, SlotArea

SPAN_ALIGN: Final = 64
"""Bytes; one cache line."""

PAGE_ALIGN: Final = 4096
"""Bytes; slots start on a page so that they can be mapped and advised alone."""


def align_up(value: int, to: int) -> int:
    """The smallest multiple of `to` that is at least `value`."""
    return -(-value // to) * to


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one (layer, part, shard) in a block: byte offset, and bytes of a row."""

    part: str
    offset: int
    row_bytes: int


class BlockLayout:
    """Where everything is in a pool block.

    stride: bytes from one block to the next.
    """

    def __init__(self, spec: BlockLayoutSpec) -> None:
        """Lay a block out.

        Raises: ValueError for a layer without parts or with a part twice.
        """
        self.spec = spec
        self.block_tokens = spec.block_tokens
        self._spans: dict[tuple[int, int], tuple[Span, ...]] = {}
        offset = 0
        for layer, parts in enumerate(spec.layers):
            if not parts or len({part.name for part in parts}) != len(parts):
                raise ValueError(f"layer {layer} needs parts with different names, got {parts}")
            rows: list[list[Span]] = [[] for _ in range(spec.num_shards)]
            for part in parts:
                for shard in range(spec.num_shards):
                    rows[shard].append(Span(part.name, offset, part.row_bytes))
                    offset = align_up(offset + part.row_bytes * spec.block_tokens, SPAN_ALIGN)
            for shard in range(spec.num_shards):
                self._spans[layer, shard] = tuple(rows[shard])
        if not spec.layers:
            raise ValueError("a block needs at least one layer")
        self.stride = offset

    @property
    def num_layers(self) -> int:
        """Layers of a block."""
        return len(self.spec.layers)

    def spans(self, layer: int, shard: int = 0) -> tuple[Span, ...]:
        """Spans of a layer's parts, in the order of its parts.

        Raises: KeyError for a layer or shard that the layout does not have.
        """
        return self._spans[layer, shard]

    @property
    def payload_bytes(self) -> int:
        """Bytes of rows in a block, without alignment."""
        per_token = sum(part.row_bytes for parts in self.spec.layers for part in parts)
        return per_token * self.spec.num_shards * self.block_tokens

    def digest(self) -> bytes:
        """32 bytes that name everything about the layout; part of every block's identity."""
        return hashlib.sha256(msgspec.msgpack.encode(self.spec)).digest()

    def describe(self) -> str:
        """The layout in a few words, for error texts."""
        spec = self.spec
        return (
            f"{spec.model} {spec.dtype}, {len(spec.layers)} layers, {spec.block_tokens} tokens a "
            f"block, {spec.num_shards} shard(s), plan {spec.plan_version}, tenant {spec.tenant}"
        )


def slot_areas(parts: tuple[Part, ...], num_blocks: int, block_tokens: int) -> tuple[SlotArea, ...]:
    """Areas of one slot: [part][device block][row], each area aligned to 64 bytes."""
    areas = []
    offset = 0
    for part in parts:
        areas.append(SlotArea(part.name, offset, part.row_bytes))
        offset = align_up(offset + part.row_bytes * num_blocks * block_tokens, SPAN_ALIGN)
    return tuple(areas)


def slot_bytes(parts: tuple[Part, ...], num_blocks: int, block_tokens: int) -> int:
    """Bytes of one slot, a multiple of the page size."""
    rows = num_blocks * block_tokens
    total = 0
    for part in parts:
        total = align_up(total + part.row_bytes * rows, SPAN_ALIGN)
    return align_up(total, PAGE_ALIGN)


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """A decode region: [layer][block][row], 64-bit everywhere."""

    num_layers: int
    num_blocks: int
    block_tokens: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Size of the region."""
        return self.num_layers * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer."""
        return self.num_blocks * self.block_tokens * self.row_bytes

    def row_offset(self, layer: int, block: int, row: int) -> int:
        """Byte offset of one row.

        Raises: IndexError outside the region.
        """
        if not (
            0 <= layer < self.num_layers
            and 0 <= block < self.num_blocks
            and 0 <= row < self.block_tokens
        ):
            raise IndexError(f"row ({layer}, {block}, {row}) is outside {self}")
        return layer * self.layer_bytes + (block * self.block_tokens + row) * self.row_bytes


def slot_row_offset(device: DeviceLayout, slot: int, area: SlotArea, block: int, row: int) -> int:
    """Byte offset of one row of a slot in the member's memory.

    Raises: IndexError outside the slot.
    """
    if not (0 <= slot < len(device.slot_offsets) and 0 <= block < device.num_blocks):
        raise IndexError(f"slot {slot} block {block} is outside the member's memory")
    index = block * device.block_tokens + row
    return device.slot_offsets[slot] + area.offset + index * area.row_bytes
