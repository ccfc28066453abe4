"""What the streams and events of one CPU device share: a lock, counts, and who may call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine_shim.conditions import Condition
from engine_shim.device import (
    Complete,
    DeviceCode,
    DeviceError,
    DeviceStatistics,
    HostFunction,
    check_timeout,
)


class SharedState:
    """The lock and the books of one device."""

    def __init__(self, device: str) -> None:
        """Count from 0; `device` names it in errors."""
        self.device = device
        self.lock = threading.Lock()
        self.changed = Condition(self.lock)
        self._counts = dict.fromkeys(
            ("submitted", "completed", "failed", "cancelled", "host_waits"), 0
        )
        self._thread = threading.local()

    def count(self, name: str) -> None:
        """Add one to a count of DeviceStatistics; called under the lock."""
        self._counts[name] += 1

    def count_at_once(self) -> None:
        """Count an operation that had nothing to wait for; called under the lock."""
        self._counts["submitted"] += 1
        self._counts["completed"] += 1

    def statistics(self) -> DeviceStatistics:
        """Return the counts so far."""
        with self.changed.lock:
            return DeviceStatistics(**self._counts)

    def bind_thread(self, *, worker: bool = False) -> None:
        """Let the calling thread call the device; a stream's own thread (worker) may not."""
        self._thread.bound = True
        self._thread.worker = worker
        self._thread.may_call = not worker

    def check_thread(self, what: str) -> None:
        """Raise DeviceError unless the calling thread may call the device now."""
        if getattr(self._thread, "may_call", False):
            return
        if getattr(self._thread, "worker", False):
            raise DeviceError(
                DeviceCode.IN_HOST_FUNCTION,
                f"{what}: a host function makes no device calls; hand the work to a thread",
            )
        if not getattr(self._thread, "bound", False):
            raise DeviceError(
                DeviceCode.THREAD_UNBOUND,
                f"{what}: thread {threading.current_thread().name} is not bound to "
                f"{self.device}; call bind_thread() in it first",
            )

    def wait_until(self, done: Callable[[], bool], timeout_ns: int) -> bool:
        """Wait, under the lock, until `done()`; returns whether it came true in time."""
        deadline = time.monotonic_ns() + timeout_ns
        while not done():
            left = deadline - time.monotonic_ns()
            if left <= 0:
                return False
            self.changed.wait(min(left / 1e9, threading.TIMEOUT_MAX))
        return True


def _not_begun() -> bool:
    return False


@dataclass(slots=True, eq=False)
class Op:
    """A queued operation.

    run:    does it, or waits for its end; returns its failure.
    cancel: tells whoever waits for it, when it will not run.
    end:    runs under the lock, after the outcome was noted.
    withdraw: takes back what was begun before its turn, where it can be; under the lock.
    begun:  whether it was begun before its turn and not taken back, so that it is not cancelled.
    flows:  whether it runs before its turn, and its end rouses the stream's thread.
    holds:  whether copies behind it must wait for its turn to end.
    then:   a notification that follows it, with the first failure since the last one.
    """

    label: str
    run: Callable[[], DeviceError | None]
    cancel: Callable[[DeviceError], None] = lambda _: None
    end: Callable[[], None] = lambda: None
    withdraw: Callable[[], None] = lambda: None
    begun: Callable[[], bool] = _not_begun
    flows: bool = False
    holds: bool = False
    then: HostFunction | None = None
    ended: bool = False


@dataclass(slots=True, eq=False)
class Record:
    """One completion of one event."""

    done: bool = False
    failure: DeviceError | None = None


class CpuEvent:
    """An event of a CpuDevice; made by `CpuDevice.event`."""

    def __init__(self, shared: SharedState) -> None:
        """Belong to the device of this state."""
        self.shared = shared
        self.last: Record | None = None

    def query(self) -> bool:
        """Return whether the last record is complete; raise its failure."""
        with self.shared.changed.lock:
            record = self.recorded()
            if record.failure is not None:
                raise record.failure.again()
            return record.done

    def wait(self, timeout_ns: int) -> bool:
        """Block until the last record is complete; False at the deadline."""
        check_timeout(timeout_ns)
        self.shared.check_thread("wait for an event")
        with self.shared.changed.lock:
            record = self.recorded()
            self.shared.count("host_waits")
            self.shared.wait_until(lambda: record.done, timeout_ns)
            if record.failure is not None:
                raise record.failure.again()
            return record.done

    def arm(self) -> Complete:
        """Record it for completion by the host."""
        record = Record()

        def complete(failure: DeviceError | None) -> None:
            with self.shared.changed.lock:
                if not record.done:
                    record.done, record.failure = True, failure
                    self.shared.changed.notify_all()

        with self.shared.changed.lock:
            self.last = record
        return complete

    def recorded(self) -> Record:
        """Return the last record; called under the lock. Raises: ValueError without one."""
        if self.last is None:
            raise ValueError("event was never recorded; record it in a stream first")
        return self.last
