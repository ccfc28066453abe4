"""What engine_shim needs of an accelerator: memory, streams and events, as CUDA and ACL offer them.

Order
-----
A *stream* runs its operations one after another, in the order they were submitted; two streams run
at the same time. An *event* ties them together: `record` marks a place in one stream, `wait` holds
another stream there. Every submission returns before the operation has run. In particular `copy`
returns before a byte has moved: source and destination belong to the copy until an event recorded
after it, or a host function or notification submitted after it, says that it ended. Nothing else
says so.

Failures
--------
An operation that fails does not stop its stream: the operations behind it still run, and what they
read may be wrong, so whoever learns of a failure must poison what came of it. A failure is
reported by the first *mark* of each kind behind it in its stream:

* an event recorded there: `query` and `wait` raise it, as often as they are asked;
* a host function or notification launched there: it is called with the failure, or with None;
* `synchronize`: raises it once.

A mark reports the first failure since the mark of the same kind before it, so each failure reaches
one event, one host function and one `synchronize`, whichever of them there are, and `close` raises
one that reached nobody. A stream that waits for an event with a failure takes the failure over.
A failure says nothing about other operations: copies that ended well in the same stretch did.

Waiting
-------
Whoever waits on the host has a deadline, and a deadline that passed says nothing about the
operations: memory that they may touch is still theirs. A stream that waits for an event waits
until it is complete or the stream is cancelled by `close`.

Threads
-------
A thread calls `bind_thread` once before it uses the device (the current device is state of a
thread: without it, work lands on device 0). Host functions run one at a time in each stream, must
be short, wait for nothing, and make no call of the device: they pass the news on. Only when a
stream is closed while one of them hangs are those behind it called beside it, as abandoned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvd.plan.runs import CopySpans
    from kvd_kernels.host import Mapping

NAME_CHARS_MAX: Final = 64
"""Longest name of a memory or stream."""

_NAME_CHARS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


class DeviceCode(StrEnum):
    """Why a device call or an operation failed."""

    COPY_FAILED = "copy_failed"
    HOST_FUNCTION_FAILED = "host_function_failed"
    CANCELLED = "cancelled"  # it did not run; all before it have ended
    ABANDONED = "abandoned"  # it did not run; one before it still does, what that touches is taken
    CLOSED = "closed"
    TIMEOUT = "timeout"
    QUEUE_FULL = "queue_full"
    MEMORY_SHORT = "memory_short"
    THREAD_UNBOUND = "thread_unbound"
    IN_HOST_FUNCTION = "in_host_function"
    INJECTED = "injected"


_REFUSALS: Final = frozenset(
    {
        DeviceCode.CLOSED,
        DeviceCode.TIMEOUT,
        DeviceCode.QUEUE_FULL,
        DeviceCode.MEMORY_SHORT,
        DeviceCode.THREAD_UNBOUND,
        DeviceCode.IN_HOST_FUNCTION,
    }
)


class DeviceError(Exception):
    """An operation, or a call, of a device failed.

    code:   what kind of failure, stable.
    detail: which operation of which stream, and what to do where something can be done.
    """

    def __init__(self, code: DeviceCode, detail: str) -> None:
        """Make the error."""
        super().__init__(code, detail)
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        """Code and detail in one line."""
        return f"{self.code}: {self.detail}"

    @property
    def did_not_run(self) -> bool:
        """Whether the end of its stream kept the operation from running."""
        return self.code in (DeviceCode.CANCELLED, DeviceCode.ABANDONED)

    @property
    def is_refusal(self) -> bool:
        """Whether a call was refused, which says nothing about any operation."""
        return self.code in _REFUSALS

    def again(self) -> DeviceError:
        """Return an equal error to raise, so that this one can be raised by many threads."""
        return DeviceError(self.code, self.detail)


HostFunction = Callable[[DeviceError | None], None]
"""Called in stream order with the failure that it is the first to learn of, or None."""

Complete = Callable[[DeviceError | None], None]
"""Completes an armed event, with a failure or None; calls after the first change nothing."""


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """Operations of a device since it was made.

    submitted, completed, failed, cancelled: operations; each ends as one of the last three,
        abandoned ones as cancelled.
    host_waits: calls that may have blocked the host: `synchronize` and `Event.wait`.
    """

    submitted: int
    completed: int
    failed: int
    cancelled: int
    host_waits: int

    @property
    def in_progress(self) -> int:
        """Operations without an outcome so far; 0 after `close`."""
        return self.submitted - self.completed - self.failed - self.cancelled


class DeviceMemory(Protocol):
    """A range of device memory; offsets and lengths are bytes from its start, 64-bit."""

    @property
    def name(self) -> str:
        """The name given at `alloc`."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    @property
    def fd(self) -> int | None:
        """A file of these bytes that another process can map; None where there is none."""

    def read_bytes(self, offset: int, length: int) -> bytes:
        """Copy bytes to the host, at once and in no stream's order; for small pieces.

        Raises: IndexError outside the memory; ValueError once it is closed.
        """

    def write_bytes(self, offset: int, data: Buffer) -> None:
        """Copy bytes from the host, at once and in no stream's order; errors as read_bytes."""

    def close(self) -> None:
        """Give the memory back; waits for copies that run. Copies still queued will fail.

        Raises: BufferError while views of it exist; nothing changes then.
        """


class Event(Protocol):
    """A place in a stream, to be waited for. It may be recorded again and again."""

    def query(self) -> bool:
        """Return whether the last record is complete.

        Raises: DeviceError when it is and an operation that it covers failed;
                ValueError when it was never recorded.
        """

    def wait(self, timeout_ns: int) -> bool:
        """Block until the last record is complete, for at most timeout_ns; False at the deadline.

        Raises: as `query`.
        """

    def arm(self) -> Complete:
        """Record the event for completion by the host instead of by a stream.

        Returns: what completes this record; it may be called from any thread.
        """


class Stream(Protocol):
    """A queue of operations. Each method that submits raises, and then submits nothing:

    ValueError for an argument of another device; DeviceError(closed) after `close`;
    DeviceError(queue_full) at the bound of the queue; DeviceError(thread_unbound) in a thread that
    did not call `bind_thread`; DeviceError(in_host_function) in a host function.
    """

    @property
    def name(self) -> str:
        """The name given at `Device.stream`."""

    def copy(
        self,
        dst: DeviceMemory | Mapping,
        src: DeviceMemory | Mapping,
        spans: CopySpans,
        then: HostFunction | None = None,
    ) -> None:
        """Copy byte ranges; `spans` may change after the call, the bytes may not.

        then: as a `notify_host` right behind it, which it may cost less than.

        SummedSpans may not change either, and serve one copy at a time: their `sums` are those of
        the source bytes as they were copied when the first event, host function or notification
        behind the copy says that it ended. Those of a copy that failed mean nothing.
        A span that does not fit fails the operation, and then none of its bytes move.
        """

    def launch_host(self, function: HostFunction) -> None:
        """Call a function on the host when all operations before it have ended, and before those
        behind it begin.

        It is called exactly once; on a stream that is closed before that, with a failure (cancelled
        or abandoned). If it raises, the operation fails with host_function_failed.
        """

    def notify_host(self, function: HostFunction) -> None:
        """Call a function as `launch_host` does, but let operations behind it begin meanwhile.

        Host functions and notifications of a stream are called in their order, one at a time.
        """

    def record(self, event: Event) -> None:
        """Let the event be complete when all operations before it have ended."""

    def wait(self, event: Event) -> None:
        """Hold the stream until the event's last record, as of now, is complete.

        Raises: ValueError when the event was never recorded: nothing would be waited for.
        """

    def synchronize(self, timeout_ns: int) -> None:
        """Block until all operations submitted before the call have ended.

        Raises: DeviceError(timeout) at the deadline; else the first failure since the last call.
        """

    def close(self, timeout_ns: int, *, drain: bool = True) -> None:
        """End the stream; every operation in it gets an outcome. Idempotent.

        Args:   timeout_ns: time for the queue to drain (drain=True), or for the operation that
                runs to end (drain=False).
                drain: run what is queued; what is left at the deadline is cancelled.
        Raises: DeviceError(timeout) when an operation still runs at the end: what it touches is
                not free, and those behind it end as abandoned, not as cancelled.
                DeviceError of a failure that no mark reported.
        """


class Device(Protocol):
    """One accelerator, as one process sees it."""

    @property
    def name(self) -> str:
        """Kind of device: cpu, npu, cuda, ..."""

    @property
    def index(self) -> int:
        """Which device of its kind."""

    def now_ns(self) -> int:
        """Return the time that this device's deadlines count in; it never goes back."""

    def bind_thread(self) -> None:
        """Make this the calling thread's device. Idempotent."""

    def alloc(self, nbytes: int, name: str) -> DeviceMemory:
        """Make zeroed memory, owned by the caller.

        Raises: ValueError for nbytes below 1 or a bad name; DeviceError(memory_short).
        """

    def stream(self, name: str) -> Stream:
        """Make a stream; its name is unique among the open streams of the device.

        Raises: ValueError for a bad or taken name; DeviceError(closed).
        """

    def event(self) -> Event:
        """Make an event."""

    def statistics(self) -> DeviceStatistics:
        """Return the counts so far."""

    def close(self, timeout_ns: int) -> None:
        """Close all streams as `Stream.close` does, in timeout_ns altogether; raises its errors."""


class PendingFailures:
    """The failures of one stream that its next marks have to report; not thread-safe."""

    def __init__(self) -> None:
        """Nothing failed yet."""
        self._event: DeviceError | None = None
        self._host: DeviceError | None = None
        self._synchronize: DeviceError | None = None
        self._unseen: DeviceError | None = None

    def note(self, failure: DeviceError) -> None:
        """Add a failure; each kind of mark reports the first one since its last mark."""
        self._event = self._event or failure
        self._host = self._host or failure
        self._synchronize = self._synchronize or failure
        if not failure.did_not_run:  # whoever closes asked for it
            self._unseen = self._unseen or failure

    def take_for_event(self) -> DeviceError | None:
        """What an event recorded here reports."""
        failure, self._event = self._event, None
        return self._seen(failure)

    def take_for_host(self) -> DeviceError | None:
        """What a host function launched here is called with."""
        failure, self._host = self._host, None
        return self._seen(failure)

    def take_for_synchronize(self) -> DeviceError | None:
        """What a `synchronize` raises."""
        failure, self._synchronize = self._synchronize, None
        return self._seen(failure)

    def take_unseen(self) -> DeviceError | None:
        """What `close` raises: a failure that no mark has reported."""
        failure, self._unseen = self._unseen, None
        return failure

    def _seen(self, failure: DeviceError | None) -> DeviceError | None:
        if failure is not None:
            self._unseen = None
        return failure


def check_name(what: str, name: str) -> None:
    """Raise ValueError unless `name` can name a memory or stream; `what` says which."""
    if not 0 < len(name) <= NAME_CHARS_MAX or not _NAME_CHARS.issuperset(name):
        raise ValueError(
            f"{what} name is {name!r}; give 1 to {NAME_CHARS_MAX} letters, digits, '.', '_' or '-'"
        )


def check_timeout(timeout_ns: int) -> None:
    """Raise ValueError for a negative timeout."""
    if timeout_ns < 0:
        raise ValueError(f"timeout_ns is {timeout_ns}; give 0 or more")
