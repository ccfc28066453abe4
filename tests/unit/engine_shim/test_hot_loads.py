"""Loads that fail, hang, come late or are lost: no row is wrong, no buffer is lent too early."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from engine_shim.device import DeviceCode, DeviceError
from engine_shim.hot import NoHotBufferError
from engine_shim.testing import Fail, FaultyDevice, Hang, Late, Lose, Rule
from tests.unit.engine_shim.hot_rig import MS, ROW_BYTES, HotRig

SHORT = 250 * MS
"""Time for loads to end on a busy machine; those that hang are waited for as long."""


def test_failed_load_empties_the_group_and_is_raised() -> None:
    world = HotRig([Rule(Fail(moved=0.5), kind="copy", nth=0)])
    handle = world.open("r")
    with pytest.raises(DeviceError, match="injected: copy 0 on stream hot"):
        world.step(handle, 0, 12, [0, 1])
    assert [world.hot.slot_of(handle, 0, it) for it in (0, 1, 12)] == [-1] * 3
    world.hot.truncate(handle, 12)
    plan = world.step(handle, 0, 12, [0, 1])
    assert len(plan.misses) == 2
    assert world.hot.statistics().load_failures == 1
    world.close()


def test_failed_load_of_a_later_layer_that_nobody_read() -> None:
    world = HotRig([Rule(Fail(), kind="copy", nth=1)])
    handle = world.open("r")
    world.begin(handle, 0, 12)
    plan = world.hot.select(handle, 0, [[0, 1]])
    world.hot.ready(handle, 0, plan)
    world.read(handle, 0, plan)
    world.hot.truncate(handle, 12)  # the step is given up before layer 1
    assert world.step(handle, 0, 12, [0, 1]).num_hits == 0
    assert world.hot.statistics().load_failures == 1
    world.close()


def test_failed_scratch_load() -> None:
    world = HotRig([Rule(Fail(), kind="copy", nth=0)], slots=1)
    handle = world.open("r")
    with pytest.raises(DeviceError, match="injected: copy 0"):
        world.step(handle, 1, 12, [0, 1])
    world.hot.truncate(handle, 12)
    plan = world.step(handle, 1, 12, [0, 1])
    assert plan.scratch == (0, 1)
    world.close()


def test_hanging_load_keeps_its_buffer_until_it_ends() -> None:
    world = HotRig([Rule(Hang(), kind="copy", nth=0)], timeout_ns=SHORT)
    assert isinstance(world.device, FaultyDevice)
    handle, other = world.open("r"), world.open("other", first=5)
    world.begin(handle, 1, 12)
    plan = world.hot.select(handle, 1, [[0, 1]])
    calls: list[Callable[[], None]] = [
        partial(world.hot.ready, handle, 2, plan),
        partial(world.hot.begin_step, handle, 1, 12, 13),
        partial(world.hot.land, handle, 2, 12, bytes(ROW_BYTES)),
    ]
    for call in calls:
        with pytest.raises(DeviceError, match="the load of layer 2 did not end in") as error:
            call()
        assert error.value.code is DeviceCode.TIMEOUT
    buffer = world.hot.buffer_of(handle)
    world.hot.close(handle)
    figures = world.hot.statistics()
    assert (figures.free, figures.parked) == (0, 1)
    with pytest.raises(NoHotBufferError, match="1 wait for a copy to end"):
        world.hot.open("third")
    world.device.resume("hot")
    world.step(other, 1, 12, [0, 1])  # behind it in the stream
    third = world.open("third", first=10)
    assert world.hot.buffer_of(third) == buffer
    assert world.step(third, 1, 12, [0, 1]).num_hits == 0
    world.close()


def test_buffer_whose_completion_was_lost_is_never_lent_again() -> None:
    world = HotRig([Rule(Lose(), kind="record", nth=0)], timeout_ns=SHORT)
    handle = world.open("r")
    with pytest.raises(DeviceError, match="did not end"):
        world.step(handle, 1, 12, [0, 1])
    world.hot.preempt(handle)
    world.hot.resume(handle)
    assert world.step(handle, 1, 12, [0, 1]).num_hits == 0
    with pytest.raises(NoHotBufferError):
        world.hot.open("other")
    assert world.hot.statistics().parked == 1
    world.close()


def test_late_load_is_waited_for() -> None:
    world = HotRig([Rule(Late(5 * MS), kind="record")])
    handle = world.open("r")
    for position in range(12, 16):
        world.step(handle, 0, position, [position, 0, position - 7])
    world.close()


def test_stream_that_takes_nothing() -> None:
    world = HotRig([Rule(Hang(), kind="copy", nth=0)], queue_max=2)
    assert isinstance(world.device, FaultyDevice)
    handle = world.open("r")
    world.begin(handle, 1, 12)
    world.hot.select(handle, 1, [[0]])
    world.begin(handle, 0, 12)
    with pytest.raises(DeviceError, match="queue_max"):
        world.hot.select(handle, 0, [[0, 1]])
    assert world.hot.slot_of(handle, 0, 0) == -1, "what is not loaded is not resident"
    world.device.resume("hot")
    world.hot.truncate(handle, 12)
    world.step(handle, 0, 12, [0, 1])
    world.close()


def test_load_without_its_event_takes_its_buffer_for_good() -> None:
    world = HotRig([Rule(Hang(), kind="copy", nth=0)], queue_max=3, timeout_ns=SHORT)
    assert isinstance(world.device, FaultyDevice)
    handle = world.open("r")
    world.begin(handle, 1, 12)
    world.hot.select(handle, 1, [[0]])
    world.begin(handle, 0, 12)
    with pytest.raises(DeviceError, match="record on stream hot: 3 operations are queued"):
        world.hot.select(handle, 0, [[0, 1]])
    assert world.hot.slot_of(handle, 0, 0) == -1
    world.device.resume("hot")
    with pytest.raises(DeviceError, match="the load of layer 0 did not end"):
        world.hot.begin_step(handle, 0, 12, 13)
    world.hot.close(handle)
    assert world.hot.statistics().parked == 1
    world.step(world.open("other", first=5), 0, 12, [0, 1])
    world.close()
