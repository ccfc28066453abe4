"""The CPU device beyond the common promises: threads, files, and what a host function may break."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine_shim import device_cpu_stream, device_memory
from engine_shim.device import DeviceCode, DeviceError
from engine_shim.device_cpu import CpuDevice
from engine_shim.device_memory import MemfdMemory
from kvd.plan.runs import CopySpans
from kvd_kernels.host import CopyQueue, Mapping

SECOND = 1_000_000_000
WAIT_S = 30.0


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    """Give a device that is closed in the end with nothing in progress."""
    made = CpuDevice()
    yield made
    made.close(10 * SECOND)
    assert made.statistics().in_progress == 0


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> list[BaseException | None]:
    """Collect what threads raise, instead of letting it fail the test."""
    seen: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))
    return seen


def one_span(nbytes: int) -> CopySpans:
    """Make a copy of the first bytes."""
    made = CopySpans()
    made.add(0, 0, nbytes)
    return made


def open_device_files() -> list[str]:
    """List this process's fds of device memory."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the fd of the listing itself
        if "memfd:kvd-device" in link:
            found.append(link)
    return found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"index": -1}, "index is -1"),
        ({"queue_max": 0}, "queue_max is 0"),
        ({"copy_threads": 0}, "copy_threads is 0"),
        ({"submit_timeout_ns": -1}, "timeout_ns is -1"),
    ],
)
def test_device_that_cannot_be(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CpuDevice(**arguments)


def test_kernel_refuses_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, length: int, *, writable: bool) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    before = open_device_files()
    monkeypatch.setattr(device_memory, "Mapping", refuse)
    with pytest.raises(DeviceError, match="memory_short: memory m of 10 bytes cannot be made"):
        CpuDevice().alloc(10, "m")
    assert open_device_files() == before


def test_memory_is_a_file_that_cannot_be_cut_short(device: CpuDevice) -> None:
    memory = device.alloc(10_000, "slots")
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 100)
    elsewhere = Mapping(memory.fd, memory.nbytes, writable=False)
    memory.write_bytes(9_990, b"0123456789")
    assert elsewhere.read_bytes(9_990, 10) == b"0123456789"
    elsewhere.close()
    memory.close()
    memory.close()
    with pytest.raises(ValueError, match="memory slots is closed"):
        _ = memory.fd
    assert open_device_files() == []


def test_memory_in_view_stays(device: CpuDevice) -> None:
    memory = device.alloc(100, "viewed")
    view = memory.mapping.view()
    with pytest.raises(BufferError, match="live views"):
        memory.close()
    memory.write_bytes(0, b"still")
    assert bytes(view[:5]) == b"still"
    view.release()
    memory.close()


def test_unbound_thread_is_refused(device: CpuDevice) -> None:
    stream, event = device.stream("load"), device.event()
    event.arm()
    codes: list[DeviceCode] = []

    def work() -> None:
        for call in (
            lambda: stream.record(event),
            lambda: stream.synchronize(0),
            lambda: event.wait(0),
            lambda: device.stream("other"),
            lambda: device.alloc(1, "m"),
            lambda: stream.close(0),
            lambda: device.close(0),
        ):
            with pytest.raises(DeviceError, match="thread stranger is not bound to cpu0") as error:
                call()
            codes.append(error.value.code)
        device.bind_thread()
        stream.record(event)
        stream.synchronize(10 * SECOND)

    thread = threading.Thread(target=work, name="stranger")
    thread.start()
    thread.join(WAIT_S)
    assert codes == [DeviceCode.THREAD_UNBOUND] * 7
    assert device.statistics().submitted == 1
    assert event.query()


def test_binding_is_to_one_device() -> None:
    first, second = CpuDevice(0), CpuDevice(1)
    stream = second.stream("load")
    refusals: list[str] = []

    def work() -> None:
        first.bind_thread()
        with pytest.raises(DeviceError) as error:
            stream.synchronize(0)
        refusals.append(str(error.value))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WAIT_S)
    assert "not bound to cpu1" in refusals[0]
    second.close(SECOND)


def test_host_functions_run_in_the_streams_thread(device: CpuDevice) -> None:
    stream = device.stream("save")
    names: list[str] = []
    stream.launch_host(lambda _: names.append(threading.current_thread().name))
    stream.synchronize(10 * SECOND)
    assert names == ["cpu0-save"]


def test_streams_run_at_the_same_time(device: CpuDevice) -> None:
    one, two = device.stream("a"), device.stream("b")
    here, there = threading.Event(), threading.Event()
    met: list[bool] = []

    def meet(mine: threading.Event, other: threading.Event) -> None:
        mine.set()
        met.append(other.wait(WAIT_S))

    one.launch_host(lambda _: meet(here, there))
    two.launch_host(lambda _: meet(there, here))
    one.synchronize(30 * SECOND)
    two.synchronize(30 * SECOND)
    assert met == [True, True]


def test_submission_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice(queue_max=1, submit_timeout_ns=30 * SECOND)
    stream, gate = device.stream("load"), device.event()
    open_gate = gate.arm()
    stream.wait(gate)
    stream.record(device.event())  # when this is accepted, the wait is no longer queued
    waiting, submitted = threading.Event(), threading.Event()
    wait_until = device.shared.wait_until

    def noticed(done: Callable[[], bool], timeout_ns: int) -> bool:
        if not done():
            waiting.set()
        return wait_until(done, timeout_ns)

    def submit() -> None:
        device.bind_thread()
        stream.record(device.event())
        submitted.set()

    with monkeypatch.context() as patch:
        patch.setattr(device.shared, "wait_until", noticed)
        thread = threading.Thread(target=submit)
        thread.start()
        assert waiting.wait(WAIT_S)
        assert not submitted.is_set()
        open_gate(None)
        assert submitted.wait(WAIT_S)
        thread.join(WAIT_S)
    device.close(10 * SECOND)
    assert device.statistics().completed == 3


def test_raising_host_functions_are_failures_and_the_stream_goes_on(
    device: CpuDevice, raised: list[BaseException | None]
) -> None:
    stream, event = device.stream("save"), device.event()
    calls: list[int] = []
    failed: list[int] = []

    def function(number: int, failure: DeviceError | None) -> None:
        if failure is not None:
            failed.append(number - 1)
        calls.append(number)
        if number % 100 == 7:
            raise RuntimeError(f"operation {number}")

    total = 10_000
    for start in range(0, total, 500):
        for number in range(start, start + 500):
            stream.launch_host(lambda failure, it=number: function(it, failure))  # type: ignore[misc]
        stream.record(event)
        with pytest.raises(DeviceError, match=r"host_function_failed: .*RuntimeError"):
            event.wait(30 * SECOND)
    assert calls == list(range(total)), "each is called once, in order"
    assert failed == list(range(7, total, 100)), "the next host function learns of it"
    counts = device.statistics()
    assert (counts.failed, counts.in_progress) == (len(failed), 0)
    with pytest.raises(DeviceError, match=r"RuntimeError\('operation 7'\)"):
        stream.synchronize(SECOND)
    stream.close(30 * SECOND)
    assert [str(error) for error in raised] == [f"operation {it}" for it in failed]


def test_stuck_host_function_does_not_keep_others_waiting(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, event = device.stream("save"), device.event()
    entered, leave = threading.Event(), threading.Event()
    calls: list[DeviceError | None] = []

    def stuck(_: DeviceError | None) -> None:
        entered.set()
        leave.wait(WAIT_S)

    stream.launch_host(stuck)
    for _ in range(5):
        stream.launch_host(calls.append)
    stream.record(event)
    assert entered.wait(WAIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(device_cpu_stream, "CANCEL_GRACE_NS", 50_000_000)
        with pytest.raises(DeviceError, match=r"timeout: stream save .* host function") as error:
            stream.close(0)
    assert error.value.code is DeviceCode.TIMEOUT
    assert [failure.code for failure in calls if failure] == [DeviceCode.ABANDONED] * 5
    with pytest.raises(DeviceError, match="abandoned: host function on stream save"):
        event.query()
    assert device.statistics().in_progress == 1, "the stuck one"
    leave.set()
    stream.close(30 * SECOND)
    assert device.statistics().in_progress == 0


def test_memory_that_goes_before_its_copy(device: CpuDevice) -> None:
    stream, gate, event = device.stream("load"), device.event(), device.event()
    src, dst = MemfdMemory(64, "src"), MemfdMemory(64, "dst")
    open_gate = gate.arm()
    stream.wait(gate)
    stream.copy(dst, src, one_span(64))
    stream.record(event)
    src.close()
    open_gate(None)
    with pytest.raises(DeviceError, match=r"copy_failed: .*closed"):
        event.wait(30 * SECOND)
    dst.close()


def test_close_of_the_device_closes_all_streams_and_raises_the_first_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = CpuDevice()
    src, dst = device.alloc(64, "src"), device.alloc(64, "dst")
    fine, bad, hung = (device.stream(name) for name in ("fine", "bad", "hung"))
    entered, leave = threading.Event(), threading.Event()

    def stuck(_: DeviceError | None) -> None:
        entered.set()
        leave.wait(WAIT_S)

    done: list[DeviceError | None] = []
    bad.copy(dst, src, one_span(65))
    hung.launch_host(stuck)
    fine.launch_host(done.append)
    assert entered.wait(WAIT_S)
    monkeypatch.setattr(device_cpu_stream, "CANCEL_GRACE_NS", 50_000_000)
    with pytest.raises(DeviceError, match="copy_failed"):
        device.close(50_000_000)
    assert done == [None]
    leave.set()
    device.close(30 * SECOND)
    assert device.statistics().in_progress == 0
    src.close()
    dst.close()


def test_threads_end_with_their_streams(device: CpuDevice) -> None:
    for _ in range(3):
        device.stream("load").close(10 * SECOND)
    names = [thread.name for thread in threading.enumerate()]
    assert "cpu0-load" not in names


@pytest.mark.parametrize(("nbytes", "threads"), [(device_cpu_stream.TEAM_BYTES_MIN, 2), (4096, 1)])
def test_only_a_large_copy_has_several_threads(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, threads: int
) -> None:
    teams: list[int] = []

    class Queue(CopyQueue):
        def submit(self, *lists: Any, threads: int = 1, **options: Any) -> int:
            teams.append(threads)
            return super().submit(*lists, threads=threads, **options)

    monkeypatch.setattr(device_cpu_stream, "CopyQueue", Queue)
    device = CpuDevice(copy_threads=2)
    src, dst = device.alloc(nbytes, "src"), device.alloc(nbytes, "dst")
    spans = CopySpans()
    spans.add(0, 0, nbytes)
    stream = device.stream("load")
    stream.copy(dst, src, spans)
    stream.synchronize(10_000_000_000)
    assert teams == [threads]
    device.close(10_000_000_000)
    src.close()
    dst.close()
