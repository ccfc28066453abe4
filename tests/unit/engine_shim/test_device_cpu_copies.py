"""Copies that a CPU stream hands to its native thread: when, in which order, and how they end."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from engine_shim import device_cpu_stream
from engine_shim.device import DeviceCode, DeviceError, DeviceMemory, Event, Stream
from engine_shim.device_cpu import CpuDevice
from kvd.plan.runs import CopySpans
from tests.unit.engine_shim.device_rig import SECOND, WAIT_S, SteppedQueue, spans

BYTES = 4096


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    """Give a device that is closed in the end with nothing in progress."""
    made = CpuDevice()
    yield made
    made.close(10 * SECOND)
    counts = made.statistics()
    assert counts.submitted == counts.completed + counts.failed + counts.cancelled


@pytest.fixture
def memory(device: CpuDevice) -> Iterator[DeviceMemory]:
    """Give memory whose byte 0 is 1; `step` moves it on."""
    made = device.alloc(BYTES, "m")
    made.write_bytes(0, b"\1")
    yield made
    made.close()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[SteppedQueue]:
    """Give the native queue of streams made from now on; its copies wait for the test."""
    made = SteppedQueue()
    monkeypatch.setattr(device_cpu_stream, "CopyQueue", lambda: made)
    yield made
    made.close()  # no thread waits for a test that failed


def step(at: int) -> CopySpans:
    """A copy of byte `at` to the next one."""
    return spans((at + 1, at, 1))


class Stuck:
    """A host function that returns when it is told to."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

    def __call__(self, _: DeviceError | None) -> None:
        self.entered.set()
        self.leave.wait(WAIT_S)


def run_all(queue: SteppedQueue, count: int) -> None:
    for _ in range(count):
        queue.begin()
        queue.end()


def recorded(device: CpuDevice, stream: Stream) -> Event:
    event = device.event()
    stream.record(event)
    return event


def code_of(event: Event) -> DeviceCode | None:
    try:
        assert event.wait(10 * SECOND)
    except DeviceError as error:
        return error.code
    return None


# --- what a copy waits for ------------------------------------------------------------------------


def test_a_copy_runs_behind_a_notification_that_hangs(
    device: CpuDevice, memory: DeviceMemory
) -> None:
    stream, stuck = device.stream("a"), Stuck()
    stream.notify_host(stuck)
    assert stuck.entered.wait(WAIT_S)
    for at in range(3):
        stream.copy(memory, memory, step(at))
    event = recorded(device, stream)
    deadline = device.now_ns() + 10 * SECOND
    while memory.read_bytes(3, 1) == b"\0":
        assert device.now_ns() < deadline
    assert not event.query(), "it says that the notification has ended, too"
    stuck.leave.set()
    assert event.wait(10 * SECOND)


@pytest.mark.parametrize("hold", ["host function", "event", "failed event"])
def test_a_copy_does_not_run_before_what_holds_it(
    device: CpuDevice, memory: DeviceMemory, queue: SteppedQueue, hold: str
) -> None:
    stream, stuck, gate = device.stream("a"), Stuck(), device.event()
    open_gate = gate.arm()
    if hold == "host function":
        stream.launch_host(stuck)
    else:
        stream.wait(gate)
    pieces = step(0)
    stream.copy(memory, memory, pieces)
    pieces.add(100, 0, 1)  # not part of the copy
    stream.copy(memory, memory, step(1))
    assert queue.submitted == 0
    stuck.leave.set()
    open_gate(DeviceError(DeviceCode.INJECTED, "bad") if hold == "failed event" else None)
    queue.begin()
    stream.copy(memory, memory, step(2))
    assert queue.submitted == 1, "those that were kept go first"
    queue.end()
    run_all(queue, 2)
    assert (code_of(recorded(device, stream)) is None) == (hold != "failed event")
    assert memory.read_bytes(0, 5) == b"\1\1\1\1\0"
    assert memory.read_bytes(100, 1) == b"\0"
    stream.copy(memory, memory, step(3))
    assert queue.submitted == 4, "nothing holds this one"
    run_all(queue, 1)


def test_a_copy_runs_behind_the_notification_of_one_that_waited(
    device: CpuDevice, memory: DeviceMemory
) -> None:
    """And the next one waits again for what holds it, once."""
    stream, gate, stuck = device.stream("a"), device.event(), Stuck()
    open_gate = gate.arm()
    stream.wait(gate)
    stream.copy(memory, memory, step(0), stuck)
    open_gate(None)
    assert stuck.entered.wait(WAIT_S)
    stream.copy(memory, memory, step(1))
    deadline = device.now_ns() + 10 * SECOND
    while memory.read_bytes(2, 1) == b"\0":
        assert device.now_ns() < deadline
    stuck.leave.set()
    stream.synchronize(10 * SECOND)
    again = Stuck()
    stream.launch_host(again)
    stream.copy(memory, memory, step(2))
    assert again.entered.wait(WAIT_S)
    stream.copy(memory, memory, step(3), lambda _: None)
    assert memory.read_bytes(3, 1) == b"\0"
    again.leave.set()
    stream.synchronize(10 * SECOND)
    assert memory.read_bytes(4, 1) == b"\1"


def test_copies_are_handed_over_while_others_run(
    device: CpuDevice, memory: DeviceMemory, queue: SteppedQueue
) -> None:
    stream, calls = device.stream("a"), []
    events = []
    for at in range(4):
        stream.copy(memory, memory, step(at))
        stream.notify_host(partial(lambda it, _: calls.append(it), at))
        events.append(recorded(device, stream))
    assert queue.submitted == 4
    for at, event in enumerate(events):
        assert not event.query()
        queue.begin()
        assert not event.wait(0)
        queue.end()
        assert event.wait(10 * SECOND)
        assert calls == list(range(at + 1))


def test_a_copy_that_cannot_be_handed_over_waits_for_its_turn(
    device: CpuDevice, memory: DeviceMemory, queue: SteppedQueue
) -> None:
    stream = device.stream("a")
    queue.refusals = 1
    stream.copy(memory, memory, step(0))
    stream.copy(memory, memory, step(1))
    run_all(queue, 2)
    assert code_of(recorded(device, stream)) is None
    assert memory.read_bytes(0, 4) == b"\1\1\1\0"
    queue.refusals = 2
    stream.copy(memory, memory, step(2))
    assert code_of(recorded(device, stream)) is DeviceCode.COPY_FAILED
    with pytest.raises(DeviceError, match="no thread"):
        stream.synchronize(10 * SECOND)


def test_copies_count_for_the_bound_of_the_queue(
    memory: DeviceMemory, queue: SteppedQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CpuDevice(queue_max=2, submit_timeout_ns=10 * SECOND)
    stream = device.stream("a")
    queue.until(lambda: queue.sleepers)
    for at in range(3):
        stream.copy(memory, memory, step(at))  # at the third, the stream's thread takes the first
    monkeypatch.setattr(device, "submit_timeout_ns", 0)
    with pytest.raises(DeviceError, match=r"2 operations are queued \(queue_max\)"):
        stream.copy(memory, memory, step(3))
    assert queue.submitted == device.statistics().submitted == 3
    run_all(queue, 3)
    device.close(10 * SECOND)
    assert device.statistics().completed == 3


# --- how they end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("drain", [True, False])
def test_close_cancels_what_has_not_begun(
    device: CpuDevice,
    memory: DeviceMemory,
    queue: SteppedQueue,
    monkeypatch: pytest.MonkeyPatch,
    drain: bool,
) -> None:
    monkeypatch.setattr(device_cpu_stream, "CANCEL_GRACE_NS", 10 * SECOND)
    stream = device.stream("a")
    for at in range(4):
        stream.copy(memory, memory, step(at))
    event = recorded(device, stream)
    queue.begin()

    raised: list[DeviceError] = []

    def close() -> None:
        device.bind_thread()
        try:
            stream.close(0 if drain else 10 * SECOND, drain=drain)
        except DeviceError as error:
            raised.append(error)

    closer = threading.Thread(target=close)
    closer.start()
    queue.until(lambda: len(queue.cancelled) == 3)
    queue.end()
    closer.join(WAIT_S)
    assert queue.cancelled == [4, 3, 2], "none could begin behind one that was taken back"
    assert raised == []
    assert code_of(event) is DeviceCode.CANCELLED
    counts = device.statistics()
    assert (counts.completed, counts.cancelled) == (1, 4)
    assert memory.read_bytes(0, 3) == b"\1\1\0"


def test_copies_behind_a_notification_that_hangs_at_the_close(
    device: CpuDevice, memory: DeviceMemory, queue: SteppedQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, stuck = device.stream("a"), Stuck()
    stream.notify_host(stuck)
    assert stuck.entered.wait(WAIT_S)
    stream.copy(memory, memory, step(0))
    stream.copy(memory, memory, step(1))
    event = recorded(device, stream)
    run_all(queue, 1)
    with monkeypatch.context() as patch:
        patch.setattr(device_cpu_stream, "CANCEL_GRACE_NS", 50_000_000)
        with pytest.raises(DeviceError, match=r"timeout: .* notification of stream a runs"):
            stream.close(0)
    assert code_of(event) is DeviceCode.ABANDONED
    counts = device.statistics()
    assert (counts.completed, counts.cancelled, counts.in_progress) == (1, 2, 1)
    stuck.leave.set()
    stream.close(10 * SECOND)
    assert memory.read_bytes(0, 3) == b"\1\1\0"


def test_memory_that_goes_while_its_copies_are_queued(device: CpuDevice) -> None:
    """With the real queue: each copy has its bytes or fails, and the stream goes on."""
    stream, kept = device.stream("a"), device.alloc(BYTES, "kept")
    for _ in range(100):
        gone = device.alloc(BYTES, "gone")
        gone.write_bytes(0, b"x" * BYTES)
        stream.copy(kept, gone, spans((0, 0, BYTES)))
        event = recorded(device, stream)
        stream.copy(kept, kept, spans((0, 8, 8)))
        gone.close()
        assert code_of(event) in (None, DeviceCode.COPY_FAILED)
        assert code_of(recorded(device, stream)) is None
    stream.launch_host(lambda _: None)
    kept.close()


# --- order ----------------------------------------------------------------------------------------

SLOTS = 4
SLOT_BYTES = 32 << 10


class Mixture:
    """Random operations of one stream, and a model that runs them one after another."""

    def __init__(self, device: CpuDevice, seed: int) -> None:
        self.draw = random.Random(seed)
        self.device = device
        self.stream, self.other = device.stream("a"), device.stream("b")
        self.memory = device.alloc(SLOTS * SLOT_BYTES, "slots")
        self.model = bytearray(self.draw.randbytes(SLOTS * SLOT_BYTES))
        self.memory.write_bytes(0, self.model)
        self.closed_gates: list[Callable[[DeviceError | None], None]] = []
        self.events: list[Event] = []
        self.calls: list[int] = []
        self.marks = 0
        self.wrong: list[str] = []

    def copy(self) -> None:
        """Copy a part of one slot into another: mostly of the one that was written last."""
        src, dst = self.draw.sample(range(SLOTS), 2)
        length = self.draw.choice((64, 4096, SLOT_BYTES))
        to = dst * SLOT_BYTES + self.draw.randrange(SLOT_BYTES - length + 1)
        start = src * SLOT_BYTES + self.draw.randrange(SLOT_BYTES - length + 1)
        self.stream.copy(self.memory, self.memory, spans((to, start, length)))
        self.model[to : to + length] = self.model[start : start + length]

    def record(self) -> None:
        """Record a new event, or one of before."""
        event = self.draw.choice(self.events) if self.draw.random() < 0.3 and self.events else None
        if event is None:
            event = self.device.event()
            self.events.append(event)
        self.stream.record(event)

    def wait(self) -> None:
        """Wait for the host, or for another stream."""
        event = self.device.event()
        complete = event.arm()
        self.closed_gates.append(complete)
        if self.draw.random() < 0.5:
            self.other.wait(event)
            event = self.device.event()
            self.other.record(event)
        self.stream.wait(event)

    def launch_host(self) -> None:
        """Look at the memory: all before has landed, and nothing behind."""
        number, expected = self.marks, bytes(self.model)
        self.marks += 1

        def look(_: DeviceError | None) -> None:
            self.calls.append(number)
            if self.memory.read_bytes(0, len(expected)) != expected:
                self.wrong.append(f"host function {number}")

        self.stream.launch_host(look)

    def notify_host(self) -> None:
        """Be called in turn; now and then only when copies behind it may have run."""
        number = self.marks
        self.marks += 1
        self.stream.notify_host(lambda _: self.calls.append(number))

    def open_gate(self) -> None:
        """Let a wait end, in any order."""
        if self.closed_gates:
            at = self.draw.randrange(len(self.closed_gates))
            self.closed_gates.pop(at)(None)


@pytest.mark.parametrize("seed", range(40))
def test_any_mixture_is_as_if_one_came_after_another(device: CpuDevice, seed: int) -> None:
    mixture = Mixture(device, seed)
    weights = dict.fromkeys(("record", "wait", "launch_host", "notify_host", "open_gate"), 0.0)
    for name in weights:
        weights[name] = mixture.draw.choice((0.0, 0.3, 1.0))
    weights["copy"] = 2.0
    for _ in range(120):
        (name,) = mixture.draw.choices(list(weights), list(weights.values()))
        getattr(mixture, name)()
        counts = device.statistics()
        assert 0 <= counts.in_progress <= counts.submitted
    while mixture.closed_gates:
        mixture.open_gate()
    mixture.stream.synchronize(10 * SECOND)
    assert mixture.wrong == []
    assert mixture.calls == list(range(mixture.marks))
    assert mixture.memory.read_bytes(0, len(mixture.model)) == mixture.model
    assert all(event.query() for event in mixture.events)
    mixture.other.synchronize(10 * SECOND)
    counts = device.statistics()
    assert (counts.completed, counts.in_progress) == (counts.submitted, 0)
    mixture.memory.close()
