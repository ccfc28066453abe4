"""Virtual time: durations are exact, early readers see torn bytes, nothing hangs or sleeps."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from engine_shim import device_virtual
from engine_shim.device import DeviceCode, DeviceError, Event
from engine_shim.device_virtual import Interval, Link, VirtualDevice
from engine_shim.device_virtual_stream import VirtualStream
from kvd.plan.runs import CopySpans

GB = 1_000_000_000
MS = 1_000_000
SECOND = 1_000_000_000


def span(nbytes: int, dst: int = 0, src: int = 0) -> CopySpans:
    """Make a copy of one span."""
    made = CopySpans()
    made.add(dst, src, nbytes)
    return made


def make(**links: Link) -> VirtualDevice:
    """Make a device that moves no bytes."""
    return VirtualDevice(links, move_bytes=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [((0, 0), "bytes_per_s is 0"), ((-5, 0), "bytes_per_s is -5"), ((1, -1), "latency_ns is -1")],
)
def test_link_that_cannot_be(fields: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Link("load", *fields)


def test_device_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="index is -1"):
        VirtualDevice({}, index=-1)
    with pytest.raises(ValueError, match="queue_max is 0"):
        VirtualDevice({}, queue_max=0)
    with pytest.raises(ValueError, match="two different links of name bus"):
        VirtualDevice({"a": Link("bus", 1), "b": Link("bus", 2)})


def test_copy_on_a_stream_without_link() -> None:
    device = make()
    memory = device.alloc(10, "m")
    with pytest.raises(ValueError, match="stream compute has no link"):
        device.stream("compute").copy(memory, memory, span(1, 5))
    memory.close()


def test_other_threads_are_refused() -> None:
    device = make()
    stream = device.stream("load")
    refusals: list[DeviceCode] = []

    def work() -> None:
        for call in (device.bind_thread, lambda: stream.synchronize(0), lambda: device.advance(1)):
            with pytest.raises(DeviceError, match="make the work of other threads pumps") as error:
                call()
            refusals.append(error.value.code)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert refusals == [DeviceCode.THREAD_UNBOUND] * 3
    device.bind_thread()


def test_time_moves_only_when_asked() -> None:
    device = make(load=Link("load", GB))
    src, dst = device.alloc(1000, "src"), device.alloc(1000, "dst")
    stream, event = device.stream("load"), device.event()
    calls: list[int] = []
    stream.launch_host(lambda _: calls.append(device.now_ns()))
    stream.copy(dst, src, span(1000))
    stream.record(event)
    assert not event.query()
    assert (device.now_ns(), calls) == (0, [])
    assert not event.wait(999)
    assert (device.now_ns(), calls) == (999, [0])
    assert event.wait(1)
    assert device.now_ns() == 1000
    assert event.wait(50)
    assert device.now_ns() == 1000, "what is complete takes no time"
    src.close()
    dst.close()


@pytest.mark.parametrize(
    ("bytes_per_s", "latency_ns", "nbytes", "expected"),
    [(GB, 0, 1, 1), (3 * GB, 0, 1, 1), (3 * GB, 0, 4, 2), (GB, 700, 300, 1000), (1, 5, 0, 5)],
)
def test_duration_is_rounded_up(
    bytes_per_s: int, latency_ns: int, nbytes: int, expected: int
) -> None:
    device = make(load=Link("load", bytes_per_s, latency_ns))
    memory = device.alloc(4096, "m")
    device.stream("load").copy(memory, memory, span(nbytes, 2048))
    assert device.run_until_idle(SECOND)
    assert device.now_ns() == expected
    assert device.timeline() == (Interval("load", "copy", 0, expected),)
    memory.close()


def test_streams_share_a_link_of_one_name() -> None:
    bus = Link("bus", GB)
    device = make(a=bus, b=bus, c=Link("other", GB))
    memory = device.alloc(4096, "m")
    ends: dict[str, int] = {}
    for name in ("a", "b", "c"):
        stream = device.stream(name)
        for number in range(2):
            stream.copy(memory, memory, span(100, 2048))
            key = f"{name}{number}"
            stream.launch_host(lambda _, it=key: ends.update({it: device.now_ns()}))  # type: ignore[misc]
    assert device.run_until_idle(SECOND)
    assert ends == {"a0": 100, "b0": 200, "a1": 300, "b1": 400, "c0": 100, "c1": 200}
    memory.close()


def test_early_reader_and_early_writer_see_torn_bytes() -> None:
    device = VirtualDevice({"load": Link("load", GB)})
    src, dst = device.alloc(100, "src"), device.alloc(100, "dst")
    src.write_bytes(0, b"a" * 100)
    stream = device.stream("load")
    pieces = span(40)
    pieces.add(60, 50, 20)
    stream.copy(dst, src, pieces)
    device.advance(59)
    assert dst.read_bytes(0, 100) == b"a" * 20 + bytes(40) + b"a" * 10 + bytes(30)
    src.write_bytes(0, b"b" * 100)
    device.advance(1)
    expected = b"a" * 20 + b"b" * 20 + bytes(20) + b"a" * 10 + b"b" * 10 + bytes(20)
    assert dst.read_bytes(0, 100) == expected
    src.close()
    dst.close()


def test_memory_that_goes_during_its_copy() -> None:
    device = VirtualDevice({"load": Link("load", GB)})
    src, dst = device.alloc(100, "src"), device.alloc(100, "dst")
    stream = device.stream("load")
    stream.copy(dst, src, span(100))
    device.advance(50)
    src.close()
    with pytest.raises(DeviceError, match=r"copy_failed: .*closed"):
        stream.synchronize(SECOND)
    assert device.now_ns() == 100, "a failed copy takes its time too"
    dst.close()


def test_busy_stream_and_busy_host() -> None:
    device = make()
    stream, event = device.stream("compute"), device.event()
    stream.busy(300)
    stream.record(event)
    device.advance(100)
    assert not event.query()
    assert event.wait(SECOND)
    assert device.now_ns() == 300
    assert device.timeline() == (
        Interval("", "host", 0, 100),
        Interval("compute", "busy", 0, 300),
    )
    with pytest.raises(ValueError, match="timeout_ns is -1"):
        device.advance(-1)


def test_run_until_idle_has_a_deadline() -> None:
    device = make()
    stream = device.stream("compute")
    stream.busy(1000)
    assert not device.run_until_idle(400)
    assert device.now_ns() == 400
    assert device.run_until_idle(600)
    assert device.now_ns() == 1000


def test_raising_host_function_ends_the_step_and_fails_its_operation() -> None:
    device = make()
    stream, event = device.stream("save"), device.event()

    def fail(_: DeviceError | None) -> None:
        raise RuntimeError("a bug")

    stream.launch_host(fail)
    stream.record(event)
    with pytest.raises(RuntimeError, match="a bug"):
        device.run_until_idle(SECOND)
    with pytest.raises(DeviceError, match="host_function_failed: host function on stream save"):
        event.wait(SECOND)
    assert device.statistics().failed == 1


def test_call_later_is_a_callback() -> None:
    device = make()
    stream = device.stream("a")
    calls: list[int] = []

    def function() -> None:
        calls.append(device.now_ns())
        with pytest.raises(DeviceError, match="in_host_function"):
            stream.launch_host(print)

    device.call_later(70, function)
    device.call_later(30, function)
    device.advance(100)
    assert calls == [30, 70]


def test_pump_stands_in_for_a_thread() -> None:
    device = make(load=Link("load", GB))
    memory = device.alloc(4096, "m")
    stream, inbox, ends = device.stream("load"), deque[int](), list[int]()

    def submit(number: int) -> None:
        stream.copy(memory, memory, span(100, 2048))
        stream.launch_host(lambda _: inbox.append(number))

    def pump() -> bool:
        if not inbox:
            return False
        number = inbox.popleft()
        ends.append(device.now_ns())
        if number < 4:
            submit(number + 1)
        return True

    device.add_pump(pump)
    submit(0)
    device.advance(1000)
    assert ends == [100, 200, 300, 400, 500]
    memory.close()


def test_pump_must_not_wait() -> None:
    device = make()
    stream = device.stream("load")
    refusals: list[str] = []

    def pump() -> bool:
        if not refusals:
            for wait in (stream.synchronize, device.advance):
                with pytest.raises(DeviceError, match="a pump never waits") as error:
                    wait(1)
                refusals.append(str(error.value))
        return False

    device.add_pump(pump)
    device.advance(10)
    assert len(refusals) == 2


def test_pump_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_virtual, "_ROUNDS_MAX", 10)
    device = make()
    device.add_pump(lambda: True)
    with pytest.raises(RuntimeError, match="no rest at 0 ns after 10 rounds"):
        device.advance(1)


def test_close_during_a_long_copy_says_that_it_still_runs() -> None:
    device = make(load=Link("load", 1))
    memory = device.alloc(4096, "m")
    stream = device.stream("load")
    calls: list[DeviceError | None] = []
    stream.copy(memory, memory, span(10, 100))
    stream.launch_host(calls.append)
    with pytest.raises(DeviceError, match="copy of 10 bytes on stream load runs"):
        stream.close(100)
    assert [failure.code for failure in calls if failure] == [DeviceCode.ABANDONED]
    assert device.statistics().in_progress == 1
    stream.close(20 * SECOND)
    assert device.statistics().in_progress == 0
    memory.close()


class Prefill:
    """A plain rolling prefill: loads run ahead, one layer computes after the other."""

    def __init__(self, layers: int, transfer_ns: int, compute_ns: int, window: int) -> None:
        self.device = make(load=Link("load", GB))
        self.memory = self.device.alloc(2 * transfer_ns, "m")
        self.stream: VirtualStream = self.device.stream("load")
        self.transfer_ns, self.compute_ns = transfer_ns, compute_ns
        self.layers, self.window = layers, window

    def load(self) -> Event:
        event = self.device.event()
        self.stream.copy(self.memory, self.memory, span(self.transfer_ns, self.transfer_ns))
        self.stream.record(event)
        return event

    def exposed_delays(self) -> list[int]:
        """Run; return for each layer how long compute stood still for its load."""
        loads = deque(self.load() for _ in range(min(self.window, self.layers)))
        delays = []
        for layer in range(self.layers):
            before = self.device.now_ns()
            assert loads.popleft().wait(SECOND)
            delays.append(self.device.now_ns() - before)
            self.device.advance(self.compute_ns)
            if layer + self.window < self.layers:
                loads.append(self.load())
        self.memory.close()
        return delays


@pytest.mark.parametrize(
    ("transfer_ns", "compute_ns"), [(100, 100), (100, 250), (250, 100), (100, 0), (101, 100)]
)
def test_exposed_delay_is_transfer_less_compute(transfer_ns: int, compute_ns: int) -> None:
    prefill = Prefill(10, transfer_ns, compute_ns, window=3)
    exposed = max(0, transfer_ns - compute_ns)
    assert prefill.exposed_delays() == [transfer_ns] + [exposed] * 9
    assert prefill.device.now_ns() == transfer_ns + 9 * exposed + 10 * compute_ns


def test_no_lookahead_hides_nothing() -> None:
    assert Prefill(5, 100, 400, window=1).exposed_delays() == [100] * 5


def test_equal_runs_have_equal_timelines() -> None:
    def run() -> tuple[Interval, ...]:
        prefill = Prefill(20, 170, 130, window=2)
        prefill.exposed_delays()
        return prefill.device.timeline()

    assert run() == run()
