"""A worker's ring of layer buffers on its device: the plan, its memory, and what lies where.

`kvd.plan.ring` decides which layer lives in which slot; here the plan becomes device memory that
kvd can map (CPU device) and addresses for copies.
"""

from __future__ import annotations

from kvd.plan.layout import BlockLayout, slot_areas
from kvd.plan.ring import RingPlan
from kvd.plan.runs import BlockRows
from kvd.wire.layout import DeviceLayout, ResidentPart, SlotArea


def device_layout(ring: RingPlan) -> tuple[DeviceLayout, int]:
    """Lay the ring's buffers out one after another.

    Returns: the layout to announce at hello, and the bytes that it takes.
    """
    kinds: list[list[SlotArea]] = []
    kind_of: dict[tuple[SlotArea, ...], int] = {}
    offsets: list[int] = []
    slot_kinds: list[int] = []
    total = 0
    for index, slot in enumerate(ring.slots):
        areas = slot_areas(slot.parts, ring.num_blocks, ring.block_tokens)
        if areas not in kind_of:
            kind_of[areas] = len(kinds)
            kinds.append(list(areas))
        offsets.append(total)
        slot_kinds.append(kind_of[areas])
        total += ring.bytes_of(index)
    return DeviceLayout(ring.block_tokens, ring.num_blocks, offsets, slot_kinds, kinds), total


def slot_rows(
    layout: DeviceLayout, slot: int, part: str, device_blocks: tuple[int, ...]
) -> BlockRows:
    """Rows of one part of a sequence in a slot; device_blocks[0] holds token 0.

    Raises: KeyError for a part that the slot does not have.
    """
    for area in layout.kinds[layout.slot_kinds[slot]]:
        if area.part == part:
            return BlockRows(
                layout.slot_offsets[slot] + area.offset,
                layout.block_tokens * area.row_bytes,
                layout.block_tokens,
                area.row_bytes,
                device_blocks,
            )
    raise KeyError(part)


def pool_rows(
    layout: BlockLayout, layer: int, shard: int, part: str, pool_blocks: tuple[int, ...]
) -> BlockRows:
    """Rows of one part of a sequence in the pool; pool_blocks[0] holds token 0.

    Raises: KeyError for a part that the layer does not have.
    """
    for span in layout.spans(layer, shard):
        if span.part == part:
            return BlockRows(
                span.offset, layout.stride, layout.block_tokens, span.row_bytes, pool_blocks
            )
    raise KeyError(part)


def resident_part(
    part: str, row_bytes: int, layers: list[int], num_blocks: int, block_tokens: int, base: int
) -> tuple[ResidentPart, int]:
    """Lay out a part that a decode member keeps on the device for all its blocks.

    Args:
        layers: the layers that have the part.
        base: where its memory begins.
    Returns: the part to announce, and where its memory ends.
    """
    per_layer = num_blocks * block_tokens * row_bytes
    starts = {layer: base + at * per_layer for at, layer in enumerate(layers)}
    return ResidentPart(part, row_bytes, starts), base + len(layers) * per_layer
