"""Hot buffers with their bytes: what is refused, and where rows are."""

from __future__ import annotations

import array
import random
from collections.abc import Iterator

import pytest

from engine_shim.device_cpu import CpuDevice
from engine_shim.device_memory import MemfdMemory
from engine_shim.hot import HoleError, HotBuffers, HotOptions, NoHotBufferError
from engine_shim.hot_residency import ClockResidency
from kvd.plan.layout import RegionLayout
from tests.unit.engine_shim.hot_rig import GROUPS, ROW_BYTES, SECOND, HotRig


@pytest.fixture(params=[None, ClockResidency], ids=["native", "python"])
def world(request: pytest.FixtureRequest) -> Iterator[HotRig]:
    made = HotRig(books=request.param)
    yield made
    made.close()


@pytest.mark.parametrize(
    "groups", [[(0, 1)], [(0, 1), (1, 2)], [(1, 0), (2,)], [(0, 1, 2), ()], [(0, 1, 2, 3)]]
)
def test_groups_that_cannot_be(groups: list[tuple[int, ...]]) -> None:
    device, region = CpuDevice(), MemfdMemory(1 << 16, "region")
    layout = RegionLayout(3, 20, 4, ROW_BYTES)
    with pytest.raises(ValueError, match="give each of the 3 layers in one group, ascending"):
        HotBuffers(device, region.mapping, layout, groups, HotOptions(4, 8, 2))
    region.close()


def test_region_smaller_than_its_layout() -> None:
    device, region = CpuDevice(), MemfdMemory(100, "region")
    layout = RegionLayout(3, 20, 4, ROW_BYTES)
    with pytest.raises(ValueError, match="region has 100 bytes; give 3840"):
        HotBuffers(device, region.mapping, layout, GROUPS, HotOptions(4, 8, 2))
    device.stream("hot")  # its name is free: nothing was left
    device.close(SECOND)
    region.close()


@pytest.mark.parametrize("block", [-1, 20])
def test_block_outside_the_region(world: HotRig, block: int) -> None:
    with pytest.raises(ValueError, match=f"block is {block}; give 0 to 19"):
        world.hot.open("r", [0, block])
    handle = world.hot.open("r", [0])
    with pytest.raises(ValueError, match=f"block is {block}"):
        world.hot.extend(handle, [1, block])
    with pytest.raises(ValueError, match="not within the 4 tokens"):
        world.hot.landed(handle, 0, 0, 5)
    assert world.hot.statistics().free == 1


def test_rows_beyond_the_blocks(world: HotRig) -> None:
    handle = world.open("r", tokens=20)
    with pytest.raises(ValueError, match=r"rows \[20, 21\) are not within the 20 tokens"):
        world.hot.begin_step(handle, 0, 20, 21)
    world.hot.extend(handle, [9])
    world.step(handle, 0, 20, [20, 3])


@pytest.mark.parametrize(("start", "end"), [(-1, 1), (3, 3), (5, 4)])
def test_ranges_that_are_none(world: HotRig, start: int, end: int) -> None:
    handle = world.open("r")
    for call in (world.hot.begin_step, world.hot.landed):
        with pytest.raises(ValueError, match=rf"rows \[{start}, {end}\) are not within"):
            call(handle, 0, start, end)


@pytest.mark.parametrize("rows", [b"", b"x" * 15, b"x" * 17])
def test_rows_of_wrong_size(world: HotRig, rows: bytes) -> None:
    handle = world.open("r")
    world.hot.begin_step(handle, 0, 12, 13)
    for write in (world.hot.append, world.hot.land):
        with pytest.raises(ValueError, match=f"rows has {len(rows)} bytes; give a multiple"):
            write(handle, 0, 12, rows)
    assert world.hot.num_rows(handle, 0) == 12


def test_rows_that_are_not_of_the_step(world: HotRig) -> None:
    handle = world.open("r")
    with pytest.raises(ValueError, match=r"not of the running step \[0, 0\)"):
        world.append(handle, 0, 12)
    world.hot.begin_step(handle, 0, 12, 14)
    for start, count in ((11, 1), (11, 3), (13, 2), (14, 1)):
        with pytest.raises(ValueError, match=r"not of the running step \[12, 14\)"):
            world.append(handle, 0, start, count)
    assert world.hot.num_rows(handle, 0) == 12


def test_selection_without_a_step(world: HotRig) -> None:
    handle = world.open("r")
    with pytest.raises(ValueError, match="group 1 has no step"):
        world.hot.select(handle, 1, [[0]])


def test_closed_and_preempted_requests(world: HotRig) -> None:
    handle = world.open("r")
    world.hot.preempt(handle)
    world.hot.preempt(handle)
    for call in (
        lambda: world.hot.begin_step(handle, 0, 12, 13),
        lambda: world.hot.select(handle, 0, [[1]]),
        lambda: world.hot.buffer_of(handle),
    ):
        with pytest.raises(ValueError, match="is preempted; resume it first"):
            call()
    world.hot.close(handle)
    for call in (
        lambda: world.hot.resume(handle),
        lambda: world.hot.close(handle),
        lambda: world.hot.num_rows(handle, 0),
    ):
        with pytest.raises(ValueError, match="is closed; open the request again"):
            call()


def test_scratch_tile_too_small(world: HotRig) -> None:
    handle = world.open("r", tokens=16)
    world.begin(handle, 0, 16)
    with pytest.raises(ValueError, match=r"slots \(4\) and scratch_rows \(8\) hold fewer"):
        world.hot.select(handle, 0, [list(range(14))])
    assert [world.hot.slot_of(handle, 0, it) for it in range(17)] == [-1] * 17
    plan = world.step(handle, 0, 16, [*range(11), 16])
    assert len(plan.scratch) == 8


def test_requests_of_one_name_share_nothing(world: HotRig) -> None:
    first = world.open("same", first=0)
    world.step(first, 0, 12, [0, 1, 2])
    second = world.hot.open("same", [5, 6, 7, 8])
    assert second != first
    assert world.hot.buffer_of(second) != world.hot.buffer_of(first)
    assert world.hot.slot_of(second, 0, 0) == -1
    with pytest.raises(HoleError):
        world.hot.begin_step(second, 0, 12, 13)
    with pytest.raises(NoHotBufferError, match="preempt or close a request"):
        world.hot.open("third")
    world.hot.close(first)
    third = world.open("third", first=10)
    assert world.step(third, 0, 12, [0, 1, 2]).num_hits == 0


def test_row_landed_past_a_gap(world: HotRig) -> None:
    handle = world.open("r", tokens=3)
    with pytest.raises(HoleError, match="position 3 is not written but 4 is"):
        world.hot.landed(handle, 1, 4, 5)
    with pytest.raises(HoleError, match="position 3 is not written but 4 is"):
        world.hot.begin_step(handle, 0, 4, 5)
    assert world.hot.statistics().holes == 2
    assert world.hot.num_rows(handle, 1) == 3


def test_rows_that_were_never_written(world: HotRig) -> None:
    handle = world.open("r", tokens=3)
    world.hot.begin_step(handle, 0, 3, 5)
    world.append(handle, 0, 3)
    for hole in (4, 7):
        with pytest.raises(HoleError, match=f"layer 0: position {hole} is read but was never"):
            world.hot.select(handle, 0, [[0, hole]])
    assert world.hot.statistics().rows.selected == 0
    assert world.hot.slot_of(handle, 0, 0) == -1


def test_rejected_rows_must_be_written_again(world: HotRig) -> None:
    handle = world.open("r", tokens=3)
    world.hot.begin_step(handle, 1, 3, 6)
    world.append(handle, 2, 3, 3)
    with pytest.raises(ValueError, match="num_tokens is -1"):
        world.hot.truncate(handle, -1)
    world.hot.truncate(handle, 4)
    with pytest.raises(HoleError, match="position 5 is read"):
        world.hot.select(handle, 1, [[3, 5]])
    with pytest.raises(ValueError, match=r"not of the running step \[3, 4\)"):
        world.append(handle, 2, 4)
    for group in range(2):
        assert [world.hot.slot_of(handle, group, it) for it in (4, 5)] == [-1, -1]


def test_one_row_in_a_hundred_is_not_reported() -> None:
    layout = RegionLayout(3, 400, 4, ROW_BYTES)
    world = HotRig(layout=layout, track_rows=True)
    handle = world.hot.open("r", list(range(250)))
    draw = random.Random(1)
    holes = set(draw.sample(range(900), 9))
    for position in range(900):
        for layer in range(3):
            row = world.rows("r", layer, position, 1)
            if position in holes:
                world.region.write_bytes(layout.row_offset(layer, *divmod(position, 4)), row)
            else:
                world.hot.land(handle, layer, position, row)
    refused = set()
    for position in range(900):
        try:
            world.step(handle, 0, 900, [position])
        except HoleError as error:
            refused.add(error.position)
    assert refused == holes
    assert world.hot.statistics().holes == 9
    world.close()


def test_rows_of_the_step_and_hits_cost_no_load(world: HotRig) -> None:
    handle = world.open("r")
    world.step(handle, 0, 12, [0, 12])
    before = world.device.statistics()
    plan = world.step(handle, 0, 13, [0, 12, 13])
    assert plan.misses == ()
    assert world.device.statistics() == before, "no copy, no wait"
    assert world.hot.load_event(handle, 0) is None


def test_one_wait_for_each_layer_with_misses(world: HotRig) -> None:
    handle = world.open("r")
    world.begin(handle, 0, 12)
    plan = world.hot.select(handle, 0, [[0, 1], [1, 2]])
    assert world.hot.load_event(handle, 1) is not None, "loads of the group start at once"
    world.hot.ready(handle, 0, plan)
    world.append(handle, 1, 12)
    world.hot.ready(handle, 1, plan)
    world.read(handle, 1, plan)
    counts = world.device.statistics()
    assert counts.submitted == 4
    assert counts.host_waits <= 2, "none for a load that has ended already"


def test_layers_of_a_group_share_books_others_do_not(world: HotRig) -> None:
    handle = world.open("r")
    world.step(handle, 0, 12, [0, 1])
    assert world.hot.slot_of(handle, 0, 0) >= 0
    assert world.hot.slot_of(handle, 1, 0) == -1
    world.step(handle, 1, 12, [0, 5])


def test_last_prompt_row_is_written_again(world: HotRig) -> None:
    handle = world.open("r")
    for group in range(2):
        assert world.step(handle, group, 11, [3, 11]).num_hits == 1
    assert world.hot.num_rows(handle, 2) == 12


def test_resumed_request_starts_cold_with_all_its_rows(world: HotRig) -> None:
    handle = world.open("r")
    world.step(handle, 0, 12, [0, 1])
    world.step(handle, 1, 12, [0, 1])
    world.hot.preempt(handle)
    intruder = world.open("intruder", first=5)
    world.step(intruder, 0, 12, [0, 1])
    world.hot.resume(handle)
    plan = world.step(handle, 0, 13, [0, 1, 12, 13])
    assert {position for position, _ in plan.misses} == {0, 1, 12}


def test_rows_that_land_again_are_loaded_again(world: HotRig) -> None:
    handle = world.open("r")
    world.step(handle, 1, 12, [3, 8])
    new = b"landed again...."
    world.hot.land(handle, 2, 8, new)
    assert [world.hot.slot_of(handle, 1, it) >= 0 for it in (3, 8, 12)] == [True, False, False]
    world.hot.begin_step(handle, 1, 12, 13)
    world.append(handle, 2, 12)
    plan = world.hot.select(handle, 1, [[8]])
    world.hot.ready(handle, 2, plan)
    base = world.hot.layout.layer_offset(0, 2)
    assert world.hot.memory.read_bytes(base + plan.places[0] * ROW_BYTES, ROW_BYTES) == new


def test_rank_that_does_not_write_the_region() -> None:
    world = HotRig(writes_region=False)
    handle = world.open("r")
    before = world.region.read_bytes(0, world.layout.num_bytes)
    world.step(handle, 1, 12, [12, 0])
    assert world.region.read_bytes(0, world.layout.num_bytes) == before
    with pytest.raises(ValueError, match="a step writes 5 rows but slots is 4"):
        world.hot.begin_step(handle, 1, 13, 18)
    world.close()


def test_figures_outlive_requests(world: HotRig) -> None:
    for name in ("a", "b"):
        handle = world.open(name)
        world.step(handle, 0, 12, [0, 1, 12])
        world.hot.close(handle)
    figures = world.hot.statistics()
    assert (figures.rows.misses, figures.rows.hits, figures.rows.admitted) == (4, 2, 2)
    assert (figures.free, figures.parked, figures.load_failures, figures.holes) == (2, 0, 0, 0)


def test_rows_beyond_four_gigabytes() -> None:
    layout = RegionLayout(3, 14_000, 128, 1152)  # 2 GB a layer; the file stays sparse
    assert layout.row_offset(2, 13_999, 127) > 2**32
    world = HotRig(layout=layout)
    handle = world.hot.open("r", [13_999, 0, 7_000])
    for layer in range(3):
        world.hot.land(handle, layer, 0, world.rows("r", layer, 0, 300))
    for group in range(2):
        world.step(handle, group, 300, [0, 127, 128, 299])
        world.step(handle, group, 301, [1, 126, 300, 301])
    offset = layout.row_offset(2, 13_999, 127)
    assert world.region.read_bytes(offset, 1152) == world.rows("r", 2, 127, 1)
    world.close()


def test_rows_may_come_from_any_buffer(world: HotRig) -> None:
    handle = world.hot.open("r", [0])
    world.hot.land(handle, 0, 0, array.array("Q", [7, 8, 9, 10]))
    assert world.hot.num_rows(handle, 0) == 2
    with pytest.raises(TypeError):
        world.hot.land(handle, 0, 2, memoryview(bytes(64))[::2])
