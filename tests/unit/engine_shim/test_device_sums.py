"""Copies with checksums on every device: the sums are there before anything behind the copy."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from engine_shim.copy_plan import CopyPlan
from engine_shim.device import Device, DeviceError, DeviceMemory
from engine_shim.device_cpu import CpuDevice
from engine_shim.device_virtual import Link, VirtualDevice
from engine_shim.testing import Fail, FaultyDevice, Rule, Swap
from kvd.plan.runs import SummedSpans
from kvd.plan.sums import ZERO_SAID, BadSpan
from kvd_kernels.host import crc32c

SECOND = 1_000_000_000
BYTES = 4096
MAKERS: list[Callable[[], Device]] = [
    CpuDevice,
    lambda: VirtualDevice({"a": Link("a", SECOND)}),
    lambda: FaultyDevice(CpuDevice()),
]


@pytest.fixture(params=MAKERS, ids=["cpu", "virtual", "faulty"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made: Device = request.param()
    yield made
    made.close(10 * SECOND)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@contextmanager
def memories(device: Device) -> Iterator[tuple[DeviceMemory, DeviceMemory]]:
    """A source and a destination."""
    src, dst = device.alloc(BYTES, "src"), device.alloc(BYTES, "dst")
    yield src, dst
    for memory in (src, dst):
        memory.close()


def spans() -> SummedSpans:
    """Two groups; a part of the first is only read."""
    made = SummedSpans()
    made.begin_group()
    made.add(64, 100, 200)
    made.read(300, 50)
    made.begin_group()
    made.add(1000, 0, 7)
    return made


def test_sums_are_those_of_what_was_copied(device: Device, stack: ExitStack) -> None:
    content = os.urandom(BYTES)
    src, dst = stack.enter_context(memories(device))
    src.write_bytes(0, content)
    stream, event, copied = device.stream("a"), device.event(), spans()
    seen: list[list[int]] = []
    stream.copy(dst, src, copied)
    stream.launch_host(lambda failure: seen.append(list(copied.sums)))
    stream.record(event)
    assert event.wait(SECOND)
    assert seen == [[crc32c(content[100:350]), crc32c(content[:7])]]
    assert dst.read_bytes(64, 200) == content[100:300]
    assert dst.read_bytes(264, 700) == bytes(700)
    assert dst.read_bytes(1000, 7) == content[:7]


def test_a_copy_that_does_not_fit_fails(device: Device, stack: ExitStack) -> None:
    src, dst = stack.enter_context(memories(device))
    stream, copied = device.stream("a"), spans()
    copied.add(BYTES - 1, 0, 2)
    stream.copy(dst, src, copied)
    with pytest.raises(DeviceError, match="copy_failed"):
        stream.synchronize(SECOND)
    assert dst.read_bytes(0, BYTES) == bytes(BYTES)


def test_faults_of_copies_are_faults_of_these_too(stack: ExitStack) -> None:
    rules = (Rule(Swap(), stream="a", kind="copy", nth=0), Rule(Fail(), stream="a", nth=3))
    device = FaultyDevice(CpuDevice(), rules)
    src, dst = stack.enter_context(memories(device))
    src.write_bytes(0, b"x" * BYTES)
    stream, first, second = device.stream("a"), spans(), spans()
    stream.copy(dst, src, first)
    stream.copy(dst, src, second)
    stream.synchronize(SECOND)
    assert first.sums == second.sums == array("I", [crc32c(b"x" * 250), crc32c(b"x" * 7)])
    device.close(10 * SECOND)


# The plan of one layer's copies -------------------------------------------------------------------


def test_what_a_save_says_of_its_blocks() -> None:
    plan = CopyPlan()
    assert plan.sums() == b""
    for mark in (0, -1, 1):
        plan.marks.append(mark)
    for _ in range(2):
        plan.summed.begin_group()
    plan.summed.sums[0] = 7
    assert array("I", plan.sums()) == array("I", [7, 0, ZERO_SAID])


def test_what_a_load_finds_bad() -> None:
    plan = CopyPlan()
    for got in (5, 0, 6):
        plan.summed.begin_group()
        plan.summed.sums[-1] = got
    plan.expected = [(10, 5), (11, ZERO_SAID), (12, 7)]
    assert plan.bad() == [BadSpan(12, 7, 6)]


def test_copies_of_both_kinds_are_handed_over_once(stack: ExitStack) -> None:
    device = CpuDevice()
    src, dst = stack.enter_context(memories(device))
    src.write_bytes(0, b"y" * BYTES)
    stream, plan = device.stream("a"), CopyPlan()
    plan.plain.add(0, 0, 10)
    plan.summed.begin_group()
    plan.summed.add(20, 0, 10)
    assert plan.num_bytes == 20
    seen: list[bytes] = []
    plan.submit(stream, dst, src, lambda _: seen.append(dst.read_bytes(0, 30)))
    stream.synchronize(SECOND)
    assert seen == [b"y" * 10 + bytes(10) + b"y" * 10]
    assert device.statistics().submitted == 3
    device.close(SECOND)
