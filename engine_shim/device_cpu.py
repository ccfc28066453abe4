"""The CPU as a device: memory that other processes can map, streams that are threads.

It keeps every promise of `engine_shim.device` and none beyond it: copies run in another thread, so
that code that reads too early is found here and not on an accelerator.

Bounds: a stream holds at most `queue_max` operations. A submission at the bound waits for room, at
most `submit_timeout_ns`, then raises DeviceError(queue_full) and has submitted nothing.

Locks: one lock for the whole device guards queues, events and counts. It is never held while a copy
or a host function runs, nor while another lock is taken. A stream's thread that has nothing to do
sleeps on a condition of its own, so that work for one stream wakes no other. A mark on an idle
stream, and a wait for what is complete, take effect at once and need no turn of it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from engine_shim.device import (
    DeviceCode,
    DeviceError,
    DeviceMemory,
    DeviceStatistics,
    Event,
    HostFunction,
    PendingFailures,
    check_name,
    check_timeout,
)
from engine_shim.device_cpu_state import CpuEvent, Op, Record, SharedState
from engine_shim.device_memory import MemfdMemory, mapping_of
from kvd.plan.runs import CopySpans, SummedSpans
from kvd_kernels.host import Mapping, copy_spans, copy_sums

QUEUE_MAX: Final = 1024
SUBMIT_TIMEOUT_NS: Final = 10_000_000_000
COPY_THREADS_MAX: Final = 2
"""Threads of a large copy where there are cores: a third adds little, as memory is busy then."""

TEAM_BYTES_MIN: Final = 32 << 20
"""Smaller copies have one thread. Beside them the control plane needs the second core: layers of
9 MiB moved 0.8 times as fast with two threads on two cores, layers of 128 MiB as fast or faster."""

CANCEL_GRACE_NS: Final = 500_000_000
"""Time for a stream's thread to end after a cancel, on top of the timeout of `close`."""


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
        self._work_came = threading.Condition(self._shared.lock)
        self._stuck: list[Op] = []
        self._worker = self._start_worker()

    def copy(
        self, dst: DeviceMemory | Mapping, src: DeviceMemory | Mapping, spans: CopySpans
    ) -> None:
        """Copy byte ranges; the interpreter lock is free while they move."""
        to, source = mapping_of("dst", dst), mapping_of("src", src)
        triples = spans.buffer.tobytes()
        summed = spans if isinstance(spans, SummedSpans) else None
        team = self._device.copy_threads if spans.num_bytes >= TEAM_BYTES_MIN else 1
        label = f"copy of {spans.num_bytes} bytes on stream {self.name}"

        def run() -> DeviceError | None:
            try:
                if summed is None:
                    copy_spans(to, source, triples, threads=team)
                else:
                    copy_sums(to, source, triples, summed.counts, summed.sums, threads=team)
            except (IndexError, ValueError) as error:
                return DeviceError(DeviceCode.COPY_FAILED, f"{label}: {error}")
            return None

        self._submit(Op(label, run))

    def launch_host(self, function: HostFunction) -> None:
        """Call a function in stream order, in the stream's thread."""

        def run() -> None:
            with self._shared.changed:
                failure = self._failures.take_for_host()
            function(failure)

        def cancel(cancelled: DeviceError) -> None:
            with self._shared.changed:
                failure = self._failures.take_for_host()
            function(failure or cancelled)

        self._submit(Op(f"host function on stream {self.name}", run, cancel))

    def record(self, event: Event) -> None:
        """Let the event be complete when all operations before it have ended."""
        own, record = self._own(event), Record()
        self._shared.check_thread(f"record on stream {self.name}")
        with self._shared.changed:
            if self._idle() and not self._closing:
                record.done, record.failure = True, self._failures.take_for_event()
                own.last = record
                self._count_at_once()
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
        with self._shared.changed:
            record = own.recorded()
            if record.done and record.failure is None and not self._closing:
                self._count_at_once()
                return
        label = f"wait for an event on stream {self.name}"

        def run() -> DeviceError | None:
            with self._shared.changed:
                while not (record.done or self._cancelling):
                    self._shared.changed.wait()
                return record.failure if record.done else self._cancelled(label)

        self._submit(Op(label, run))

    def synchronize(self, timeout_ns: int) -> None:
        """Block until all operations submitted before the call have ended."""
        check_timeout(timeout_ns)
        self._shared.check_thread(f"synchronize of stream {self.name}")
        with self._shared.changed:
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
        with self._shared.changed:
            self._closing = True
            self._cancelling = self._cancelling or not drain
            self._work_came.notify_all()
            self._shared.changed.notify_all()
            idle = self._shared.wait_until(self._idle, timeout_ns)
            self._cancelling = True
            self._shared.changed.notify_all()
            idle = idle or self._shared.wait_until(self._idle, CANCEL_GRACE_NS)
        if not idle:
            # Its thread is stuck in one operation: those behind it must not wait for ever.
            with self._shared.changed:
                self._stuck = self._in_hand[:1]
            self._start_worker()
            with self._shared.changed:
                self._shared.wait_until(
                    lambda: not self._queue and self._in_hand == self._stuck, CANCEL_GRACE_NS
                )
                if not self._idle():
                    raise self._timeout(timeout_ns)
        self._worker.join(CANCEL_GRACE_NS / 1e9)
        self._device.forget(self)
        with self._shared.changed:
            failure = self._failures.take_unseen()
        if failure is not None:
            raise failure.again()

    def _submit(self, op: Op, accepted: Callable[[], None] = lambda: None) -> None:
        """Queue an operation; `accepted` runs under the lock with it, or not at all."""
        device, shared = self._device, self._shared
        shared.check_thread(op.label)
        with shared.changed:
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
            self._queue.append(op)
            shared.count("submitted")
            self._work_came.notify_all()

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
                failure = self._cancel(op) if self._cancelling else op.run()
                self._end(op, failure)
        finally:
            if op is not None:
                detail = f"{op.label} raised {sys.exception()!r}"
                self._end(op, DeviceError(DeviceCode.HOST_FUNCTION_FAILED, detail))
                self._worker = self._start_worker(after=threading.current_thread())

    def _next(self) -> Op | None:
        with self._shared.changed:
            while not (self._queue or self._closing):
                self._work_came.wait()
            if not self._queue:
                return None
            op = self._queue.popleft()
            self._in_hand.append(op)
            self._shared.changed.notify_all()
            return op

    def _cancel(self, op: Op) -> DeviceError:
        failure = self._cancelled(op.label)
        op.cancel(failure)
        return failure

    def _end(self, op: Op, failure: DeviceError | None) -> None:
        outcome = "completed"
        with self._shared.changed:
            if failure is not None:
                self._failures.note(failure)
                outcome = "cancelled" if failure.did_not_run else "failed"
            op.end()
            op.ended = True
            self._shared.count(outcome)
            self._in_hand.remove(op)
            self._shared.changed.notify_all()

    def _count_at_once(self) -> None:
        """Count an operation that had nothing to wait for, and so needs no turn of the thread."""
        self._shared.count("submitted")
        self._shared.count("completed")

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


class CpuDevice:
    """The host's CPUs as one device."""

    def __init__(
        self,
        index: int = 0,
        *,
        queue_max: int = QUEUE_MAX,
        submit_timeout_ns: int = SUBMIT_TIMEOUT_NS,
        copy_threads: int | None = None,
    ) -> None:
        """Make a device without streams; the calling thread is bound to it.

        Args:   index: which device this stands for.
                queue_max: operations that a stream holds, beside the one that runs.
                submit_timeout_ns: how long a submission waits for room in a full queue.
                copy_threads: that share a large copy; None for one for each core, at most 2.
        Raises: ValueError naming the argument.
        """
        team = copy_threads
        if team is None:
            team = min(COPY_THREADS_MAX, len(os.sched_getaffinity(0)))
        for argument, value, least in (
            ("index", index, 0),
            ("queue_max", queue_max, 1),
            ("copy_threads", team, 1),
        ):
            if value < least:
                raise ValueError(f"{argument} is {value}; give {least} or more")
        check_timeout(submit_timeout_ns)
        self.copy_threads: Final = team
        self.name: Final = "cpu"
        self.index: Final = index
        self.queue_max: Final = queue_max
        self.submit_timeout_ns: Final = submit_timeout_ns
        self.shared: Final = SharedState(f"cpu{index}")
        self._streams: dict[str, CpuStream] = {}
        self._closed = False
        self.bind_thread()

    def now_ns(self) -> int:
        """Return the host's monotonic time."""
        return time.monotonic_ns()

    def bind_thread(self) -> None:
        """Make this the calling thread's device."""
        self.shared.bind_thread()

    def alloc(self, nbytes: int, name: str) -> MemfdMemory:
        """Make zeroed memory that other processes can map."""
        self.shared.check_thread(f"alloc of {name}")
        return MemfdMemory(nbytes, name)

    def stream(self, name: str) -> CpuStream:
        """Make a stream with a thread of its own."""
        check_name("stream", name)
        self.shared.check_thread(f"stream {name}")
        with self.shared.changed:
            if self._closed:
                raise DeviceError(DeviceCode.CLOSED, f"stream {name}: the device is closed")
            if name in self._streams:
                raise ValueError(f"stream name {name} is taken; close that stream first")
            made = self._streams[name] = CpuStream(self, name)
        return made

    def event(self) -> CpuEvent:
        """Make an event."""
        return CpuEvent(self.shared)

    def statistics(self) -> DeviceStatistics:
        """Return the counts so far."""
        return self.shared.statistics()

    def close(self, timeout_ns: int) -> None:
        """Close all streams, in timeout_ns altogether; the first error is raised at the end."""
        check_timeout(timeout_ns)
        self.shared.check_thread("close of the device")
        deadline = self.now_ns() + timeout_ns
        with self.shared.changed:
            self._closed = True
            streams = list(self._streams.values())
        failure: DeviceError | None = None
        for stream in streams:
            try:
                stream.close(max(0, deadline - self.now_ns()))
            except DeviceError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def forget(self, stream: CpuStream) -> None:
        """Free the name of a closed stream."""
        with self.shared.changed:
            if self._streams.get(stream.name) is stream:
                del self._streams[stream.name]
