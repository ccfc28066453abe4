"""Any plan: caches lie apart unless their layers share a buffer, and nothing is promised twice."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_shim.vllm.engine_plan import CacheSpec, EnginePlan
from engine_shim.vllm.errors import PlanError
from kvd.plan.layout import BlockLayout
from tests.unit.engine_shim.vllm.plans import TOKENS, indexer, main, planner, shaped

BUDGET = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@st.composite
def models(draw: st.DrawFn) -> list[CacheSpec]:
    rows = draw(st.lists(st.sampled_from([16, 64, 576]), min_size=1, max_size=12))
    caches = [main(2 * layer + 1, row) for layer, row in enumerate(rows)]
    keyed = draw(st.sets(st.integers(0, len(rows) - 1)))
    caches += [indexer(2 * layer + 1) for layer in keyed]
    return draw(st.permutations(caches))


@st.composite
def plans(draw: st.DrawFn) -> tuple[EnginePlan, int, int]:
    caches = draw(models())
    count = len({cache.layer for cache in caches})
    made = planner(
        caches,
        shaped(max_len=draw(st.integers(1, 64)), shards=draw(st.integers(1, 2))),
        offload=draw(st.sampled_from(["auto", "rolling", "resident"])),
        num_shared=draw(st.one_of(st.none(), st.integers(1, count + 1))),
        independent=tuple(draw(st.sets(st.integers(-count, count - 1), max_size=3))),
        spare_buffers=draw(st.integers(0, 2)),
    )
    size = draw(st.integers(1 << 17, 1 << 20))
    pool = draw(st.integers(1, 400))
    try:
        return made.plan(size, pool), size, pool
    except PlanError:
        return made.plan(1 << 26, 1 << 16), 1 << 26, 1 << 16


@BUDGET
@given(plans())
def test_no_more_than_there_is(found: tuple[EnginePlan, int, int]) -> None:
    plan, size, pool = found
    layout, total = plan.device()
    assert total == plan.ring.device_bytes <= size
    assert layout.num_blocks == plan.num_blocks
    if plan.mode == "rolling":
        assert plan.num_blocks <= pool + 1
        assert plan.ring.reuse
    else:
        assert plan.num_blocks == plan.stock_blocks
        assert not plan.ring.reuse


@BUDGET
@given(plans())
def test_caches_lie_apart_unless_their_layers_share_a_buffer(
    found: tuple[EnginePlan, int, int],
) -> None:
    plan, _, _ = found
    _, total = plan.device()
    areas = {}
    for layer, (caches, parts) in enumerate(zip(plan.names, plan.ring.layers, strict=True)):
        for (part, name), declared in zip(caches, parts, strict=True):
            offset, page = plan.placements()[name]
            assert part == declared.name
            assert page == declared.row_bytes * TOKENS
            assert offset % 64 == 0
            assert offset >= 0
            assert offset + page * plan.num_blocks <= total
            areas[layer, part] = (offset, offset + page * plan.num_blocks)
    for ((layer, part), one), ((other, its), two) in combinations(areas.items(), 2):
        if plan.ring.slot_of[layer] == plan.ring.slot_of[other] and part == its:
            assert one == two
        else:
            assert one[1] <= two[0] or two[1] <= one[0], (layer, part, other, its)


@BUDGET
@given(plans(), st.data())
def test_spares_lie_apart_from_everything_else(
    found: tuple[EnginePlan, int, int], data: st.DataObject
) -> None:
    """A layer that moves to a spare shares bytes with no layer of another buffer."""
    plan, _, _ = found
    if not plan.ring.spares:
        return
    spare = data.draw(st.sampled_from(plan.ring.spares))
    bucket = plan.ring.slots[spare].bucket
    bad = next(
        at for at, slot in enumerate(plan.ring.slots) if slot.bucket == bucket and not slot.bound
    )
    ring = plan.ring.rebind(bad, spare)
    before, after = plan.placements(), plan.placements(ring.slot_of)
    stay = {
        (before[name][0], before[name][0] + before[name][1] * plan.num_blocks)
        for layer, caches in enumerate(plan.names)
        if plan.ring.slot_of[layer] != bad
        for _, name in caches
    }
    for layer in plan.ring.slots[bad].layers:
        for _, name in plan.names[layer]:
            begin, page = after[name]
            assert all(begin + page * plan.num_blocks <= low or high <= begin for low, high in stay)


@BUDGET
@given(plans())
def test_the_pool_has_every_part_of_every_layer(found: tuple[EnginePlan, int, int]) -> None:
    plan, _, _ = found
    blocks = BlockLayout(plan.layout)
    for layer, parts in enumerate(plan.ring.layers):
        for shard in range(plan.layout.num_shards):
            assert [(span.part, span.row_bytes) for span in blocks.spans(layer, shard)] == [
                (part.name, part.row_bytes) for part in parts
            ]
