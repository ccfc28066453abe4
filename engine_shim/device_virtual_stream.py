"""Streams and events of a `VirtualDevice`."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from engine_shim.device import (
    Complete,
    DeviceCode,
    DeviceError,
    DeviceMemory,
    Event,
    HostFunction,
    PendingFailures,
    check_timeout,
)
from engine_shim.device_memory import mapping_of
from kvd.plan.runs import NOT_COPIED, CopySpans, SummedSpans
from kvd_kernels.host import Mapping, checksum_spans, copy_spans

if TYPE_CHECKING:
    from engine_shim.device_virtual import VirtualDevice

CANCEL_GRACE_NS: Final = 500_000_000
"""Time for the operation that runs to end after a cancel, on top of the timeout of `close`."""


@dataclass(slots=True, eq=False)
class Record:
    """One completion of one event, and who waits for it."""

    done: bool = False
    failure: DeviceError | None = None
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def complete(self, failure: DeviceError | None) -> None:
        """Complete it and wake who waits; calls after the first change nothing."""
        if not self.done:
            self.done, self.failure = True, failure
            waiting, self.waiting = self.waiting, []
            for wake in waiting:
                wake()


@dataclass(slots=True, eq=False)
class _Op:
    """A queued operation.

    start:  begins it; `VirtualStream._end` follows, at once or later.
    cancel: tells whoever waits for it, when it will not run.
    """

    label: str
    start: Callable[[_Op], None]
    cancel: Callable[[DeviceError], None] = lambda _: None
    end: Callable[[], None] = lambda: None
    ended: bool = False


class VirtualEvent:
    """An event of a VirtualDevice; made by `VirtualDevice.event`."""

    def __init__(self, device: VirtualDevice) -> None:
        """Belong to a device."""
        self.device = device
        self.last: Record | None = None

    def query(self) -> bool:
        """Return whether the last record is complete, without moving time; raise its failure."""
        record = self.recorded()
        if record.failure is not None:
            raise record.failure.again()
        return record.done

    def wait(self, timeout_ns: int) -> bool:
        """Let time pass until the last record is complete; False at the deadline."""
        check_timeout(timeout_ns)
        self.device.check("wait for an event", waits=True)
        record = self.recorded()
        self.device.count("host_waits")
        self.device.run_until(lambda: record.done, timeout_ns, "wait for an event")
        if record.failure is not None:
            raise record.failure.again()
        return record.done

    def arm(self) -> Complete:
        """Record it for completion by the host."""
        self.last = Record()
        return self.last.complete

    def recorded(self) -> Record:
        """Return the last record. Raises: ValueError without one."""
        if self.last is None:
            raise ValueError("event was never recorded; record it in a stream first")
        return self.last


class VirtualStream:
    """A queue of operations in virtual time; made by `VirtualDevice.stream`."""

    def __init__(self, device: VirtualDevice, name: str) -> None:
        """Be empty."""
        self.name: Final = name
        self._device = device
        self._queue: deque[_Op] = deque()
        self._running: _Op | None = None
        self._waits_for: Record | None = None
        self._failures = PendingFailures()
        self._closing = self._cancelling = False

    def copy(
        self,
        dst: DeviceMemory | Mapping,
        src: DeviceMemory | Mapping,
        spans: CopySpans,
        then: HostFunction | None = None,
    ) -> None:
        """Copy byte ranges: half of each span when the copy starts, the rest when it ends.

        Checksums are of the source as it is at the end.
        """
        to, source = mapping_of("dst", dst), mapping_of("src", src)
        link, engine = self._device.link(self.name)
        duration = link.duration_ns(spans.num_bytes)
        label = f"copy of {spans.num_bytes} bytes on stream {self.name}"
        moved = _moved(spans)
        error = _misfit(to, source, moved)
        failure = DeviceError(DeviceCode.COPY_FAILED, f"{label}: {error}") if error else None
        halves = _halves(moved) if self._device.move_bytes and not failure else None

        def start(op: _Op) -> None:
            engine.enter(lambda: move(op))

        def move(op: _Op) -> None:
            nonlocal failure
            began = self._device.now_ns()
            failure = failure or _try_copy(label, to, source, halves[0] if halves else None)
            self._device.at(duration, lambda: end(op, began))

        def end(op: _Op, began: int) -> None:
            self._device.note(self.name, "copy", began)
            last = halves[1] if halves and failure is None else None
            outcome = failure or _try_copy(label, to, source, last)
            if isinstance(spans, SummedSpans) and outcome is None:
                _sum(source, spans)
            engine.leave()
            self._end(op, outcome)

        self._submit(_Op(label, start))
        if then is not None:
            self.notify_host(then)

    def busy(self, ns: int) -> None:
        """Compute for ns: what a kernel launched on this stream would do."""
        check_timeout(ns)

        def start(op: _Op) -> None:
            began = self._device.now_ns()
            self._device.at(ns, lambda: end(op, began))

        def end(op: _Op, began: int) -> None:
            self._device.note(self.name, "busy", began)
            self._end(op, None)

        self._submit(_Op(f"compute of {ns} ns on stream {self.name}", start))

    def launch_host(self, function: HostFunction) -> None:
        """Call a function in stream order, while time is stepped."""
        label = f"host function on stream {self.name}"

        def start(op: _Op) -> None:
            outcome: DeviceError | None = DeviceError(
                DeviceCode.HOST_FUNCTION_FAILED, f"{label} raised"
            )
            failure = self._failures.take_for_host()
            try:
                self._device.call(lambda: function(failure))
                outcome = None
            finally:
                self._end(op, outcome)

        def cancel(cancelled: DeviceError) -> None:
            failure = self._failures.take_for_host() or cancelled
            self._device.call(lambda: function(failure))

        self._submit(_Op(label, start, cancel))

    def notify_host(self, function: HostFunction) -> None:
        """Call a function in stream order: it takes no time here, so it holds nothing up."""
        self.launch_host(function)

    def record(self, event: Event) -> None:
        """Let the event be complete when all operations before it have ended."""
        own, record = self._own(event), Record()

        def end() -> None:
            record.complete(self._failures.take_for_event())

        self._submit(_Op(f"record on stream {self.name}", lambda op: self._end(op, None), end=end))
        own.last = record

    def wait(self, event: Event) -> None:
        """Hold the stream until the event's last record, as of now, is complete."""
        record = self._own(event).recorded()

        def start(op: _Op) -> None:
            if record.done:
                self._end(op, record.failure)
                return
            self._waits_for = record
            record.waiting.append(lambda: wake(op))

        def wake(op: _Op) -> None:
            if not op.ended:  # else the stream was closed meanwhile
                self._waits_for = None
                self._end(op, record.failure)

        self._submit(_Op(f"wait for an event on stream {self.name}", start))

    def synchronize(self, timeout_ns: int) -> None:
        """Let time pass until all operations submitted before the call have ended."""
        check_timeout(timeout_ns)
        what = f"synchronize of stream {self.name}"
        self._device.check(what, waits=True)
        self._device.count("host_waits")
        last = self._queue[-1] if self._queue else self._running
        if last is not None and not self._device.run_until(lambda: last.ended, timeout_ns, what):
            raise self._timeout(timeout_ns)
        failure = self._failures.take_for_synchronize()
        if failure is not None:
            raise failure.again()

    def close(self, timeout_ns: int, *, drain: bool = True) -> None:
        """End the stream; every operation in it gets an outcome."""
        check_timeout(timeout_ns)
        what = f"close of stream {self.name}"
        self._device.check(what, waits=True)
        self._closing = True
        if not drain:
            self._cancel_waiting()
        if not self._device.run_until(self.is_idle, timeout_ns, what):
            self._cancel_waiting()
            if not self._device.run_until(self.is_idle, CANCEL_GRACE_NS, what):
                while self._queue:
                    self._cancel(self._queue.popleft(), DeviceCode.ABANDONED)
                raise self._timeout(timeout_ns)
        self._device.forget(self)
        failure = self._failures.take_unseen()
        if failure is not None:
            raise failure.again()

    def step(self) -> None:
        """Start the next operation, if none runs; called when time is stepped."""
        if self._running is not None or not self._queue:
            return
        op = self._running = self._queue.popleft()
        if self._cancelling:
            self._cancel(op)
        else:
            op.start(op)

    def is_idle(self) -> bool:
        """Whether nothing runs and nothing is queued."""
        return self._running is None and not self._queue

    def _submit(self, op: _Op) -> None:
        self._device.check(op.label)
        if self._closing:
            raise DeviceError(DeviceCode.CLOSED, f"{op.label}: the stream is closed")
        if len(self._queue) >= self._device.queue_max:
            raise DeviceError(
                DeviceCode.QUEUE_FULL,
                f"{op.label}: {self._device.queue_max} operations are queued (queue_max); "
                "wait for an event before submitting more",
            )
        self._queue.append(op)
        self._device.count("submitted")
        self._device.ready.append(self)

    def _end(self, op: _Op, failure: DeviceError | None) -> None:
        outcome = "completed"
        if failure is not None:
            self._failures.note(failure)
            outcome = "cancelled" if failure.did_not_run else "failed"
        op.ended = True
        op.end()
        self._device.count(outcome)
        if self._running is op:
            self._running = None
        self._device.ready.append(self)

    def _cancel(self, op: _Op, code: DeviceCode = DeviceCode.CANCELLED) -> None:
        failure = DeviceError(code, f"{op.label}: the stream was closed before it ran")
        try:
            op.cancel(failure)
        finally:
            self._end(op, failure)

    def _cancel_waiting(self) -> None:
        """Cancel what is queued, and a wait that holds the stream."""
        self._cancelling = True
        if self._waits_for is not None and self._running is not None:
            self._waits_for = None
            self._cancel(self._running)

    def _own(self, event: Event) -> VirtualEvent:
        if not isinstance(event, VirtualEvent) or event.device is not self._device:
            raise ValueError("event belongs to another device; make it with this device's event()")
        return event

    def _timeout(self, timeout_ns: int) -> DeviceError:
        where = "nothing" if self._running is None else self._running.label
        return DeviceError(
            DeviceCode.TIMEOUT,
            f"stream {self.name} did not end within {timeout_ns} ns: {where} runs and "
            f"{len(self._queue)} operations are queued; the memory they touch is not free",
        )


def _moved(spans: CopySpans) -> array[int]:
    """The triples of which bytes move."""
    triples = spans.buffer
    if not isinstance(spans, SummedSpans):
        return triples
    kept = array("Q")
    for at in range(0, len(triples), 3):
        if triples[at] != NOT_COPIED:
            kept.extend(triples[at : at + 3])
    return kept


def _sum(src: Mapping, spans: SummedSpans) -> None:
    pairs = array("Q")
    for at in range(0, len(spans.buffer), 3):
        pairs.extend(spans.buffer[at + 1 : at + 3])
    checksum_spans(src, pairs, spans.counts, spans.sums)


def _misfit(dst: Mapping, src: Mapping, triples: array[int]) -> str:
    """Return what is wrong with the first span that does not fit, or ""."""
    for at in range(0, len(triples), 3):
        to, start, nbytes = triples[at : at + 3]
        if to + nbytes > dst.size or start + nbytes > src.size:
            return f"span {at // 3} does not fit the mappings of {dst.size} and {src.size} bytes"
    return ""


def _halves(triples: array[int]) -> tuple[array[int], array[int]]:
    """Divide every span into its first half and the rest."""
    first, last = array("Q"), array("Q")
    for at in range(0, len(triples), 3):
        dst, src, nbytes = triples[at : at + 3]
        half = nbytes // 2
        first.extend((dst, src, half))
        last.extend((dst + half, src + half, nbytes - half))
    return first, last


def _try_copy(
    label: str, dst: Mapping, src: Mapping, triples: array[int] | None
) -> DeviceError | None:
    try:
        if triples is not None:
            copy_spans(dst, src, triples)
    except (IndexError, ValueError) as error:
        return DeviceError(DeviceCode.COPY_FAILED, f"{label}: {error}")
    return None
