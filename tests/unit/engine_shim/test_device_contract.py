"""What every device promises, held against the CPU, virtual time, and both behind the wrapper."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import pytest

from engine_shim.device import Device, DeviceCode, DeviceError, DeviceMemory
from engine_shim.device_cpu import CpuDevice
from tests.unit.engine_shim.device_rig import MAKERS, SECOND, spans

BYTES = 4096


@pytest.fixture(params=MAKERS.values(), ids=list(MAKERS))
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Give each kind of device; in the end no operation is without an outcome."""
    made: Device = request.param()
    yield made
    made.close(10 * SECOND)
    assert made.statistics().in_progress == 0


@pytest.fixture
def memories(device: Device) -> Iterator[tuple[DeviceMemory, DeviceMemory]]:
    """Give a source of random bytes and a destination of zeros."""
    src, dst = device.alloc(BYTES, "src"), device.alloc(BYTES, "dst")
    src.write_bytes(0, os.urandom(BYTES))
    yield dst, src
    src.close()
    dst.close()


Memories = tuple[DeviceMemory, DeviceMemory]


@pytest.mark.parametrize("name", ["", "x" * 65, "a b", "a/b"])
def test_names_that_cannot_be(device: Device, name: str) -> None:
    with pytest.raises(ValueError, match="stream name is"):
        device.stream(name)
    with pytest.raises(ValueError, match="memory name is"):
        device.alloc(1, name)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_memory_of_no_bytes(device: Device, nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"nbytes of memory m is {nbytes}"):
        device.alloc(nbytes, "m")


def test_taken_stream_name(device: Device) -> None:
    first = device.stream("a")
    with pytest.raises(ValueError, match="stream name a is taken"):
        device.stream("a")
    first.close(SECOND)
    device.stream("a").synchronize(SECOND)


def test_event_that_was_never_recorded(device: Device) -> None:
    event, stream = device.event(), device.stream("a")
    for ask in (event.query, lambda: event.wait(0), lambda: stream.wait(event)):
        with pytest.raises(ValueError, match="event was never recorded"):
            ask()
    assert device.statistics().submitted == 0


def test_negative_timeouts(device: Device) -> None:
    event, stream = device.event(), device.stream("a")
    event.arm()
    for ask in (event.wait, stream.synchronize, stream.close, device.close):
        with pytest.raises(ValueError, match="timeout_ns is -1"):
            ask(-1)


def test_things_of_another_device(device: Device, memories: Memories) -> None:
    other = CpuDevice()
    stream = device.stream("a")
    for submit in (stream.record, stream.wait):
        with pytest.raises(ValueError, match="event belongs to another device"):
            submit(other.event())
    dst, _ = memories
    with pytest.raises(ValueError, match="src is a str"):
        stream.copy(dst, "src", spans((0, 0, 1)))  # type: ignore[arg-type]
    assert device.statistics().submitted == 0


def test_copy_is_not_done_before_its_event(device: Device, memories: Memories) -> None:
    dst, src = memories
    stream, gate, copied = device.stream("a"), device.event(), device.event()
    open_gate = gate.arm()
    stream.wait(gate)
    pieces = spans((0, 0, 100), (200, 300, 50))
    stream.copy(dst, src, pieces)
    pieces.add(1000, 0, 64)  # not part of the copy
    stream.record(copied)
    assert not copied.query()
    assert not copied.wait(1)
    assert dst.read_bytes(0, BYTES) == bytes(BYTES)
    open_gate(None)
    assert copied.wait(SECOND)
    assert copied.query()
    assert dst.read_bytes(0, 100) == src.read_bytes(0, 100)
    assert dst.read_bytes(200, 50) == src.read_bytes(300, 50)
    assert dst.read_bytes(250, BYTES - 250) == bytes(BYTES - 250)


def test_failed_copy_moves_nothing_and_reaches_each_mark_once(
    device: Device, memories: Memories
) -> None:
    dst, src = memories
    stream, failed, fine = device.stream("a"), device.event(), device.event()
    calls: list[DeviceError | None] = []
    stream.copy(dst, src, spans((0, 0, 64), (BYTES - 1, 0, 2)))
    stream.record(failed)
    stream.copy(dst, src, spans((100, 100, 64)))
    stream.record(fine)
    stream.launch_host(calls.append)
    stream.launch_host(calls.append)
    asks: list[Callable[[], bool]] = [partial(failed.wait, SECOND), failed.query, failed.query]
    for ask in asks:
        with pytest.raises(DeviceError, match="span 1") as error:
            ask()
        assert error.value.code is DeviceCode.COPY_FAILED
    assert fine.wait(SECOND), "the copy behind the failed one is done"
    with pytest.raises(DeviceError, match="copy_failed: copy of 66 bytes on stream a"):
        stream.synchronize(SECOND)
    stream.synchronize(SECOND)
    assert dst.read_bytes(0, 100) == bytes(100)
    assert dst.read_bytes(100, 64) == src.read_bytes(100, 64)
    first, second = calls
    assert first is not None
    assert first.code is DeviceCode.COPY_FAILED
    assert second is None
    assert device.statistics().failed == 1


def test_failure_crosses_streams_with_the_event(device: Device, memories: Memories) -> None:
    dst, src = memories
    one, two, first, second = device.stream("a"), device.stream("b"), device.event(), device.event()
    one.copy(dst, src, spans((BYTES, 0, 1)))
    one.record(first)
    two.wait(first)
    two.copy(dst, src, spans((0, 0, 8)))
    two.record(second)
    with pytest.raises(DeviceError, match="copy of 1 bytes on stream a"):
        second.wait(SECOND)
    assert dst.read_bytes(0, 8) == src.read_bytes(0, 8), "what waits is not skipped"


def test_close_raises_what_no_mark_reported(device: Device, memories: Memories) -> None:
    dst, src = memories
    stream = device.stream("a")
    stream.copy(dst, src, spans((BYTES, 0, 1)))
    with pytest.raises(DeviceError, match="copy_failed"):
        stream.close(SECOND)
    stream.close(SECOND)


def test_host_can_fail_an_event(device: Device) -> None:
    event, stream = device.event(), device.stream("a")
    complete = event.arm()
    stream.wait(event)
    complete(DeviceError(DeviceCode.INJECTED, "no such row"))
    complete(None)
    with pytest.raises(DeviceError, match="injected: no such row"):
        event.wait(0)
    with pytest.raises(DeviceError, match="injected: no such row"):
        stream.synchronize(SECOND)


def test_wait_means_the_record_of_its_moment(device: Device) -> None:
    event, after, stream = device.event(), device.event(), device.stream("a")
    complete_first = event.arm()
    stream.wait(event)
    stream.record(after)
    complete_second = event.arm()
    complete_first(None)
    assert after.wait(SECOND)
    assert not event.query(), "the second record is still open"
    complete_second(None)
    assert event.query()


def test_host_functions_in_stream_order(device: Device) -> None:
    one, two, event = device.stream("a"), device.stream("b"), device.event()
    calls: list[int] = []
    for number in range(10):
        one.launch_host(lambda _, it=number: calls.append(it))  # type: ignore[misc]
    one.record(event)
    two.wait(event)
    two.launch_host(lambda _: calls.append(10))
    two.synchronize(SECOND)
    assert calls == list(range(11))


@pytest.mark.parametrize("kind", ["launch_host", "notify_host"])
def test_host_function_must_not_call_the_device(device: Device, kind: str) -> None:
    stream, event = device.stream("a"), device.event()
    event.arm()
    refusals: list[DeviceCode] = []

    def misuse(_: DeviceError | None) -> None:
        for call in (
            lambda: stream.record(device.event()),
            lambda: stream.synchronize(SECOND),
            lambda: event.wait(SECOND),
            lambda: device.stream("c"),
            lambda: stream.close(SECOND),
        ):
            with pytest.raises(DeviceError, match="a host function makes no device calls") as error:
                call()
            refusals.append(error.value.code)

    getattr(stream, kind)(misuse)
    stream.synchronize(SECOND)
    assert refusals == [DeviceCode.IN_HOST_FUNCTION] * 5


def test_deadline_of_a_stuck_stream(device: Device) -> None:
    stream, gate, event = device.stream("a"), device.event(), device.event()
    open_gate = gate.arm()
    stream.wait(gate)
    stream.record(event)
    assert not event.wait(1)
    with pytest.raises(DeviceError, match="timeout: stream a did not end within 1000 ns"):
        stream.synchronize(1000)
    assert not event.wait(1)
    open_gate(None)
    stream.synchronize(SECOND)
    assert event.query()


def test_queue_at_its_bound(device: Device) -> None:
    stream, gate, event = device.stream("a"), device.event(), device.event()
    open_gate = gate.arm()
    stream.wait(gate)

    def fill() -> None:
        for _ in range(3000):
            stream.record(event)

    with pytest.raises(DeviceError, match=r"2000 operations are queued \(queue_max\)"):
        fill()
    assert 2000 <= device.statistics().submitted <= 2001, "2000 are queued, one may run"
    open_gate(None)
    stream.synchronize(10 * SECOND)
    stream.record(event)
    assert event.wait(SECOND)


def test_closed_stream_takes_nothing(device: Device, memories: Memories) -> None:
    dst, src = memories
    stream, event = device.stream("a"), device.event()
    event.arm()
    stream.close(SECOND)
    before = device.statistics()
    submits: list[Callable[[], None]] = [
        partial(stream.copy, dst, src, spans((0, 0, 1))),
        partial(stream.launch_host, print),
        partial(stream.notify_host, print),
        partial(stream.record, event),
        partial(stream.wait, event),
    ]
    for submit in submits:
        with pytest.raises(DeviceError, match="the stream is closed"):
            submit()
    assert device.statistics() == before
    stream.close(SECOND)


def test_closed_device_makes_no_streams(device: Device) -> None:
    device.close(SECOND)
    with pytest.raises(DeviceError, match="closed: stream a: the device is closed"):
        device.stream("a")


def test_close_drains_what_is_queued(device: Device, memories: Memories) -> None:
    dst, src = memories
    stream, event = device.stream("a"), device.event()
    calls: list[DeviceError | None] = []
    for at in range(50):
        stream.copy(dst, src, spans((at, at, 1)))
        stream.launch_host(calls.append)
    stream.record(event)
    stream.close(10 * SECOND)
    assert calls == [None] * 50
    assert event.query()
    assert dst.read_bytes(0, 50) == src.read_bytes(0, 50)
    assert device.statistics().completed == 101


@pytest.mark.parametrize("drain", [True, False])
def test_close_gives_every_operation_an_outcome(
    device: Device, memories: Memories, drain: bool
) -> None:
    dst, src = memories
    gate = device.event()
    gate.arm()
    streams = [device.stream(name) for name in ("a", "b")]
    calls: list[DeviceError | None] = []
    events = []
    for stream in streams:
        stream.wait(gate)
        for at in range(25):
            stream.copy(dst, src, spans((at, at, 1)))
            stream.launch_host(calls.append)
            events.append(device.event())
            stream.record(events[-1])
    for stream in streams:
        stream.close(1000, drain=drain)
    codes = [None if failure is None else failure.code for failure in calls]
    assert codes == [DeviceCode.CANCELLED] * 50
    for event in events:
        with pytest.raises(DeviceError, match="cancelled"):
            event.query()
    counts = device.statistics()
    assert (counts.completed, counts.failed, counts.cancelled) == (0, 0, 2 * 76)
    assert dst.read_bytes(0, 25) == bytes(25), "what was cancelled did not run"


def test_many_cycles_over_two_events(device: Device) -> None:
    streams, events = [device.stream("a"), device.stream("b")], [device.event(), device.event()]
    order: list[int] = []
    for cycle in range(1100):
        side = cycle % 2
        streams[side].launch_host(lambda _, it=cycle: order.append(it))  # type: ignore[misc]
        streams[side].record(events[side])
        streams[1 - side].wait(events[side])
        if cycle % 100 == 99:
            assert events[side].wait(10 * SECOND)
    streams[0].synchronize(10 * SECOND)
    assert order == list(range(1100))


def test_time_does_not_go_back(device: Device) -> None:
    stream, event = device.stream("a"), device.event()
    times = []
    for _ in range(10):
        times.append(device.now_ns())
        stream.record(event)
        assert event.wait(SECOND)
    assert all(first <= second for first, second in pairwise(times))


def test_statistics_count_what_happened(device: Device, memories: Memories) -> None:
    dst, src = memories
    stream, event = device.stream("a"), device.event()
    stream.copy(dst, src, spans((0, 0, 1)))
    stream.copy(dst, src, spans((BYTES, 0, 1)))
    stream.launch_host(lambda _: None)
    stream.record(event)
    with pytest.raises(DeviceError):
        event.wait(SECOND)
    with pytest.raises(DeviceError):
        stream.synchronize(SECOND)
    counts = device.statistics()
    assert (counts.submitted, counts.completed, counts.failed) == (4, 3, 1)
    assert (counts.cancelled, counts.host_waits, counts.in_progress) == (0, 2, 0)
