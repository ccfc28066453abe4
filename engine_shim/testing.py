"""Devices for tests: faults on order, and virtual time.

`FaultyDevice` wraps any device and does to chosen operations what accelerators, drivers and
schedulers do to code that trusts them. `VirtualDevice` (here from `device_virtual`) counts time
exactly; wrapped, it gives faults in virtual time. This is the only place in the project where
anything is made slow, late or wrong on purpose.

Real time: on a device that is not virtual, delays are timers, and a late or repeated host function
is called in the timer's thread.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from engine_shim.device import (
    Device,
    DeviceError,
    DeviceMemory,
    DeviceStatistics,
    Event,
    HostFunction,
    Stream,
)
from engine_shim.device_virtual import Interval, Link, VirtualDevice
from engine_shim.testing_rules import (
    Delay,
    Entry,
    Fail,
    Fault,
    Hang,
    Late,
    Lose,
    OpInfo,
    OpKind,
    Rule,
    Swap,
    Twice,
)
from kvd.plan.runs import NOT_COPIED, CopySpans, SummedSpans
from kvd_kernels.host import Mapping

__all__ = [
    "Delay",
    "Entry",
    "Fail",
    "FaultyDevice",
    "FaultyStream",
    "Hang",
    "Interval",
    "Late",
    "Link",
    "Lose",
    "OpInfo",
    "Rule",
    "Swap",
    "Twice",
    "VirtualDevice",
]

JOURNAL_MAX: Final = 100_000
"""Entries that are kept; the oldest go first."""


class FaultyDevice:
    """A device whose operations go wrong by rules; equal seeds and submissions, equal faults."""

    def __init__(self, inner: Device, rules: Sequence[Rule] = (), seed: int = 0) -> None:
        """Wrap `inner`; events and memory are its own, so only its streams are wrapped."""
        self.inner: Final = inner
        self._rules = tuple(rules)
        self._seed = seed
        self._matched = [0] * len(self._rules)
        self._draws: dict[str, random.Random] = {}
        self._counts: dict[tuple[str, OpKind], int] = {}
        self._journal: deque[Entry] = deque(maxlen=JOURNAL_MAX)
        self._hanging: dict[str, list[Callable[[], None]]] = {}
        self._later: dict[int, Callable[[], None]] = {}
        self._timers: dict[int, threading.Timer] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The inner device's name."""
        return self.inner.name

    @property
    def index(self) -> int:
        """The inner device's index."""
        return self.inner.index

    def now_ns(self) -> int:
        """Return the inner device's time."""
        return self.inner.now_ns()

    def bind_thread(self) -> None:
        """Bind the calling thread to the inner device."""
        self.inner.bind_thread()

    def alloc(self, nbytes: int, name: str) -> DeviceMemory:
        """Make memory of the inner device."""
        return self.inner.alloc(nbytes, name)

    def stream(self, name: str) -> FaultyStream:
        """Make a stream whose operations the rules apply to."""
        return FaultyStream(self, self.inner.stream(name))

    def event(self) -> Event:
        """Make an event of the inner device."""
        return self.inner.event()

    def statistics(self) -> DeviceStatistics:
        """Return the inner device's counts; what a fault adds is among them."""
        return self.inner.statistics()

    def close(self, timeout_ns: int) -> None:
        """Deliver late news now, then close the inner device; hanging streams keep hanging."""
        self.deliver_late()
        try:
            self.inner.close(timeout_ns)
        finally:
            self.deliver_late()

    def journal(self) -> tuple[Entry, ...]:
        """Return what happened, in order."""
        with self._lock:
            return tuple(self._journal)

    def resume(self, stream: str) -> int:
        """Let a hanging stream go on; returns how many hangs of it ended."""
        with self._lock:
            hanging = self._hanging.pop(stream, [])
        for go_on in hanging:
            go_on()
        return len(hanging)

    # What follows is for the device's own streams.

    def submitted(self, stream: str, kind: OpKind, nbytes: int = 0) -> tuple[OpInfo, Fault | None]:
        """Count an operation; return it with the fault that it gets."""
        with self._lock:
            nth = self._counts.get((stream, kind), 0)
            self._counts[stream, kind] = nth + 1
            op = OpInfo(stream, kind, nth, nbytes)
            fault = self._pick(op)
        self.note(op, "submitted" if fault is None else type(fault).__name__.lower())
        return op, fault

    def note(self, op: OpInfo, what: str) -> None:
        """Add a line to the journal."""
        with self._lock:
            self._journal.append(Entry(self.inner.now_ns(), op, what))

    def hang(self, op: OpInfo, go_on: Callable[[], None]) -> None:
        """Keep what ends a hang for `resume`."""

        def resumed() -> None:
            self.note(op, "resumed")
            go_on()

        with self._lock:
            self._hanging.setdefault(op.stream, []).append(resumed)

    def later(self, ns: int, function: Callable[[], None]) -> None:
        """Call a function after ns, or when the device is closed before."""
        with self._lock:
            number = next(self._numbers)
            self._later[number] = function
        if isinstance(self.inner, VirtualDevice):
            self.inner.call_later(ns, lambda: self._deliver(number))
            return
        timer = threading.Timer(ns / 1e9, self._deliver, (number,))
        timer.daemon = True
        with self._lock:
            self._timers[number] = timer
        timer.start()

    def deliver_late(self) -> None:
        """Deliver late news now."""
        with self._lock:
            waiting = list(self._later)
        for number in waiting:
            self._deliver(number)

    def _deliver(self, number: int) -> None:
        with self._lock:
            function = self._later.pop(number, None)
            timer = self._timers.pop(number, None)
        if timer is not None:
            timer.cancel()
        if function is not None:
            function()

    def _pick(self, op: OpInfo) -> Fault | None:
        for at, rule in enumerate(self._rules):
            if not rule.matches(op):
                continue
            nth = self._matched[at]
            self._matched[at] += 1
            if rule.nth not in (None, nth):
                continue
            if rule.probability < 1.0:
                # A source for each stream: threads cannot change each other's draws.
                draws = self._draws.setdefault(
                    op.stream, random.Random(f"{self._seed}/{op.stream}")
                )
                if draws.random() >= rule.probability:
                    continue
            return rule.fault
        return None


class FaultyStream:
    """A stream whose operations go wrong by the rules of its FaultyDevice."""

    def __init__(self, device: FaultyDevice, inner: Stream) -> None:
        """Wrap a stream."""
        self.name: Final = inner.name
        self.inner: Final = inner
        self._device = device
        self._held: tuple[OpInfo, Callable[[], None]] | None = None
        self._side: Stream | None = None

    def copy(
        self,
        dst: DeviceMemory | Mapping,
        src: DeviceMemory | Mapping,
        spans: CopySpans,
        then: HostFunction | None = None,
    ) -> None:
        """Copy byte ranges, or fail half-way, or after the next copy; rules see `then` as host."""
        self._copy(dst, src, spans)
        if then is not None:
            self.notify_host(then)

    def _copy(
        self, dst: DeviceMemory | Mapping, src: DeviceMemory | Mapping, spans: CopySpans
    ) -> None:
        op, fault = self._device.submitted(self.name, "copy", spans.num_bytes)
        summed = isinstance(spans, SummedSpans)
        pieces = spans if summed else _first_bytes(spans, spans.num_bytes)
        if isinstance(fault, Swap) and self._held is None:
            self._held = (op, lambda: self.inner.copy(dst, src, pieces))
            return
        held, self._held = self._held, None
        self._before(op, fault)
        if isinstance(fault, Fail):
            moved = _first_bytes(spans, int(spans.num_bytes * fault.moved))
            self.inner.copy(dst, src, moved)
            self._inject(op, fault)
        else:
            self.inner.copy(dst, src, spans)
        if held is not None:
            held[1]()

    def launch_host(self, function: HostFunction) -> None:
        """Call a function, or not, or later, or twice."""
        self._call_host(function, self.inner.launch_host)

    def notify_host(self, function: HostFunction) -> None:
        """The same for a notification; rules see both as `host`."""
        self._call_host(function, self.inner.notify_host)

    def _call_host(self, function: HostFunction, launch: Callable[[HostFunction], None]) -> None:
        op, fault = self._device.submitted(self.name, "host")
        self._flush()
        self._before(op, fault)

        def call(failure: DeviceError | None) -> None:
            self._device.note(op, "called" if failure is None else f"called: {failure.code}")
            function(failure)

        def call_late(failure: DeviceError | None, ns: int) -> None:
            self._device.later(ns, lambda: call(failure))

        def deliver(failure: DeviceError | None) -> None:
            if not isinstance(fault, Late):
                call(failure)
            if isinstance(fault, Late | Twice):
                call_late(failure, fault.ns)

        if isinstance(fault, Fail):
            self._inject(op, fault)
        if not isinstance(fault, Lose):
            launch(deliver)

    def record(self, event: Event) -> None:
        """Let the event be complete in time, or late, or never."""
        op, fault = self._device.submitted(self.name, "record")
        self._flush()
        self._before(op, fault)
        if isinstance(fault, Fail):
            self._inject(op, fault)
        if isinstance(fault, Lose):
            event.arm()
        elif isinstance(fault, Late):
            self._record_late(event, fault.ns)
        else:
            self.inner.record(event)

    def wait(self, event: Event) -> None:
        """Hold the stream until the event is complete."""
        op, fault = self._device.submitted(self.name, "wait")
        self._flush()
        self._before(op, fault)
        if isinstance(fault, Fail):
            self._inject(op, fault)
        self.inner.wait(event)

    def synchronize(self, timeout_ns: int) -> None:
        """Wait for the inner stream."""
        self._flush()
        self.inner.synchronize(timeout_ns)

    def close(self, timeout_ns: int, *, drain: bool = True) -> None:
        """Close the inner stream; a hang lasts to its end."""
        self._flush()
        try:
            self.inner.close(timeout_ns, drain=drain)
        finally:
            if self._side is not None:
                self._side.close(timeout_ns)

    def _flush(self) -> None:
        """Submit a copy that was to change places: the next operation is none."""
        held, self._held = self._held, None
        if held is not None:
            self._device.note(held[0], "not swapped")
            held[1]()

    def _before(self, op: OpInfo, fault: Fault | None) -> None:
        """Hold the stream, for a while or until resumed."""
        if not isinstance(fault, Delay | Hang):
            return
        event = self._device.event()
        complete = event.arm()
        self.inner.wait(event)
        if isinstance(fault, Delay):
            self._device.later(fault.ns, lambda: complete(None))
        else:
            self._device.hang(op, lambda: complete(None))

    def _inject(self, op: OpInfo, fault: Fail) -> None:
        """Put a failure into the stream."""
        event = self._device.event()
        detail = f"{op.kind} {op.nth} on stream {self.name} failed by rule"
        event.arm()(DeviceError(fault.code, detail))
        self.inner.wait(event)

    def _record_late(self, event: Event, ns: int) -> None:
        """Record a hidden event, and complete the visible one some time after it."""
        complete = event.arm()
        hidden = self._device.event()
        self.inner.record(hidden)

        def deliver(failure: DeviceError | None) -> None:
            self._device.later(ns, lambda: complete(failure))

        # In a stream of its own: this one goes on.
        if self._side is None:
            self._side = self._device.inner.stream(f"{self.name}.late")
        self._side.wait(hidden)
        self._side.launch_host(deliver)


def _first_bytes(spans: CopySpans, nbytes: int) -> CopySpans:
    """Return the first nbytes of a copy."""
    triples, cut = spans.buffer, CopySpans()
    for at in range(0, len(triples), 3):
        if triples[at] == NOT_COPIED:
            continue
        length = min(triples[at + 2], nbytes - cut.num_bytes)
        if length > 0:
            cut.add(triples[at], triples[at + 1], length)
    return cut
