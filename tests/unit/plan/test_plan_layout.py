"""Blocks, slots and regions: offsets that nothing shares, and sizes that add up."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.plan.layout import (
    SPAN_ALIGN,
    BlockLayout,
    RegionLayout,
    slot_areas,
    slot_bytes,
    slot_row_offset,
)
from kvd.wire.layout import BlockLayoutSpec, DeviceLayout, Part


def spec(**changes: object) -> BlockLayoutSpec:
    values: dict[str, object] = {
        "model": "m",
        "dtype": "bf16",
        "block_tokens": 16,
        "layers": [[Part("main", 100), Part("indexer", 33)], [Part("main", 100)]],
        "num_shards": 2,
    }
    return BlockLayoutSpec(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [[], [[]], [[Part("main", 8), Part("main", 8)]]])
def test_a_layout_without_parts_or_with_a_part_twice_is_refused(layers: list[list[Part]]) -> None:
    with pytest.raises(ValueError, match="layer"):
        BlockLayout(spec(layers=layers))


def test_a_layer_or_shard_that_is_not_there_is_a_key_error() -> None:
    layout = BlockLayout(spec())
    for layer, shard in ((2, 0), (0, 2), (-1, 0)):
        with pytest.raises(KeyError):
            layout.spans(layer, shard)


PARTS = st.lists(
    st.tuples(st.sampled_from(["main", "indexer", "scale"]), st.integers(1, 3000)),
    min_size=1,
    max_size=3,
    unique_by=lambda part: part[0],
)


@given(st.lists(PARTS, min_size=1, max_size=6), st.integers(1, 200), st.integers(1, 4))
def test_spans_do_not_overlap_and_fill_the_block(
    layers: list[list[tuple[str, int]]], tokens: int, shards: int
) -> None:
    parts = [[Part(name, size) for name, size in layer] for layer in layers]
    layout = BlockLayout(spec(layers=parts, block_tokens=tokens, num_shards=shards))
    taken = sorted(
        (span.offset, span.offset + span.row_bytes * tokens)
        for layer in range(layout.num_layers)
        for shard in range(shards)
        for span in layout.spans(layer, shard)
    )
    assert taken[0][0] == 0
    assert taken[-1][1] <= layout.stride
    for (_, end), (start, _) in itertools.pairwise(taken):
        assert end <= start < end + SPAN_ALIGN
        assert start % SPAN_ALIGN == 0
    assert layout.payload_bytes == sum(end - start for start, end in taken)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "n"},
        {"dtype": "f32"},
        {"block_tokens": 32},
        {"layers": [[Part("main", 100)], [Part("main", 100)]]},
        {"num_shards": 1},
        {"plan_version": 2},
        {"tenant": "other"},
    ],
)
def test_everything_that_tells_blocks_apart_is_in_the_digest(changes: dict[str, object]) -> None:
    assert BlockLayout(spec()).digest() == BlockLayout(spec()).digest()
    assert BlockLayout(spec()).digest() != BlockLayout(spec(**changes)).digest()


def test_a_region_is_addressed_beyond_four_gibibytes() -> None:
    region = RegionLayout(num_layers=78, num_blocks=8192, block_tokens=128, row_bytes=1152)
    assert region.num_bytes == 78 * 8192 * 128 * 1152 > 1 << 36
    assert region.row_offset(77, 8191, 127) == region.num_bytes - 1152
    for layer, block, row in ((78, 0, 0), (0, 8192, 0), (0, 0, 128), (-1, 0, 0)):
        with pytest.raises(IndexError):
            region.row_offset(layer, block, row)


def test_rows_of_a_slot_follow_one_another_part_by_part() -> None:
    parts = (Part("main", 96), Part("indexer", 32))
    areas = slot_areas(parts, num_blocks=3, block_tokens=4)
    size = slot_bytes(parts, num_blocks=3, block_tokens=4)
    device = DeviceLayout(4, 3, [0, size], [0, 0], [list(areas)])
    offsets = [
        slot_row_offset(device, slot, area, block, row)
        for slot in range(2)
        for area in areas
        for block in range(3)
        for row in range(4)
    ]
    assert offsets == sorted(set(offsets))
    assert offsets[-1] + 32 <= 2 * size
    assert size % 4096 == 0
    with pytest.raises(IndexError):
        slot_row_offset(device, 2, areas[0], 0, 0)
    with pytest.raises(IndexError):
        slot_row_offset(device, 0, areas[0], 3, 0)
