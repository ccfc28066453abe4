"""A device in virtual time: how long a schedule of copies and compute takes, exactly.

Time is an integer of nanoseconds that only `Event.wait`, `Stream.synchronize`, `close`, `advance`
and `run_until_idle` move, from one thing that happens to the next: nothing sleeps, and a run gives
the same figures on every machine. What takes time: a copy (latency and bytes of its `Link`),
`VirtualStream.busy` (compute on the device) and `advance` (compute of the calling thread).
Everything else takes none. So the exposed delay of a schedule is the time it took less the compute
in it, and for one layer max(0, transfer - compute while it moves).

Copies move the first half of every span when they start and the rest when they end: code that reads
a destination too early, or overwrites a source too early, gets torn bytes.

Threads: all calls come from the thread that made the device. A thread of a pipeline, which waits
for news in an inbox, handles it and submits more, becomes a *pump*: a function that handles what
is in the inbox without waiting, and returns whether there was anything. It is called at every
instant at which something happened, after the host functions of that instant, until all pumps rest.
Host functions run while time is stepped, never inside a submission. `query` does not move time: a
loop that polls it never ends, so wait with a timeout.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from engine_shim.device import (
    DeviceCode,
    DeviceError,
    DeviceStatistics,
    check_name,
    check_timeout,
)
from engine_shim.device_memory import MemfdMemory
from engine_shim.device_virtual_stream import VirtualEvent, VirtualStream

TIMELINE_MAX: Final = 1_000_000
"""Intervals that are kept; the oldest go first."""

_ROUNDS_MAX: Final = 100_000
_NS_PER_S: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Link:
    """A copy engine; it serves one copy at a time, in the order in which they could start.

    name:        streams with links of one name share the engine.
    bytes_per_s: bandwidth, 1 or more.
    latency_ns:  time that each copy takes beside its bytes.
    """

    name: str
    bytes_per_s: int
    latency_ns: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is wrong."""
        if self.bytes_per_s < 1:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s}; give 1 or more")
        if self.latency_ns < 0:
            raise ValueError(f"latency_ns is {self.latency_ns}; give 0 or more")

    def duration_ns(self, nbytes: int) -> int:
        """Return the time of one copy, rounded up."""
        return self.latency_ns + -(-nbytes * _NS_PER_S // self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Interval:
    """Something that took time: `what` is copy, busy or host; `stream` is "" for the host."""

    stream: str
    what: str
    start_ns: int
    end_ns: int


class CopyEngine:
    """The copies of one link, one at a time."""

    def __init__(self) -> None:
        """Nothing runs."""
        self._waiting: deque[Callable[[], None]] = deque()
        self._busy = False

    def enter(self, start: Callable[[], None]) -> None:
        """Call `start` when the engine is free; the copy then owns it until `leave`."""
        if self._busy:
            self._waiting.append(start)
            return
        self._busy = True
        start()

    def leave(self) -> None:
        """Give the engine to the next copy."""
        self._busy = bool(self._waiting)
        if self._waiting:
            self._waiting.popleft()()


class VirtualDevice:
    """A device whose clock is a queue of things to happen."""

    def __init__(
        self,
        links: Mapping[str, Link],
        *,
        index: int = 0,
        queue_max: int = 1024,
        move_bytes: bool = True,
    ) -> None:
        """Make a device at time 0, driven by the calling thread.

        Args:   links: stream name -> link of its copies; streams that copy nothing need none.
                index: which device this stands for.
                queue_max: operations that a stream holds; a submission beyond raises queue_full.
                move_bytes: False to count time alone, for schedules larger than this machine.
        Raises: ValueError naming the argument.
        """
        for argument, value, least in (("index", index, 0), ("queue_max", queue_max, 1)):
            if value < least:
                raise ValueError(f"{argument} is {value}; give {least} or more")
        engines: dict[str, tuple[Link, CopyEngine]] = {}
        for link in links.values():
            if engines.setdefault(link.name, (link, CopyEngine()))[0] != link:
                raise ValueError(f"links has two different links of name {link.name}")
        self.name: Final = "virtual"
        self.index: Final = index
        self.queue_max: Final = queue_max
        self.move_bytes: Final = move_bytes
        self.ready: Final[deque[VirtualStream]] = deque()
        self._links = {stream: engines[link.name] for stream, link in links.items()}
        self._now_ns = 0
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._thread = threading.get_ident()
        self._stepping = self._in_callback = self._closed = False
        self._pumps: list[Callable[[], bool]] = []
        self._streams: dict[str, VirtualStream] = {}
        self._timeline: deque[Interval] = deque(maxlen=TIMELINE_MAX)
        self._counts = dict.fromkeys(
            ("submitted", "completed", "failed", "cancelled", "host_waits"), 0
        )

    def now_ns(self) -> int:
        """Return the virtual time."""
        return self._now_ns

    def bind_thread(self) -> None:
        """Do nothing in the thread that drives the device; raise DeviceError in any other."""
        self.check("bind_thread")

    def alloc(self, nbytes: int, name: str) -> MemfdMemory:
        """Make zeroed memory; bytes that nobody touches cost nothing."""
        self.check(f"alloc of {name}")
        return MemfdMemory(nbytes, name)

    def stream(self, name: str) -> VirtualStream:
        """Make a stream; it copies by the link that was given for its name."""
        check_name("stream", name)
        self.check(f"stream {name}")
        if self._closed:
            raise DeviceError(DeviceCode.CLOSED, f"stream {name}: the device is closed")
        if name in self._streams:
            raise ValueError(f"stream name {name} is taken; close that stream first")
        made = self._streams[name] = VirtualStream(self, name)
        return made

    def event(self) -> VirtualEvent:
        """Make an event."""
        return VirtualEvent(self)

    def statistics(self) -> DeviceStatistics:
        """Return the counts so far."""
        return DeviceStatistics(**self._counts)

    def close(self, timeout_ns: int) -> None:
        """Close all streams, in timeout_ns altogether; the first error is raised at the end."""
        check_timeout(timeout_ns)
        self.check("close of the device")
        deadline = self._now_ns + timeout_ns
        self._closed = True
        failure: DeviceError | None = None
        for stream in list(self._streams.values()):
            try:
                stream.close(max(0, deadline - self._now_ns))
            except DeviceError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def advance(self, ns: int) -> None:
        """Let the calling thread compute for ns; streams go on meanwhile."""
        check_timeout(ns)
        start = self._now_ns
        self.run_until(lambda: False, ns, "advance")
        self.note("", "host", start)

    def run_until_idle(self, timeout_ns: int) -> bool:
        """Let time pass until no stream has anything to do; False at the deadline."""
        check_timeout(timeout_ns)
        return self.run_until(
            lambda: all(stream.is_idle() for stream in self._streams.values()),
            timeout_ns,
            "run_until_idle",
        )

    def call_later(self, ns: int, function: Callable[[], None]) -> None:
        """Call a function when ns have passed; it makes no calls of the device."""
        check_timeout(ns)
        self.at(ns, lambda: self.call(function))

    def add_pump(self, pump: Callable[[], bool]) -> None:
        """Stand in for a thread: see the header. A pump may submit; it never waits."""
        self._pumps.append(pump)

    def timeline(self) -> tuple[Interval, ...]:
        """Return what took time, in the order in which it ended."""
        return tuple(self._timeline)

    # What follows is for the device's own streams and events.

    def check(self, what: str, *, waits: bool = False) -> None:
        """Raise DeviceError unless this call may be made here and now."""
        if threading.get_ident() != self._thread:
            raise DeviceError(
                DeviceCode.THREAD_UNBOUND,
                f"{what}: a virtual device is driven by the thread that made it; make the work "
                "of other threads pumps",
            )
        if self._in_callback:
            raise DeviceError(
                DeviceCode.IN_HOST_FUNCTION,
                f"{what}: a host function makes no device calls; hand the work to a pump",
            )
        if waits and self._stepping:
            raise DeviceError(
                DeviceCode.IN_HOST_FUNCTION, f"{what}: a pump never waits; return, to be called on"
            )

    def run_until(self, done: Callable[[], bool], timeout_ns: int, what: str) -> bool:
        """Step from one thing that happens to the next, until done() or the deadline."""
        self.check(what, waits=True)
        deadline = self._now_ns + timeout_ns
        self._stepping = True
        try:
            while True:
                self._settle()
                if done():
                    return True
                if not self._agenda or self._agenda[0][0] > deadline:
                    self._now_ns = deadline
                    return False
                self._now_ns, _, action = heapq.heappop(self._agenda)
                action()
        finally:
            self._stepping = False

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in which the device must not be called."""
        self._in_callback = True
        try:
            function()
        finally:
            self._in_callback = False

    def at(self, ns: int, action: Callable[[], None]) -> None:
        """Put an action on the agenda, ns from now."""
        heapq.heappush(self._agenda, (self._now_ns + ns, next(self._numbers), action))

    def link(self, stream: str) -> tuple[Link, CopyEngine]:
        """Return the link of a stream. Raises: ValueError without one."""
        if stream not in self._links:
            raise ValueError(f"stream {stream} has no link; give one in `links` to copy on it")
        return self._links[stream]

    def note(self, stream: str, what: str, start_ns: int) -> None:
        """Add an interval that ends now."""
        self._timeline.append(Interval(stream, what, start_ns, self._now_ns))

    def count(self, name: str) -> None:
        """Add one to a count of DeviceStatistics."""
        self._counts[name] += 1

    def forget(self, stream: VirtualStream) -> None:
        """Free the name of a closed stream."""
        if self._streams.get(stream.name) is stream:
            del self._streams[stream.name]

    def _settle(self) -> None:
        """Do everything that can happen at this instant."""
        for _ in range(_ROUNDS_MAX):
            while self.ready:
                self.ready.popleft().step()
            worked = [pump() for pump in self._pumps]  # each has its turn
            if not any(worked) and not self.ready:
                return
        raise RuntimeError(
            f"no rest at {self._now_ns} ns after {_ROUNDS_MAX} rounds; "
            "a pump returns True without end"
        )
