"""Devices of every kind, and what tests copy on them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from engine_shim.device import Device
from engine_shim.device_cpu import CpuDevice
from engine_shim.device_virtual import Link, VirtualDevice
from engine_shim.testing import FaultyDevice
from kvd.plan.runs import CopySpans
from kvd_kernels.host import Mapping, copy_spans

SECOND: Final = 1_000_000_000
WAIT_S: Final = 10.0


def spans(*triples: tuple[int, int, int]) -> CopySpans:
    """Make the spans (dst, src, nbytes) of a copy."""
    made = CopySpans()
    for triple in triples:
        made.add(*triple)
    return made


def make_cpu() -> Device:
    return CpuDevice(queue_max=2000, submit_timeout_ns=0)


def make_virtual() -> Device:
    links = {name: Link(name, SECOND) for name in ("a", "b")}
    return VirtualDevice(links, queue_max=2000)


MAKERS: Final[dict[str, Callable[[], Device]]] = {
    "cpu": make_cpu,
    "virtual": make_virtual,
    "faulty-cpu": lambda: FaultyDevice(make_cpu()),
    "faulty-virtual": lambda: FaultyDevice(make_virtual()),
}


class SteppedQueue:
    """Stands in for CopyQueue; its copies begin and end when the test says so."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: list[tuple[Mapping, Mapping, bytes]] = []
        self._queued: list[int] = []
        self._running = 0
        self._ended: set[int] = set()
        self._events = 0
        self._closed = False
        self.cancelled: list[int] = []
        self.sleepers = 0  # threads in `wait`
        self.refusals = 0  # submissions to refuse, as if no thread could be had

    def begin(self) -> None:
        """Let the first copy begin that has not, once there is one."""
        self.until(lambda: self._queued)
        with self._changed:
            self._running = self._queued.pop(0)

    def end(self) -> None:
        """Move its bytes."""
        with self._changed:
            dst, src, triples = self._jobs[self._running - 1]
            copy_spans(dst, src, triples)
            self._ended.add(self._running)
            self._tell()

    def until(self, come: Callable[[], object]) -> None:
        """Wait until something has come true of this queue."""
        with self._changed:
            assert self._changed.wait_for(come, WAIT_S), "it did not come"

    @property
    def submitted(self) -> int:
        """Copies handed over so far."""
        return len(self._jobs)

    def submit(
        self,
        dst: Mapping,
        src: Mapping,
        triples: bytes,
        counts: None = None,
        sums: None = None,
        *,
        threads: int = 1,
        dst_shift: int = 0,
        src_shift: int = 0,
    ) -> int:
        assert (dst_shift, src_shift) == (0, 0)
        with self._changed:
            if self.refusals:
                self.refusals -= 1
                raise RuntimeError("no thread")
            if self._closed:
                raise ValueError("the queue is closed")
            self._jobs.append((dst, src, bytes(triples)))
            self._queued.append(len(self._jobs))
            self._changed.notify_all()
            return len(self._jobs)

    def finish(self, ticket: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: ticket in self._ended or self._closed)
        if ticket not in self._ended:
            raise ValueError("the test left it")
        return 0

    def cancel(self, ticket: int) -> bool:
        with self._changed:
            if ticket not in self._queued:
                return False
            self._queued.remove(ticket)
            self.cancelled.append(ticket)
            self._changed.notify_all()
            return True

    def wait(self, seen: int) -> int:
        with self._changed:
            self.sleepers += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._events != seen or self._closed)
            self.sleepers -= 1
            return self._events

    def rouse(self) -> None:
        with self._changed:
            self._tell()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._tell()

    def _tell(self) -> None:
        self._events += 1
        self._changed.notify_all()
