"""Which layer lives where, how many blocks fit, and what is refused with which words."""

from __future__ import annotations

import pytest

from engine_shim.vllm.engine_plan import EnginePlan, block_bytes, layers_of
from engine_shim.vllm.errors import OptionError, PlanError
from tests.unit.engine_shim.vllm.plans import (
    TOKENS,
    device_bytes,
    indexer,
    main,
    mains,
    plan,
    planner,
    shaped,
    slots_of,
)

# Placement, as the guide's planner places -----------------------------------------------------


def test_six_layers_on_two_buffers() -> None:
    made = plan(mains(6), num_shared=2)
    assert slots_of(made) == [(0,), (1, 3, 5), (2, 4)]
    assert [slot.bound for slot in made.ring.slots] == [True, False, False, False]
    assert made.ring.spares == (3,)


def test_twenty_seven_layers_on_six_buffers() -> None:
    found = slots_of(plan(mains(27), num_shared=6))
    assert found[:3] == [(0,), (1, 7, 13, 19, 25), (2, 8, 14, 20, 26)]
    assert len(found) == 7


def test_a_draft_layer_joins_after_the_base_layers() -> None:
    made = plan([*mains(4), main(4, is_draft=True)], num_shared=2)
    assert slots_of(made) == [(0,), (1, 3), (2, 4)]
    assert made.draft_layers == (4,)


def test_without_a_number_of_buffers_nothing_is_shared() -> None:
    made = plan(mains(27), offload="auto")
    assert slots_of(made) == [(layer,) for layer in range(27)]
    assert made.mode == "resident"
    assert made.why == "layerwise_num_shared_buffers is not given: nothing is shared"
    assert made.ring.spares == ()


@pytest.mark.parametrize(
    ("independent", "bound"),
    [((), []), ((0,), [0]), ((0, -1), [0, 5]), ((-6,), [0]), ((2, 2, -4), [2]), ((5, 0), [0, 5])],
)
def test_independent_layers_go_by_position(independent: tuple[int, ...], bound: list[int]) -> None:
    made = plan(mains(6), independent=independent, num_shared=2)
    assert [slot.layers[0] for slot in made.ring.slots if slot.bound] == bound


def test_positions_do_not_depend_on_the_engine_s_numbers_or_order() -> None:
    """Layers without a cache leave gaps; caches come in any order."""
    caches = [main(7), indexer(3), main(3), main(5), main(9)]
    made = plan(caches, independent=(0, -1), num_shared=1)
    assert made.layer_of() == {
        "layers.3.attn": 0,
        "layers.5.attn": 1,
        "layers.7.attn": 2,
        "layers.9.attn": 3,
    }
    assert slots_of(made) == [(0,), (3,), (1, 2)]
    assert made.names[0] == (("main", "layers.3.attn"), ("indexer", "layers.3.indexer"))


def test_layers_of_two_sizes_are_two_buckets() -> None:
    caches = [main(layer, 64 if layer % 2 else 32) for layer in range(8)]
    made = plan(caches, independent=(), num_shared=2)
    assert slots_of(made) == [(0, 4), (2, 6), (1, 5), (3, 7)]
    assert len(made.ring.spares) == 2, "one for each bucket"


def test_indexers_follow_their_main_cache_into_one_place_a_buffer() -> None:
    caches = [*mains(5), indexer(1), indexer(3)]
    made = plan(caches, num_shared=2)
    assert slots_of(made) == [(0,), (1, 3), (2, 4)]
    placed = made.placements()
    assert placed["layers.1.indexer"] == placed["layers.3.indexer"]
    assert [len(slot.parts) for slot in made.ring.slots] == [1, 2, 2, 2]


@pytest.mark.parametrize("spares", [0, 1, 3])
def test_spares_are_there_for_each_bucket_that_shares(spares: int) -> None:
    made = plan(mains(6), num_shared=2, spare_buffers=spares)
    assert len(made.ring.spares) == spares
    assert len(made.ring.slots) == 3 + spares


def test_a_moved_layer_lies_in_the_spare() -> None:
    made = plan(mains(6), num_shared=2)
    slot_of = list(made.ring.rebind(1, 3).slot_of)
    placed, moved = made.placements(), made.placements(slot_of)
    layout, _ = made.device()
    assert moved["layers.1.attn"] == (layout.slot_offsets[3], 64 * TOKENS)
    assert moved["layers.2.attn"] == placed["layers.2.attn"]


def test_blocks_are_moved_whole_when_one_cache_is_opaque() -> None:
    assert not plan(mains(3), num_shared=1).opaque
    assert plan([*mains(2), main(2, rows=False)], num_shared=1).opaque
    assert plan([*mains(3), indexer(1)], num_shared=1).opaque


# How much fits --------------------------------------------------------------------------------


def test_memory_bounds_the_number_of_blocks() -> None:
    made = plan(mains(8), blocks=40, num_shared=2)
    assert made.limit == "device memory"
    assert made.stock_blocks == 40
    assert made.num_blocks == (40 * 8 + 8 * 65 // 4 - 4 * 65 // 4) // 4


def test_the_pool_bounds_the_number_of_blocks() -> None:
    """Block 0 is the engine's null block, which needs no place in the pool."""
    made = plan(mains(8), blocks=40, pool_blocks=20, num_shared=2)
    assert (made.num_blocks, made.limit) == (21, "pool bytes")


def test_the_pool_does_not_bound_an_engine_whose_device_holds_everything() -> None:
    made = plan(mains(8), blocks=40, pool_blocks=20, offload="resident")
    assert (made.num_blocks, made.limit) == (40, "device memory")
    assert made.why == "offload is resident"


@pytest.mark.parametrize(("override", "pool", "blocks"), [(30, 1000, 30), (30, 12, 13)])
def test_the_user_s_number_of_blocks_counts(override: int, pool: int, blocks: int) -> None:
    shape = shaped(device_blocks_override=override)
    made = plan(mains(8), shape=shape, pool_blocks=pool, num_shared=2)
    assert made.num_blocks == blocks
    assert made.limit == ("pool bytes" if pool < override else "num_gpu_blocks_override")


def test_one_more_block_takes_its_rows_in_every_buffer() -> None:
    made = plan([*mains(6), indexer(2)], num_shared=2)
    more = made.with_blocks(made.num_blocks + 64)
    assert more.ring.device_bytes - made.ring.device_bytes == 64 * block_bytes(made.ring)


# Which mode -----------------------------------------------------------------------------------

NEEDED = 4 * 32 // TOKENS
"""Blocks of max_seqs sequences of max_len tokens."""


def test_auto_is_resident_while_everything_fits() -> None:
    made = plan(mains(8), blocks=NEEDED + 1, offload="auto", num_shared=2)
    assert (made.mode, made.num_blocks) == ("resident", NEEDED + 1)
    assert made.why == "4 sequences of 32 tokens fit without sharing buffers"


def test_auto_is_rolling_from_the_first_block_that_does_not_fit() -> None:
    made = plan(mains(8), blocks=NEEDED, offload="auto", num_shared=2)
    assert made.mode == "rolling"
    assert (
        made.why == f"4 sequences of 32 tokens need {NEEDED} blocks, {NEEDED} fit without sharing"
    )


def test_rolling_has_three_buffers_when_their_number_is_not_given() -> None:
    made = plan(mains(8))
    assert (made.mode, made.why) == ("rolling", "offload is rolling")
    assert len(slots_of(made)) == 4


@pytest.mark.parametrize("offload", ["auto", "rolling"])
def test_all_layers_independent_is_resident(offload: str) -> None:
    made = plan(mains(8), blocks=20, offload=offload, independent="all", num_shared=2)
    assert (made.mode, made.limit) == ("resident", "device memory")
    assert made.why == 'layerwise_independent_layers is "all": no buffer is shared'


@pytest.mark.parametrize("num_shared", [5, 6, 1024])
def test_as_many_buffers_as_layers_is_resident(num_shared: int) -> None:
    made = plan(mains(6), num_shared=num_shared)
    assert made.mode == "resident"
    assert made.why == "6 layers have 6 buffers: every layer has a buffer of its own"


@pytest.mark.parametrize("num_shared", [1, 2, 3, 4])
def test_fewer_buffers_give_more_blocks(num_shared: int) -> None:
    made = plan(mains(16), blocks=40, num_shared=num_shared, spare_buffers=0)
    assert made.mode == "rolling"
    assert len(slots_of(made)) == 1 + num_shared
    assert made.num_blocks >= 40 * 16 // (1 + num_shared)


# What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "blocks", "pool", "override", "said"),
    [
        ({}, 4, 99, 0, "device memory allows 20 tokens; give more memory for KV, share more"),
        ({}, 40, 7, 0, "pool bytes allows 28 tokens; enlarge pool.size of kvd, or lower"),
        ({}, 40, 99, 8, "num_gpu_blocks_override allows 28 tokens; raise num_gpu_blocks_override"),
        ({"offload": "resident"}, 0, 99, 0, "device memory allows 0 tokens; give more memory"),
    ],
)
def test_one_sequence_must_fit(
    options: dict[str, object], blocks: int, pool: int, override: int, said: str
) -> None:
    shape = shaped(device_blocks_override=override)
    big = [main(layer, 1 << 14) for layer in range(8)]
    made = planner(big, shape, **{"num_shared": 3, **options})
    with pytest.raises(PlanError) as caught:
        made.plan(device_bytes(made, blocks), pool)
    begin = "one sequence of max_model_len = 32 tokens does not fit: "
    assert str(caught.value).startswith(begin + said)
    assert str(caught.value).endswith("or lower max_model_len")


def test_one_sequence_that_fits_just_so() -> None:
    assert plan(mains(8), pool_blocks=8, num_shared=2).num_blocks == 9


def test_caches_that_cannot_be_placed_are_refused() -> None:
    with pytest.raises(PlanError, match=r"the model has no KV cache"):
        layers_of([], TOKENS)
    with pytest.raises(PlanError, match=r"layers\.1\.indexer has no main cache beside it"):
        layers_of([main(0), indexer(1)], TOKENS)
    with pytest.raises(PlanError, match=r"layer 0 has two caches of part main: .* not supported"):
        layers_of([main(0), main(0, 32)], TOKENS)
    with pytest.raises(PlanError, match=r"blocks of 65 bytes for 4 tokens: padded pages"):
        layers_of([main(0, 65, tokens=1)], TOKENS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"independent": (6,)}, "layerwise_independent_layers: layer 6 is outside [-6, 5]"),
        ({"independent": (-7,)}, "layerwise_independent_layers: layer -7 is outside [-6, 5]"),
        (
            {"prefetch": 6},
            "onload_layer_map (or layerwise_prefetch_layers) of layer 0 is 6, outside [0, 5]",
        ),
        (
            {"onload_map": (0, 0, 9, 0, 0, 0)},
            "onload_layer_map (or layerwise_prefetch_layers) of layer 2 is 9, outside [0, 5]",
        ),
        (
            {"onload_map": (1, 1)},
            "onload_layer_map needs 6 entries, one for each layer, got 2",
        ),
    ],
)
def test_options_that_do_not_fit_the_model_are_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        plan(mains(6), **options)  # type: ignore[arg-type]
    assert str(caught.value) == f"kv_connector_extra_config.{said}"


def test_indexers_of_two_sizes_cannot_share_a_buffer() -> None:
    """That is the model's fault, no option's."""
    caches = [*mains(6), indexer(1, 16), indexer(2, 32)]
    with pytest.raises(PlanError, match=r"part indexer has rows of different sizes in one bucket"):
        plan(caches, num_shared=2)
    made: EnginePlan = plan(caches, offload="resident")
    assert made.mode == "resident"
