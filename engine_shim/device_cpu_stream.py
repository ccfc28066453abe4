"""Streams of a `CpuDevice`: a queue of operations, a thread for them, and a native one for copies.

A copy that nothing in its stream holds up is handed to the native thread at once, and that thread
goes from one copy to the next without Python: the stream's own thread only takes note of the ends,
in order. What may hold up those behind it (a host function, a wait for what is not complete) makes
the copies behind it wait for their turn in the stream's thread.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engine_shim.device import (
    DeviceCode,
    DeviceError,
    DeviceMemory,
    Event,
    HostFunction,
    PendingFailures,
    check_timeout,
)
from engine_shim.device_cpu_state import CpuEvent, Op, Record
from engine_shim.device_memory import mapping_of
from kvd.plan.runs import CopySpans, SummedSpans
from kvd_kernels.host import CopyQueue, Mapping

if TYPE_CHECKING:
    from engine_shim.device_cpu import CpuDevice

TEAM_BYTES_MIN: Final = 1 << 20
"""Smaller copies have one thread: two take nearly as long to meet as one to copy so much."""

CANCEL_GRACE_NS: Final = 500_000_000
"""Time for a stream's thread to end after a cancel, on top of the timeout of `close`."""


class _Copy:
    """A copy in the native queue, at once or when its turn comes."""

    def __init__(
        self, queue: CopyQueue, label: str, dst: Mapping, src: Mapping, spans: CopySpans
    ) -> None:
        self._queue = queue
        self._label = label
        self._ends = dst, src
        self._spans = spans
        self._triples: bytes | None = None
        self._ticket = 0
        self.threads = 1

    def keep(self) -> None:
        """The turn comes later: what the caller may change until then is copied."""
        self._triples = self._spans.buffer.tobytes()

    def start(self) -> bool:
        """Hand it to the native thread; False when that cannot be, as without a thread."""
        try:
            self._submit()
        except (ValueError, RuntimeError):
            return False
        return True

    def _submit(self) -> None:
        spans = self._spans
        triples, dst, src = spans.unshifted if self._triples is None else (self._triples, 0, 0)
        lists = (spans.counts, spans.sums) if isinstance(spans, SummedSpans) else (None, None)
        self._ticket = self._queue.submit(
            *self._ends, triples, *lists, threads=self.threads, dst_shift=dst, src_shift=src
        )

    def run(self) -> DeviceError | None:
        """Wait until it has ended; it is started before where it was not."""
        try:
            if not self._ticket:
                self._submit()
            self._queue.finish(self._ticket)
        except (IndexError, ValueError, RuntimeError) as error:
            return DeviceError(DeviceCode.COPY_FAILED, f"{self._label}: {error}")
        return None

    def withdraw(self) -> None:
        """Take it back from the native thread unless that has begun it."""
        if self._ticket and self._queue.cancel(self._ticket):
            self._ticket = 0

    def begun(self) -> bool:
        """Whether it was handed to the native thread and not taken back."""
        return self._ticket > 0


class CpuStream:
    """A thread with a queue; made by `CpuDevice.stream`."""

    def __init__(self, device: CpuDevice, name: str) -> None:
        """Start the thread."""
        self.name: Final = name
        self._device = device
        self._shared = device.shared
        self._queue: deque[Op] = deque()
        self._in_hand: list[Op] = []
        self._failures = PendingFailures()
        self._closing = self._cancelling = False
        self._copies = CopyQueue()
        self._holding = 0
        self._stuck: list[Op] = []
        self._worker = self._start_worker()

    def copy(
        self,
        dst: DeviceMemory | Mapping,
        src: DeviceMemory | Mapping,
        spans: CopySpans,
        then: HostFunction | None = None,
    ) -> None:
        """Copy byte ranges; the interpreter lock is free while they move."""
        to, source = mapping_of("dst", dst), mapping_of("src", src)
        label = f"copy of {spans.num_bytes} bytes on stream {self.name}"
        copy = _Copy(self._copies, label, to, source, spans)
        if spans.num_bytes >= TEAM_BYTES_MIN:
            copy.threads = self._device.copy_threads
        op = Op(label, copy.run, withdraw=copy.withdraw, begun=copy.begun, then=then)

        def accepted() -> None:
            op.flows = self._holding == 0 and copy.start()
            # One that waits for its turn holds up those behind it, too: they stay in order.
            op.holds = not op.flows
            if not op.flows:
                copy.keep()

        self._submit(op, accepted)

    def launch_host(self, function: HostFunction) -> None:
        """Call a function in stream order, in the stream's thread."""
        self._submit(self._host_op(f"host function on stream {self.name}", function, holds=True))

    def notify_host(self, function: HostFunction) -> None:
        """Call a function in the stream's thread; copies behind it do not wait for it."""
        self._submit(self._host_op(f"notification of stream {self.name}", function, holds=False))

    def _host_op(self, label: str, function: HostFunction, *, holds: bool) -> Op:
        def run() -> None:
            with self._shared.changed.lock:
                failure = self._failures.take_for_host()
            function(failure)

        def cancel(cancelled: DeviceError) -> None:
            with self._shared.changed.lock:
                failure = self._failures.take_for_host()
            function(failure or cancelled)

        return Op(label, run, cancel, holds=holds)

    def record(self, event: Event) -> None:
        """Let the event be complete when all operations before it have ended."""
        own, record = self._own(event), Record()
        self._shared.check_thread(f"record on stream {self.name}")
        with self._shared.changed.lock:
            if self._idle() and not self._closing:
                record.done, record.failure = True, self._failures.take_for_event()
                own.last = record
                self._shared.count_at_once()
                return

        def accepted() -> None:
            own.last = record

        def end() -> None:
            record.done, record.failure = True, self._failures.take_for_event()

        op = Op(f"record on stream {self.name}", lambda: None, end=end)
        self._submit(op, accepted)

    def wait(self, event: Event) -> None:
        """Hold the stream until the event's last record, as of now, is complete."""
        own = self._own(event)
        self._shared.check_thread(f"wait on stream {self.name}")
        with self._shared.changed.lock:
            record = own.recorded()
            if record.done and record.failure is None and not self._closing:
                self._shared.count_at_once()
                return
        label = f"wait for an event on stream {self.name}"

        def run() -> DeviceError | None:
            with self._shared.changed.lock:
                while not (record.done or self._cancelling):
                    self._shared.changed.wait()
                return record.failure if record.done else self._cancelled(label)

        self._submit(Op(label, run, holds=True))

    def synchronize(self, timeout_ns: int) -> None:
        """Block until all operations submitted before the call have ended."""
        check_timeout(timeout_ns)
        self._shared.check_thread(f"synchronize of stream {self.name}")
        with self._shared.changed.lock:
            self._shared.count("host_waits")
            # All between the first and the last end before the last does.
            ends = [*self._in_hand, *list(self._queue)[-1:]]
            if not self._shared.wait_until(lambda: all(op.ended for op in ends), timeout_ns):
                raise self._timeout(timeout_ns)
            failure = self._failures.take_for_synchronize()
        if failure is not None:
            raise failure.again()

    def close(self, timeout_ns: int, *, drain: bool = True) -> None:
        """End the stream; every operation in it gets an outcome."""
        check_timeout(timeout_ns)
        self._shared.check_thread(f"close of stream {self.name}")
        with self._shared.changed.lock:
            self._closing = True
            if not drain:
                self._cancel_queued()
            self._copies.rouse()
            self._shared.changed.notify_all()
            idle = self._shared.wait_until(self._idle, timeout_ns)
            self._cancel_queued()
            idle = idle or self._shared.wait_until(self._idle, CANCEL_GRACE_NS)
        if not idle:
            # Its thread is stuck in one operation: those behind it must not wait for ever.
            with self._shared.changed.lock:
                self._stuck = self._in_hand[:1]
            self._start_worker()
            with self._shared.changed.lock:
                self._shared.wait_until(
                    lambda: not self._queue and self._in_hand == self._stuck, CANCEL_GRACE_NS
                )
                if not self._idle():
                    raise self._timeout(timeout_ns)
        self._worker.join(CANCEL_GRACE_NS / 1e9)
        self._copies.close()
        self._device.forget(self)
        with self._shared.changed.lock:
            failure = self._failures.take_unseen()
        if failure is not None:
            raise failure.again()

    def _submit(self, op: Op, accepted: Callable[[], None] = lambda: None) -> None:
        """Queue an operation; `accepted` runs under the lock with it, or not at all."""
        device, shared = self._device, self._shared
        shared.check_thread(op.label)
        with shared.changed.lock:
            if len(self._queue) >= device.queue_max:
                self._copies.rouse()  # the thread may sleep although a copy of the queue runs
                shared.wait_until(
                    lambda: self._closing or len(self._queue) < device.queue_max,
                    device.submit_timeout_ns,
                )
            if self._closing:
                raise DeviceError(DeviceCode.CLOSED, f"{op.label}: the stream is closed")
            if len(self._queue) >= device.queue_max:
                raise DeviceError(
                    DeviceCode.QUEUE_FULL,
                    f"{op.label}: {device.queue_max} operations are queued (queue_max); "
                    "wait for an event before submitting more",
                )
            accepted()
            self._holding += op.holds
            if not (self._queue or op.flows):
                self._copies.rouse()
            self._queue.append(op)
            shared.count("submitted")
            if op.then is not None:
                shared.count("submitted")

    def _start_worker(self, after: threading.Thread | None = None) -> threading.Thread:
        label = f"{self._device.name}{self._device.index}-{self.name}"
        worker = threading.Thread(target=self._work, args=(after,), name=label, daemon=True)
        worker.start()
        return worker

    def _work(self, after: threading.Thread | None) -> None:
        """Run operations in order, when thread `after` has ended.

        What a host function raises ends this thread by way of `threading.excepthook`, so that it
        is seen; the stream goes on in a new one.
        """
        if after is not None:
            after.join()
        self._shared.bind_thread(worker=True)
        op: Op | None = None
        try:
            while (op := self._next()) is not None:
                is_cancelled = self._cancelling and not op.begun()
                failure = self._cancel(op) if is_cancelled else op.run()
                if op.then is not None:
                    op.then(self._noted(op, failure))
                    failure = failure if is_cancelled else None
                self._end(op, failure)
        finally:
            if op is not None:
                detail = f"{op.label} raised {sys.exception()!r}"
                self._end(op, DeviceError(DeviceCode.HOST_FUNCTION_FAILED, detail))
                self._worker = self._start_worker(after=threading.current_thread())

    def _next(self) -> Op | None:
        """The next operation; it sleeps while there is none, and while a copy ahead of all runs."""
        seen = 0
        while True:
            with self._shared.changed.lock:
                if self._queue:
                    op = self._queue.popleft()
                    self._in_hand.append(op)
                    self._shared.changed.notify_all()
                    return op
                if self._closing:
                    return None
            seen = self._copies.wait(seen)

    def _cancel_queued(self) -> None:
        """Let what is queued end as cancelled, as far as it has not begun; under the lock."""
        self._cancelling = True
        # From the last: the native thread begins none behind one that was taken back.
        for op in reversed(self._queue):
            op.withdraw()
        self._shared.changed.notify_all()

    def _cancel(self, op: Op) -> DeviceError:
        failure = self._cancelled(op.label)
        op.cancel(failure)
        return failure

    def _noted(self, op: Op, failure: DeviceError | None) -> DeviceError | None:
        """Note the end of a copy; returns the failure that its notification learns of."""
        with self._shared.changed.lock:
            self._note(failure)
            self._holding -= op.holds
            op.holds = False
            return self._failures.take_for_host()

    def _note(self, failure: DeviceError | None) -> None:
        outcome = "completed"
        if failure is not None:
            self._failures.note(failure)
            outcome = "cancelled" if failure.did_not_run else "failed"
        self._shared.count(outcome)

    def _end(self, op: Op, failure: DeviceError | None) -> None:
        with self._shared.changed.lock:
            self._note(failure)
            op.end()
            op.ended = True
            self._holding -= op.holds
            self._in_hand.remove(op)
            self._shared.changed.notify_all()

    def _idle(self) -> bool:
        return not (self._queue or self._in_hand)

    def _own(self, event: Event) -> CpuEvent:
        if not isinstance(event, CpuEvent) or event.shared is not self._shared:
            raise ValueError("event belongs to another device; make it with this device's event()")
        return event

    def _cancelled(self, label: str) -> DeviceError:
        stuck = next((op for op in self._stuck if not op.ended), None)
        if stuck is None:
            return DeviceError(
                DeviceCode.CANCELLED, f"{label}: the stream was closed before it ran"
            )
        return DeviceError(
            DeviceCode.ABANDONED, f"{label}: the stream was closed while {stuck.label} runs"
        )

    def _timeout(self, timeout_ns: int) -> DeviceError:
        where = self._in_hand[0].label if self._in_hand else "nothing"
        return DeviceError(
            DeviceCode.TIMEOUT,
            f"stream {self.name} did not end within {timeout_ns} ns: {where} runs and "
            f"{len(self._queue)} operations are queued; the memory they touch is not free",
        )
