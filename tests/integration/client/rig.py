"""What the tests of client and daemon share: a layout, and a block's way into the pool."""

from __future__ import annotations

from collections.abc import Callable

from engine_shim.client import KvdClient
from kvd.wire.layout import BlockLayoutSpec, Part
from kvd.wire.slot_items import SaveItem

TOKENS = 4
ROW = 16
LAYOUT = BlockLayoutSpec("model", "f16", TOKENS, [[Part("main", ROW)]] * 2)
"""Two layers; a span has 64 bytes, a block two spans."""

Connect = Callable[..., KvdClient]


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def save_block(client: KvdClient, request: str, number: int) -> int:
    """Reserve a block, fill both layers through a slot, commit it."""
    assert client.pool is not None
    (block,) = client.reserve(request, 1)
    for layer in range(2):
        tenancy = client.slots.acquire(layer, layer)
        client.slots.written(tenancy, layer, [SaveItem("s", [block], [TOKENS])])
        client.slots.save_started(tenancy, "s")
        rows = bytes([number + layer]) * TOKENS * ROW
        client.pool.write_bytes(block * client.block_stride + layer * 64, rows)
        client.slots.save_ended(tenancy, "s", True, [TOKENS])
        client.slots.computed(tenancy)
    assert client.commit([block], [digest(number)], [TOKENS]) == [""]
    client.flush()
    return block
