"""Native steps of decode by example: copies ahead, their arrays, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine_shim.device import DeviceCode, DeviceError
from engine_shim.hot_steps import Ahead, HotSteps
from engine_shim.sparse_ops import StepSizes
from engine_shim.testing import Hang, Rule
from kvd_kernels.rows import HoleError
from tests.stateful.steps_world import (
    HEADS,
    MAX_TOKENS,
    ROW,
    TOPK,
    StepsWorld,
)


@pytest.fixture
def world() -> Iterator[StepsWorld]:
    """Give a world that is closed at the end."""
    made = StepsWorld(6)
    yield made
    made.close()


class Copier:
    """Notes what it is told to copy."""

    def __init__(self, fails_in: int = -1) -> None:
        self.layers: list[int] = []
        self.fails_in = fails_in

    def gather(self, rows: object, request: int, layer: int, count: int) -> int:
        """Copy nothing."""
        self.layers.append(layer)
        if layer == self.fails_in:
            raise HoleError(f"position 9 of request {request} was never written")
        return count


def ahead_of(copier: Any) -> tuple[Ahead, dict[int, list[DeviceError | None]]]:
    """Copies ahead for two layers, and what became of each."""
    ended: dict[int, list[DeviceError | None]] = {3: [], 4: []}
    rows: Any = None
    return Ahead(copier, rows, 0, 2, {it: news.append for it, news in ended.items()}), ended


def test_copies_ahead_run_once_however_often_they_are_called() -> None:
    copier = Copier()
    ahead, ended = ahead_of(copier)
    ahead(None)
    ahead(None)
    ahead(DeviceError(DeviceCode.CANCELLED, "closed"))
    assert copier.layers == [3, 4]
    assert ended == {3: [None], 4: [None]}
    assert set(ahead.spent) == {3, 4}


def test_copies_that_do_not_run_say_why() -> None:
    copier = Copier()
    ahead, ended = ahead_of(copier)
    why = DeviceError(DeviceCode.CANCELLED, "closed")
    ahead(why)
    assert copier.layers == []
    assert ended == {3: [why], 4: [why]}


def test_a_row_that_was_never_written_fails_its_layer_alone() -> None:
    ahead, ended = ahead_of(Copier(fails_in=3))
    ahead(None)
    (failure,) = ended[3]
    assert failure is not None
    assert failure.code is DeviceCode.COPY_FAILED
    assert "rows of layer 3: position 9" in failure.detail
    assert ended[4] == [None]


def test_arrays_are_not_written_while_copies_may_still_read_them() -> None:
    world = StepsWorld(6, rules=(Rule(Hang(), kind="host", nth=0),))
    for name in ("a", "b"):
        world.open_request(name, 12)
    world.step("a", 1, again=0, ordered=True, stop_at=1)
    assert world.steps is not None
    with pytest.raises(DeviceError, match="copies ahead: the load of layer 0 did not end"):
        world.step("b", 1, again=0, ordered=True)
    assert world.device.resume("hot-ahead") == 1
    for name in ("b", "a"):
        world.truncate(name, 12)
        world.step(name, 2, again=0, ordered=True)
    world.close()


def test_copies_that_cannot_start_leave_an_empty_buffer(world: StepsWorld) -> None:
    world.open_request("a", 12)
    assert world.steps is not None
    world.steps.close(0)
    # Nothing is hot yet: the first selection misses all rows but the step's own.
    with pytest.raises(DeviceError, match="the stream is closed"):
        world.step("a", 1, again=0, ordered=True)
    handle = world.open["a"].handle
    assert [world.hot.slot_of(handle, 0, it) for it in range(13)] == [-1] * 13
    assert world.hot.check() == []


def test_a_step_has_no_more_rows_than_queries(world: StepsWorld) -> None:
    world.open_request("a", 4)
    assert world.steps is not None
    with pytest.raises(ValueError, match="a step has 4 rows; give 3 at most"):
        world.steps.begin_step(world.open["a"].handle, 0, 4, 8)


def test_a_preempted_request_has_no_steps(world: StepsWorld) -> None:
    world.open_request("a", 4)
    world.preempt("a")
    handle = world.open["a"].handle
    assert world.steps is not None
    with pytest.raises(ValueError, match="is preempted; resume it first"):
        world.steps.begin_step(handle, 0, 4, 5)
    with pytest.raises(ValueError, match="has no running step"):
        world.steps.attend(handle, 0, np.zeros((1, HEADS, ROW), np.float32))
    world.resume("a")
    world.step("a", 1, again=0, ordered=True, stop_at=1)
    world.preempt("a")
    world.resume("a")
    with pytest.raises(ValueError, match="has no running step"):
        world.steps.attend(handle, 0, np.zeros((1, HEADS, ROW), np.float32))


def test_queries_are_those_of_the_step(world: StepsWorld) -> None:
    world.open_request("a", 4)
    world.step("a", 2, again=0, ordered=True, stop_at=0)
    handle, steps = world.open["a"].handle, world.steps
    assert steps is not None
    steps.begin_step(handle, 0, 4, 6)
    steps.append(handle, 0, 4, np.zeros((2, 4 * ROW), np.uint8))
    one = np.zeros((1, 2, 4), np.float32)
    with pytest.raises(ValueError, match="queries has 1 positions; give the 2 of the step"):
        steps.choose(handle, 0, one, one[:, :, 0])
    with pytest.raises(ValueError, match="queries has 1 positions; give the 2 of the step"):
        steps.attend(handle, 0, np.zeros((1, HEADS, ROW), np.float32))


def test_the_scratch_tile_must_hold_all_that_a_step_can_miss(world: StepsWorld) -> None:
    sizes, no_memory = replace(world.sizes, selected=TOPK + 1), memoryview(bytes(1))
    with pytest.raises(ValueError, match="scratch_rows is 12; give 15: all that a step can miss"):
        HotSteps(world.device, world.hot, no_memory, world.layout, no_memory, world.key_rows, sizes)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("queries", 15, "queries is 15; native operations take 1 to 14"),
        ("queries", 0, "queries is 0"),
        ("selected", 4097, "selected is 4097; native operations take 1 to 4096"),
    ],
)
def test_sizes_out_of_range_are_refused(field: str, value: int, message: str) -> None:
    sizes: dict[str, Any] = {
        "queries": 1,
        "selected": TOPK,
        "context": MAX_TOKENS,
        "heads": HEADS,
        "row_floats": ROW,
        "value_floats": ROW,
        "index_heads": 1,
        "index_floats": 4,
        "element": "float32",
        "index_element": "float32",
    }
    with pytest.raises(ValueError, match=message):
        StepSizes(**{**sizes, field: value})


@pytest.mark.parametrize("ordered", [True, False])
def test_figures_say_what_was_merged_hidden_and_copied(ordered: bool, world: StepsWorld) -> None:
    world.open_request("a", 9)
    for _ in range(5):
        world.step("a", 2, again=0, ordered=ordered)
    figures = world.hot.statistics()
    named = figures.named()
    assert named["hot_merged_misses"] == sum(it.merged_misses for it in figures.groups) > 0
    assert named["hot_merged_misses"] <= named["hot_merged"]
    assert all(group.sampled == 1 for group in figures.groups)
    assert figures.groups[0].copied_ns > 0
    since = world.hot.statistics() - figures
    assert since.rows == type(since.rows)()
    assert (since.groups[0].steps, since.named()["hot_overlap"]) == (0, 1.0)
    assert since.free == figures.free


def test_requests_keep_their_counts_over_a_preemption(world: StepsWorld) -> None:
    world.open_request("a", 9)
    world.step("a", 2, again=0, ordered=True)
    handle = world.open["a"].handle
    before = world.hot.rows_of(handle)
    assert before[0].selected == 2 * TOPK
    world.preempt("a")
    assert world.hot.rows_of(handle) == before
    world.resume("a")
    assert world.hot.rows_of(handle) == before
    world.close_request("a")
    assert world.statistics() == before[0] + before[1]
