"""Which memory holds what with sparse decode offload, and what the start table says of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from engine_shim.vllm.engine_plan import CacheSpec, EngineShape
from engine_shim.vllm.errors import OptionError, PlanError
from engine_shim.vllm.options import parse_options
from engine_shim.vllm.sparse_options import KEY
from engine_shim.vllm.sparse_plan import (
    ALIAS_STRIDE,
    SparsePlan,
    SparsePlanner,
    SparseShape,
    scratch_rows,
)
from engine_shim.vllm.sparse_table import about, start_table
from tests.unit.engine_shim.vllm.plans import TOKENS, indexer, main

SHAPE = EngineShape("tiny", "uint8", TOKENS, 1, max_len=32, max_seqs=2)
SPARSE = SparseShape(index_topk=4, width=1)
BLOCK = 64 * TOKENS  # bytes of a layer's main rows
GIB = 1 << 30


def caches(*with_indexer: int, layers: int = 4) -> list[CacheSpec]:
    """Layers of which some have an indexer."""
    return [main(at) for at in range(layers)] + [indexer(at) for at in with_indexer]


def planner(
    *with_indexer: int, shape: EngineShape = SHAPE, sparse: SparseShape = SPARSE, **given: object
) -> SparsePlanner:
    """A planner with some options."""
    config = {"enabled": True, "topk_buffer_size": 8, "dram_size_per_dp_GB": 1, **given}
    options = parse_options({KEY: config})
    return SparsePlanner(options, shape, sparse, caches(*(with_indexer or (0, 1, 2, 3))))


def hot_bytes(layers: int = 4) -> int:
    """Two hot buffers of 8 rows of 64 bytes in each layer, without scratch rows."""
    return 2 * layers * 8 * 64


def device_bytes(blocks: int, per_block: int) -> int:
    """Memory for just so many blocks."""
    return hot_bytes() + BLOCK + 2 * 64 * 4 + blocks * per_block


def test_blocks_are_bounded_by_the_device_s_indexer_keys() -> None:
    plan = planner().plan(device_bytes(50, 4 * 16 * TOKENS + ALIAS_STRIDE))
    assert (plan.num_blocks, plan.limit) == (50, "device memory")
    assert plan.region.num_bytes == 50 * 4 * BLOCK


def test_blocks_are_never_beyond_the_region() -> None:
    size = 20 * 4 * BLOCK + 100
    plan = planner(dram_size_per_dp_GB=size / GIB).plan(1 << 20)
    assert (plan.num_blocks, plan.limit) == (20, "dram_size_per_dp_GB")
    for override, blocks, limit in (
        (30, 20, "dram_size_per_dp_GB"),
        (15, 15, "num_gpu_blocks_override"),
    ):
        shape = replace(SHAPE, device_blocks_override=override)
        plan = planner(shape=shape, dram_size_per_dp_GB=size / GIB).plan(1 << 20)
        assert (plan.num_blocks, plan.limit) == (blocks, limit)


def test_one_sequence_must_fit_and_the_remedy_is_enough() -> None:
    need = 9 * 4 * BLOCK  # eight blocks of a sequence and the null block
    assert planner(dram_size_per_dp_GB=need / GIB).plan(1 << 20).num_blocks == 9
    with pytest.raises(PlanError, match=r"allows 28 tokens; set .*dram_size_per_dp_GB to "):
        planner(dram_size_per_dp_GB=(need - 1) / GIB).plan(1 << 20)
    with pytest.raises(PlanError, match=r"device memory allows 28 tokens; give more memory"):
        planner().plan(device_bytes(8, 4 * 16 * TOKENS + ALIAS_STRIDE))
    with pytest.raises(PlanError, match=r"hot buffers .* leave nothing .*topk_buffer_size \(8\)"):
        planner().plan(hot_bytes())


def test_caches_do_not_overlap_but_for_the_main_ones() -> None:
    plan = planner().plan(1 << 20)
    placed, size = plan.placements()
    mains = {placed[name] for name in plan.layer_of()}
    assert len(mains) == 1
    (alias,) = mains
    assert alias.block_stride == ALIAS_STRIDE
    ends = [(at.offset, at.offset + at.page * plan.num_blocks) for at in placed.values()]
    rest = sorted(ends[at] for at, name in enumerate(placed) if name not in plan.layer_of())
    for (_, end), (start, _) in pairwise([*rest, (alias.offset, size)]):
        assert end <= start
    assert alias.offset + ALIAS_STRIDE * (plan.num_blocks - 1) + alias.page <= size
    assert size + plan.hot.num_bytes <= 1 << 20


def test_debugging_keeps_all_caches_apart() -> None:
    plan = planner(keep_device_kv_cache=True).plan(1 << 20)
    placed, size = plan.placements()
    spans = sorted((at.offset, at.offset + at.page * plan.num_blocks) for at in placed.values())
    for (_, end), (start, _) in pairwise(spans):
        assert end <= start
    assert spans[-1][1] <= size
    assert size + plan.hot.num_bytes <= 1 << 20
    assert "debug" in about(plan, "c")
    assert "debug" not in about(planner().plan(1 << 20), "c")


def test_layers_without_an_indexer_follow_the_one_before() -> None:
    assert planner(0, 2).plan(1 << 20).groups == ((0, 1), (2, 3))
    with pytest.raises(PlanError, match="no indexer and no layer before it"):
        planner(1, 2)


def test_slots_must_hold_a_selection_in_whole_blocks() -> None:
    with pytest.raises(OptionError, match=r"is 3, fewer than the 4 rows .* give 8"):
        planner(topk_buffer_size=3)
    with pytest.raises(OptionError, match=r"is 10, .*block size \(4 tokens\); give 12"):
        planner(topk_buffer_size=10)
    planner(topk_buffer_size=4)


@pytest.mark.parametrize(("key", "value"), [("offload", "rolling"), (None, 3)])
def test_shared_buffers_beside_it_are_refused(key: str | None, value: object) -> None:
    name = key or "layerwise_num_shared_buffers"
    options = parse_options({KEY: {"enabled": True}, name: value})
    with pytest.raises(OptionError, match=rf"{name} shares layer buffers.*give one of them"):
        SparsePlanner(options, SHAPE, SPARSE, caches(0))


def test_unusual_sizes_warn_with_figures() -> None:
    assert planner(topk_buffer_size=8).warning == ""
    assert planner(topk_buffer_size=8, sparse=SparseShape(3, 1)).warning == ""  # rounded to blocks
    few, many = planner(topk_buffer_size=4).warning, planner(topk_buffer_size=1024).warning
    assert "4 slots a layer are 0.0 MiB" in few
    assert "more are loaded" in few
    assert "1024 slots a layer are 0.2 MiB a hot buffer and 0.5 MiB for 2 sequences" in many
    assert "less device memory is left" in many


@pytest.mark.parametrize(
    ("slots", "topk", "width", "rows"),
    [(8, 4, 1, 0), (4, 4, 1, 1), (5, 4, 1, 0), (8, 4, 3, 7), (4, 4, 4, 16), (64, 4, 4, 0)],
)
def test_scratch_holds_what_finds_no_slot(slots: int, topk: int, width: int, rows: int) -> None:
    assert scratch_rows(slots, SparseShape(topk, width)) == rows


def test_table_names_what_bounds_the_blocks() -> None:
    plan: SparsePlan = planner(dram_size_per_dp_GB=20 * 4 * BLOCK / GIB).plan(1 << 20)
    table = start_table(plan)
    assert "blocks are bounded by dram_size_per_dp_GB" in table
    assert len({len(line) for line in table.splitlines()[1:]}) == 1
    assert "20 blocks" in about(plan, "c")["offload"]
