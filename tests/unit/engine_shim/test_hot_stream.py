"""Steps whose layers are computed by a stream: the host waits once for each forward, not for loads.

The device of these tests is virtual, or real threads; what the stream computes is a host function
that reads the rows at its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from engine_shim.device import Device, DeviceCode, DeviceError, Stream
from engine_shim.device_cpu import CpuDevice
from engine_shim.hot import HotHandle, Plan
from engine_shim.testing import Delay, Fail, FaultyDevice, Link, Rule, VirtualDevice
from tests.unit.engine_shim.hot_rig import GROUPS, MS, SECOND, HotRig

SLOTS = 3
SELECTIONS = ([0, 1, 12], [1, 5, 13], [2, 3, 4], [0, 9, 15], [7, 8, 2])
"""Of five steps, beginning at position 12: hits, misses and rows for the scratch tile."""


def virtual() -> Device:
    links = {name: Link(name, 1_000_000) for name in ("hot", "compute")}
    return VirtualDevice(links, move_bytes=True)


def late_loads(make: Callable[[], Device]) -> Device:
    """Every load begins late, so that a read that does not wait for it finds other rows."""
    return FaultyDevice(make(), [Rule(Delay(2 * MS), kind="copy", stream="hot")])


DEVICES: dict[str, Callable[[], Device]] = {
    "virtual": virtual,
    "cpu": CpuDevice,
    "late-virtual": partial(late_loads, virtual),
    "late-cpu": partial(late_loads, CpuDevice),
}


class Forward:
    """An engine whose layers are computed by a stream."""

    def __init__(self, device: Device) -> None:
        self.world = HotRig(device=device, slots=SLOTS)
        self.stream: Stream = device.stream("compute")
        self.wrong: list[str] = []

    def step(self, handle: HotHandle, start: int, selection: list[int]) -> None:
        """One forward of one row through all layers; the host waits at its end."""
        world, hot = self.world, self.world.hot
        for group, layers in enumerate(GROUPS):
            world.begin(handle, group, start)
            plan = hot.select(handle, group, [selection])
            for layer in layers:
                if layer != layers[0]:
                    world.append(handle, layer, start)
                hot.ready(handle, layer, plan, self.stream)
                self.stream.launch_host(partial(self.compute, handle, layer, plan))
        self.stream.synchronize(10 * SECOND)

    def compute(
        self, handle: HotHandle, layer: int, plan: Plan, failure: DeviceError | None
    ) -> None:
        """What attention would do: read the rows."""
        if failure is None:
            try:
                self.world.read(handle, layer, plan)
            except AssertionError as error:
                self.wrong.append(f"layer {layer}: {error}")

    def close(self) -> None:
        self.stream.close(SECOND)
        self.world.close()


@pytest.fixture(params=list(DEVICES))
def forward(request: pytest.FixtureRequest) -> Iterator[Forward]:
    made = Forward(DEVICES[request.param]())
    yield made
    made.close()


def test_a_forward_has_one_wait_of_the_host(forward: Forward) -> None:
    handle = forward.world.open("r")
    loads = 0
    for at, selection in enumerate(SELECTIONS):
        before = forward.world.device.statistics()
        forward.step(handle, 12 + at, selection)
        after = forward.world.device.statistics()
        assert after.host_waits - before.host_waits == 1, "the one at its end"
        loads += after.submitted - before.submitted
        assert not forward.wrong
    assert loads > 5 * 3, "there was something to wait for"


def test_a_load_that_fails_is_a_failure_of_the_stream() -> None:
    rules = [Rule(Fail(moved=0.5), kind="copy", stream="hot", nth=0)]
    forward = Forward(FaultyDevice(virtual(), rules))
    handle = forward.world.open("r")
    with pytest.raises(DeviceError) as caught:
        forward.step(handle, 12, [0, 1])
    assert caught.value.code is DeviceCode.INJECTED
    forward.world.hot.truncate(handle, 12)
    forward.step(handle, 12, [0, 1])
    assert not forward.wrong
    assert forward.world.hot.statistics().load_failures == 1
    forward.close()


def test_the_tile_of_a_layer_is_not_filled_again_while_it_is_read() -> None:
    device = CpuDevice()
    forward = Forward(device)
    handle = forward.world.open("r")
    held = device.event()
    let_go = held.arm()
    forward.stream.wait(held)  # compute is behind: nothing of the first layer was read yet
    world = forward.world
    world.begin(handle, 0, 12)
    plan = world.hot.select(handle, 0, [[0, 1, 2, 3]])
    assert plan.scratch
    for layer in GROUPS[0]:
        if layer != GROUPS[0][0]:
            world.append(handle, layer, 12)
        world.hot.ready(handle, layer, plan, forward.stream)
        forward.stream.launch_host(partial(forward.compute, handle, layer, plan))
    let_go(None)
    forward.stream.synchronize(10 * SECOND)
    assert not forward.wrong
    forward.close()
