"""Faults on order: each does what it says, to the operations it was told, and is written down."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from engine_shim.device import Device, DeviceCode, DeviceError, DeviceMemory
from engine_shim.device_cpu import CpuDevice
from engine_shim.testing import (
    Delay,
    Entry,
    Fail,
    FaultyDevice,
    Hang,
    Late,
    Link,
    Lose,
    OpInfo,
    Rule,
    Swap,
    Twice,
    VirtualDevice,
)
from engine_shim.testing_rules import OpKind
from kvd.plan.runs import CopySpans

SECOND = 1_000_000_000
MS = 1_000_000
BYTES = 1024


class World:
    """A faulty device with a source of random bytes and a destination of zeros."""

    def __init__(self, inner: Device, *rules: Rule, seed: int = 0) -> None:
        self.device = FaultyDevice(inner, rules, seed)
        self.src: DeviceMemory = inner.alloc(BYTES, "src")
        self.dst: DeviceMemory = inner.alloc(BYTES, "dst")
        self.src.write_bytes(0, os.urandom(BYTES))

    def close(self) -> None:
        self.device.close(10 * SECOND)
        assert self.device.statistics().in_progress == 0
        self.src.close()
        self.dst.close()

    def arrived(self, start: int, end: int) -> bool:
        """Whether bytes [start, end) of the destination are those of the source."""
        return self.dst.read_bytes(start, end - start) == self.src.read_bytes(start, end - start)

    def whats(self) -> list[str]:
        return [entry.what for entry in self.device.journal()]


@pytest.fixture(params=["cpu", "virtual"])
def inner(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Give a device to wrap; a link takes 1 ns for each byte."""
    if request.param == "cpu":
        yield CpuDevice()
    else:
        yield VirtualDevice({name: Link(name, SECOND) for name in ("load", "save")})


def piece(start: int, nbytes: int) -> CopySpans:
    """Make a copy of bytes to the same place."""
    made = CopySpans()
    made.add(start, start, nbytes)
    return made


def test_without_rules_nothing_happens(inner: Device) -> None:
    world = World(inner)
    stream, event = world.device.stream("load"), world.device.event()
    calls: list[DeviceError | None] = []
    stream.copy(world.dst, world.src, piece(0, BYTES))
    stream.launch_host(calls.append)
    stream.record(event)
    assert event.wait(SECOND)
    assert world.arrived(0, BYTES)
    assert calls == [None]
    assert world.whats() == ["submitted", "submitted", "submitted", "called"]
    world.close()


def test_rules_choose_by_stream_kind_nth_and_condition(inner: Device) -> None:
    world = World(
        inner,
        Rule(Fail(DeviceCode.MEMORY_SHORT), stream="load", kind="copy", nth=1),
        Rule(Fail(), kind="copy", when=lambda op: op.nbytes == 7),
    )
    load, save = world.device.stream("load"), world.device.stream("save")
    outcomes: list[str] = []
    for stream, nbytes in ((load, 1), (save, 7), (load, 2), (save, 8), (load, 3), (save, 7)):
        stream.copy(world.dst, world.src, piece(0, nbytes))
        event = world.device.event()
        stream.record(event)
        try:
            outcomes.append(str(event.wait(SECOND)))
        except DeviceError as error:
            outcomes.append(str(error))
    assert outcomes == [
        "True",
        "injected: copy 0 on stream save failed by rule",
        "memory_short: copy 1 on stream load failed by rule",
        "True",
        "True",
        "injected: copy 2 on stream save failed by rule",
    ]
    world.close()


@pytest.mark.parametrize(("moved", "arrived"), [(0.0, 0), (0.5, 300), (1.0, 600)])
def test_failed_copy_moves_its_first_bytes(inner: Device, moved: float, arrived: int) -> None:
    world = World(inner, Rule(Fail(moved=moved), kind="copy"))
    stream = world.device.stream("load")
    pieces = piece(0, 200)
    pieces.add(400, 400, 400)
    stream.copy(world.dst, world.src, pieces)
    with pytest.raises(DeviceError, match="injected"):
        stream.synchronize(SECOND)
    assert world.arrived(0, min(200, arrived))
    assert world.arrived(400, 400 + max(0, arrived - 200))
    rest = world.dst.read_bytes(400 + max(0, arrived - 200), 600 - arrived)
    assert rest == bytes(600 - arrived)
    world.close()


@pytest.mark.parametrize("kind", ["host", "record", "wait"])
def test_marks_that_fail(inner: Device, kind: OpKind) -> None:
    world = World(inner, Rule(Fail(), kind=kind))
    stream, event, ready = world.device.stream("load"), world.device.event(), world.device.event()
    ready.arm()(None)
    calls: list[DeviceError | None] = []
    stream.wait(ready)
    stream.launch_host(calls.append)
    stream.record(event)
    with pytest.raises(DeviceError, match=f"{kind} 0 on stream load failed by rule"):
        event.wait(SECOND)
    assert (calls[0] is None) == (kind == "record")
    world.close()


def test_delayed_copy_holds_its_stream_and_no_other() -> None:
    inner = VirtualDevice({name: Link(name, SECOND) for name in ("load", "save")})
    world = World(inner, Rule(Delay(500), stream="load", nth=0))
    ends: dict[str, int] = {}
    for name in ("load", "save"):
        stream = world.device.stream(name)
        stream.copy(world.dst, world.src, piece(0, 100))
        stream.launch_host(lambda _, it=name: ends.update({it: inner.now_ns()}))  # type: ignore[misc]
    assert inner.run_until_idle(SECOND)
    assert ends == {"load": 600, "save": 100}
    world.close()


def test_delay_in_real_time() -> None:
    inner = CpuDevice()
    world = World(inner, Rule(Delay(20 * MS), kind="record"))
    stream, event = world.device.stream("load"), world.device.event()
    before = inner.now_ns()
    stream.record(event)
    assert event.wait(30 * SECOND)
    assert inner.now_ns() - before >= 20 * MS
    world.close()


def test_lost_event_and_lost_host_function(inner: Device) -> None:
    world = World(inner, Rule(Lose(), kind="record", nth=0), Rule(Lose(), kind="host", nth=0))
    stream, other, event = world.device.stream("load"), world.device.stream("save"), inner.event()
    calls: list[int] = []
    stream.copy(world.dst, world.src, piece(0, 10))
    stream.record(event)
    stream.launch_host(lambda _: calls.append(0))
    stream.launch_host(lambda _: calls.append(1))
    stream.synchronize(SECOND)
    assert world.arrived(0, 10)
    assert not event.query()
    assert not event.wait(1000)
    assert calls == [1]
    other.wait(event)
    other.launch_host(lambda failure: calls.append(2 if failure is None else 3))
    with pytest.raises(DeviceError, match="timeout"):
        other.synchronize(1000)
    other.close(0)
    assert calls == [1, 3], "the end of the stream is the end of the wait"
    stream.record(event)
    assert event.wait(SECOND), "the next record of the event is not lost"
    world.close()


def test_late_news_while_the_stream_goes_on() -> None:
    inner = VirtualDevice({"load": Link("load", SECOND)})
    world = World(inner, Rule(Late(1000), kind="host", nth=0), Rule(Late(1000), kind="record"))
    stream, event = world.device.stream("load"), world.device.event()
    calls: list[tuple[str, int]] = []
    stream.copy(world.dst, world.src, piece(0, 100))
    stream.launch_host(lambda _: calls.append(("first", inner.now_ns())))
    stream.record(event)
    stream.copy(world.dst, world.src, piece(0, 100))
    stream.launch_host(lambda _: calls.append(("second", inner.now_ns())))
    assert event.wait(SECOND)
    assert inner.now_ns() == 1100
    assert sorted(calls) == [("first", 1100), ("second", 200)]
    world.close()


def test_late_news_carries_the_failure(inner: Device) -> None:
    world = World(inner, Rule(Late(MS), kind="record"))
    stream, event = world.device.stream("load"), world.device.event()
    stream.copy(world.dst, world.src, piece(BYTES, 1))
    stream.record(event)
    with pytest.raises(DeviceError, match="copy_failed"):
        event.wait(30 * SECOND)
    world.close()


def test_close_delivers_late_news(inner: Device) -> None:
    hour = 3600 * SECOND
    world = World(inner, Rule(Late(hour), kind="host"), Rule(Late(hour), kind="record"))
    stream, event = world.device.stream("load"), world.device.event()
    calls: list[DeviceError | None] = []
    stream.launch_host(calls.append)
    stream.record(event)
    stream.close(SECOND)
    assert calls == []
    world.device.close(SECOND)
    assert calls == [None]
    assert event.query()
    world.close()


def test_host_function_called_twice(inner: Device) -> None:
    world = World(inner, Rule(Twice(2 * MS), kind="host", nth=0))
    stream = world.device.stream("load")
    again = threading.Event()
    calls: list[str] = []

    def count(name: str) -> None:
        calls.append(name)
        if calls.count("first") == 2:
            again.set()

    stream.launch_host(lambda _: count("first"))
    stream.launch_host(lambda _: count("second"))
    if isinstance(inner, VirtualDevice):
        inner.advance(10 * MS)
    assert again.wait(30)
    stream.synchronize(SECOND)  # the repetition comes from a thread of its own, before or after
    assert sorted(calls) == ["first", "first", "second"]
    assert calls[0] == "first"
    assert world.whats().count("called") == 3
    world.close()


def test_swapped_copies() -> None:
    inner = VirtualDevice({"load": Link("load", SECOND)})
    world = World(inner, Rule(Swap(), kind="copy", nth=0))
    stream = world.device.stream("load")
    first, second = piece(0, 100), piece(500, 100)
    stream.copy(world.dst, world.src, first)
    first.add(800, 800, 100)  # not part of the copy
    stream.copy(world.dst, world.src, second)
    inner.advance(100)
    assert not world.arrived(0, 100)
    assert world.arrived(500, 600)
    inner.advance(100)
    assert world.arrived(0, 100)
    assert not world.arrived(800, 900)
    world.close()


@pytest.mark.parametrize("mark", ["host", "record", "wait", "synchronize", "close"])
def test_copy_is_not_swapped_with_a_mark(inner: Device, mark: str) -> None:
    world = World(inner, Rule(Swap(), kind="copy", nth=0))
    stream, event = world.device.stream("load"), world.device.event()
    event.arm()(None)
    arrived: list[bool] = []
    stream.copy(world.dst, world.src, piece(0, 100))
    if mark == "host":
        stream.launch_host(lambda _: arrived.append(world.arrived(0, 100)))
    elif mark == "record":
        stream.record(event)
    elif mark == "wait":
        stream.wait(event)
    if mark == "close":
        stream.close(SECOND)
    else:
        stream.synchronize(SECOND)
    assert world.arrived(0, 100)
    assert arrived in ([], [True])
    assert "not swapped" in world.whats()
    world.close()


def test_hanging_stream_goes_on_when_resumed(inner: Device) -> None:
    world = World(inner, Rule(Hang(), stream="load", kind="copy"))
    stream, event = world.device.stream("load"), world.device.event()
    stream.copy(world.dst, world.src, piece(0, 10))
    stream.record(event)
    assert not event.wait(MS)
    assert not world.arrived(0, 10)
    assert world.device.resume("save") == 0
    assert world.device.resume("load") == 1
    assert event.wait(SECOND)
    assert world.arrived(0, 10)
    assert world.device.resume("load") == 0
    assert world.whats() == ["hang", "submitted", "resumed"]
    world.close()


def test_hanging_stream_can_be_closed(inner: Device) -> None:
    world = World(inner, Rule(Hang(), kind="copy"))
    stream = world.device.stream("load")
    calls: list[DeviceError | None] = []
    stream.copy(world.dst, world.src, piece(0, 10))
    stream.launch_host(calls.append)
    stream.close(MS)
    assert [failure.code for failure in calls if failure] == [DeviceCode.CANCELLED]
    assert world.dst.read_bytes(0, 10) == bytes(10)
    world.close()


def journal_of(seed: int) -> tuple[Entry, ...]:
    """Run 200 operations of two streams under random faults."""
    inner = VirtualDevice({name: Link(name, SECOND) for name in ("load", "save")})
    rules = (
        Rule(Fail(), kind="copy", probability=0.2),
        Rule(Delay(50), probability=0.1),
        Rule(Twice(30), kind="host", probability=0.3),
    )
    world = World(inner, *rules, seed=seed)
    streams = [world.device.stream(name) for name in ("load", "save")]
    for number in range(100):
        streams[number % 2].copy(world.dst, world.src, piece(number, 1))
        streams[number % 3 % 2].launch_host(lambda _: None)
    assert inner.run_until_idle(SECOND)
    journal = world.device.journal()
    world.close()
    return journal


def test_equal_seeds_make_equal_journals() -> None:
    assert journal_of(1) == journal_of(1)
    assert journal_of(1) != journal_of(2)
    taken = [entry.what for entry in journal_of(1)]
    for what in ("fail", "delay", "twice", "submitted", "called"):
        assert what in taken


def test_draws_of_a_stream_do_not_depend_on_other_streams() -> None:
    def faults(order: str) -> dict[str, list[str]]:
        inner = VirtualDevice({})
        device = FaultyDevice(inner, [Rule(Delay(1), probability=0.5)], seed=3)
        streams = {name: device.stream(name) for name in "ab"}
        for name in order:
            streams[name].record(device.event())
        got: dict[str, list[str]] = {"a": [], "b": []}
        for entry in device.journal():
            got[entry.op.stream].append(entry.what)
        device.close(SECOND)
        return got

    assert faults("ab" * 20) == faults("a" * 20 + "b" * 20)


def test_journal_has_time_and_operation() -> None:
    inner = VirtualDevice({"load": Link("load", SECOND)})
    world = World(inner, Rule(Fail(), kind="copy", nth=1))
    stream = world.device.stream("load")
    stream.copy(world.dst, world.src, piece(0, 100))
    inner.advance(40)
    stream.copy(world.dst, world.src, piece(0, 9))
    stream.launch_host(lambda _: None)
    assert inner.run_until_idle(SECOND)
    copy_of_9, host = OpInfo("load", "copy", 1, 9), OpInfo("load", "host", 0)
    assert world.device.journal() == (
        Entry(0, OpInfo("load", "copy", 0, 100), "submitted"),
        Entry(40, copy_of_9, "fail"),
        Entry(40, host, "submitted"),
        Entry(100, host, "called: injected"),
    )
    world.close()
