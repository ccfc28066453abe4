"""How a member describes its memory: the layout of blocks, of its slots, of resident parts.

Sizes are bytes, counts are tokens or blocks. `kvd.plan.layout` computes offsets from these.
"""

from __future__ import annotations

import msgspec

from kvd.wire.protocol import Name, Positive, RequestName, Unsigned


class Part(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One kind of row of a layer: `main`, `indexer`, `scale`, ...; bytes of one token's row."""

    name: Name
    row_bytes: Positive


class BlockLayoutSpec(msgspec.Struct, array_like=True, frozen=True):
    """How a pool block divides: spans in (layer, part, shard) order.

    layers: for each layer the parts of one token.
    num_shards: ranks that contribute a span of their own to every layer (MLA: 1).
    """

    model: RequestName
    dtype: Name
    block_tokens: Positive
    layers: list[list[Part]]
    num_shards: Positive = 1
    plan_version: Unsigned = 1
    tenant: RequestName = "default"


class SlotArea(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Rows of one part in a slot: row r of device block b is at
    offset + (b * block_tokens + r) * row_bytes, counted from the slot's start.
    """

    part: Name
    offset: Unsigned
    row_bytes: Positive


class DeviceLayout(msgspec.Struct, array_like=True, frozen=True):
    """Where a worker member's slots lie in the memory that it passed at attach.

    slot_offsets: start of each slot; slot_kinds: index into `kinds` for each slot.
    kinds: the areas of a slot of that kind, one for each part.
    num_blocks: device blocks that every slot holds.
    """

    block_tokens: Positive
    num_blocks: Positive
    slot_offsets: list[Unsigned]
    slot_kinds: list[Unsigned]
    kinds: list[list[SlotArea]]


class ResidentPart(msgspec.Struct, array_like=True, frozen=True):
    """Rows of a part that a decode member keeps on the device for all blocks of a layer.

    layers: layer -> offset in the member's memory of block 0; rows follow by engine block id.
    """

    part: Name
    row_bytes: Positive
    layers: dict[int, Unsigned]
