"""Plans of a layer that are made of another layer's: the same as those that are made anew."""

from __future__ import annotations

import random

import pytest

from engine_shim.layer_rows import LayerRows
from engine_shim.ring import device_layout
from engine_shim.steps import StepRequest
from kvd.plan.layout import BlockLayout
from kvd.plan.ring import plan_ring
from kvd.wire.layout import BlockLayoutSpec, Part

TOKENS = 4
BLOCKS = 12

MAIN = [Part("main", 8)]
TWO = [Part("main", 8), Part("indexer", 2)]
WIDE = [Part("main", 16)]


@pytest.mark.parametrize(
    "layers",
    [
        [MAIN] * 6,
        [TWO] * 6,
        [MAIN, TWO, TWO, MAIN, TWO, MAIN],
        [MAIN, WIDE, MAIN, WIDE, WIDE, TWO],
    ],
)
@pytest.mark.parametrize("independent", [(), (0, 3)])
def test_a_plan_that_is_moved_is_the_plan_of_the_layer(
    layers: list[list[Part]], independent: tuple[int, ...]
) -> None:
    """Whatever layers and slots follow one another, alike or otherwise laid out."""
    blocks = BlockLayout(BlockLayoutSpec("model", "uint8", TOKENS, layers, 2))
    ring = plan_ring(
        [tuple(parts) for parts in layers],
        independent=independent,
        num_shared=2,
        num_blocks=BLOCKS,
        block_tokens=TOKENS,
        lookahead=1,
    )
    layout, _ = device_layout(ring)
    draw = random.Random(len(layers) + len(independent))
    rows = LayerRows(layout, blocks, 1)
    for _ in range(20):
        requests = some_requests(draw)
        missing = [(request, draw.randrange(request.num_computed + 1)) for request in requests]
        for layer in draw.choices(range(len(layers)), k=8):
            slot, anew = ring.slot_of[layer], LayerRows(layout, blocks, 1)
            saved = rows.save_plan(layer, slot, requests, "off")
            expected = anew.save_plan(layer, slot, requests, "off")
            assert saved.plain.buffer == expected.plain.buffer
            assert saved.num_bytes == expected.num_bytes
            loaded = rows.load_plan(layer, slot, missing, None)
            assert loaded.plain.buffer == anew.load_plan(layer, slot, missing, None).plain.buffer


def some_requests(draw: random.Random) -> tuple[StepRequest, ...]:
    """Two requests, their blocks in any order on both sides."""
    device = draw.sample(range(BLOCKS), BLOCKS)
    pool = draw.sample(range(4 * BLOCKS), BLOCKS)
    requests = []
    for at in range(2):
        end = draw.randrange(1, BLOCKS // 2 * TOKENS + 1)
        own = slice(at * BLOCKS // 2, (at + 1) * BLOCKS // 2)
        start = draw.randrange(end)
        requests.append(StepRequest(f"r{at}", tuple(device[own]), tuple(pool[own]), start, end))
    return tuple(requests)
