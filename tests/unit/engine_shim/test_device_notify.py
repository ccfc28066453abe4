"""Notifications on every device: called as host functions are, and in one order with them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from engine_shim.device import (
    Device,
    DeviceCode,
    DeviceError,
    DeviceMemory,
    HostFunction,
    Stream,
)
from tests.unit.engine_shim.device_rig import MAKERS, SECOND, spans

BYTES = 4096
KINDS = ("launch_host", "notify_host")


@pytest.fixture(params=MAKERS.values(), ids=list(MAKERS))
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Give each kind of device; in the end no operation is without an outcome."""
    made: Device = request.param()
    yield made
    made.close(10 * SECOND)
    assert made.statistics().in_progress == 0


@pytest.fixture
def memory(device: Device) -> Iterator[DeviceMemory]:
    """Give memory to copy within."""
    made = device.alloc(BYTES, "m")
    yield made
    made.close()


def test_each_is_called_once_and_in_order(device: Device, memory: DeviceMemory) -> None:
    stream, gate = device.stream("a"), device.event()
    open_gate = gate.arm()
    calls: list[int] = []
    for number in range(60):
        if number % 7 == 3:
            stream.copy(memory, memory, spans((0, 64, 8)))
        if number == 30:
            stream.wait(gate)
        launch = getattr(stream, KINDS[number % 5 % 2])
        launch(lambda _, it=number: calls.append(it))
    open_gate(None)
    stream.synchronize(10 * SECOND)
    assert calls == list(range(60))
    counts = device.statistics()
    assert counts.submitted == counts.completed == 60 + 9 + 1


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_the_first_learns_of_a_failure(
    device: Device, memory: DeviceMemory, first: str, second: str
) -> None:
    stream, event = device.stream("a"), device.event()
    calls: list[DeviceError | None] = []
    for at in (BYTES, BYTES + 1):
        stream.copy(memory, memory, spans((at, 0, 1)))
    getattr(stream, first)(calls.append)
    getattr(stream, second)(calls.append)
    stream.copy(memory, memory, spans((0, BYTES, 1)))
    getattr(stream, second)(calls.append)
    stream.record(event)
    with pytest.raises(DeviceError, match="copy_failed"):
        event.wait(10 * SECOND)
    one, none, other = calls
    assert one is not None
    assert str(BYTES) in one.detail, "the first of two failures"
    assert none is None
    assert other is not None
    assert other.code is DeviceCode.COPY_FAILED


def test_bytes_and_event_are_there_in_time(device: Device, memory: DeviceMemory) -> None:
    stream, event = device.stream("a"), device.event()
    memory.write_bytes(64, b"12345678")
    seen: list[bytes] = []
    stream.copy(memory, memory, spans((0, 64, 8)))
    stream.notify_host(lambda _: seen.append(memory.read_bytes(0, 8)))
    stream.record(event)
    assert event.wait(10 * SECOND)
    assert seen == [b"12345678"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drain", [True, False])
def test_close_calls_each_with_what_became_of_it(
    device: Device, memory: DeviceMemory, kind: str, drain: bool
) -> None:
    stream, gate = device.stream("a"), device.event()
    gate.arm()
    ran: list[DeviceError | None] = []
    calls: list[DeviceError | None] = []
    getattr(stream, kind)(ran.append)
    stream.synchronize(10 * SECOND)
    stream.wait(gate)
    for _ in range(20):
        stream.copy(memory, memory, spans((0, 64, 8)))
        getattr(stream, kind)(calls.append)
    stream.close(1000, drain=drain)
    assert ran == [None]
    assert [failure.code for failure in calls if failure] == [DeviceCode.CANCELLED] * 20
    counts = device.statistics()
    assert (counts.submitted, counts.completed, counts.cancelled) == (42, 1, 41)


def test_close_drains_notifications(device: Device, memory: DeviceMemory) -> None:
    stream = device.stream("a")
    calls: list[int] = []
    for number in range(50):
        stream.copy(memory, memory, spans((0, 64, 8)))
        stream.notify_host(partial(lambda it, _: calls.append(it), number))
    stream.close(10 * SECOND)
    assert calls == list(range(50))
    assert device.statistics().completed == 100


# The notification of a copy -----------------------------------------------------------------------


def copy_then(stream: Stream, memory: DeviceMemory, then: HostFunction, at: int = 0) -> None:
    stream.copy(memory, memory, spans((at, 64, 8)), then)


def test_the_notification_of_a_copy_comes_behind_it_and_in_order(
    device: Device, memory: DeviceMemory
) -> None:
    stream, gate = device.stream("a"), device.event()
    open_gate = gate.arm()
    memory.write_bytes(64, b"12345678")
    calls: list[int] = []
    for number in range(60):
        if number == 20:
            stream.wait(gate)
        if number % 3:
            copy_then(stream, memory, partial(lambda it, _: calls.append(it), number))
        else:
            launch = getattr(stream, KINDS[number % 2])
            launch(lambda _, it=number: calls.append(it))
    copy_then(stream, memory, lambda _: calls.append(memory.read_bytes(0, 1)[0]))
    open_gate(None)
    stream.synchronize(10 * SECOND)
    assert calls == [*range(60), ord("1")]
    counts = device.statistics()
    assert counts.submitted == counts.completed == 20 + 2 * 41 + 1


def test_the_notification_of_a_copy_learns_of_its_failure(
    device: Device, memory: DeviceMemory
) -> None:
    stream, event = device.stream("a"), device.event()
    calls: list[DeviceError | None] = []
    copy_then(stream, memory, calls.append, BYTES)
    copy_then(stream, memory, calls.append)
    stream.copy(memory, memory, spans((BYTES, 64, 8)))
    copy_then(stream, memory, calls.append)
    stream.notify_host(calls.append)
    stream.record(event)
    with pytest.raises(DeviceError, match="copy_failed"):
        event.wait(10 * SECOND)
    codes = [failure.code if failure else None for failure in calls]
    assert codes == [DeviceCode.COPY_FAILED, None, DeviceCode.COPY_FAILED, None]
    counts = device.statistics()
    assert (counts.submitted, counts.completed, counts.failed) == (9, 7, 2)


@pytest.mark.parametrize("drain", [True, False])
def test_close_tells_what_became_of_a_copy(
    device: Device, memory: DeviceMemory, drain: bool
) -> None:
    stream, gate = device.stream("a"), device.event()
    gate.arm()
    calls: list[DeviceError | None] = []
    copy_then(stream, memory, calls.append)
    stream.synchronize(10 * SECOND)
    stream.wait(gate)
    for _ in range(20):
        copy_then(stream, memory, calls.append)
    stream.close(1000, drain=drain)
    assert calls[0] is None
    assert [failure.code for failure in calls[1:] if failure] == [DeviceCode.CANCELLED] * 20
    counts = device.statistics()
    assert (counts.submitted, counts.completed, counts.cancelled) == (43, 2, 41)


def test_synchronize_waits_for_the_notification_of_a_copy(
    device: Device, memory: DeviceMemory
) -> None:
    stream = device.stream("a")
    calls: list[int] = []
    for number in range(100):
        copy_then(stream, memory, partial(lambda it, _: calls.append(it), number))
        stream.synchronize(10 * SECOND)
        assert len(calls) == number + 1
