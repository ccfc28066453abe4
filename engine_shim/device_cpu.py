"""The CPU as a device: memory that other processes can map, streams that are threads.

It keeps every promise of `engine_shim.device` and none beyond it: copies run in another thread, so
that code that reads too early is found here and not on an accelerator.

Bounds: a stream holds at most `queue_max` operations. A submission at the bound waits for room, at
most `submit_timeout_ns`, then raises DeviceError(queue_full) and has submitted nothing.

Locks: one lock for the whole device guards queues, events and counts. It is never held while a copy
or a host function runs. A stream's thread that has nothing to do sleeps for itself, so that work
for one stream wakes no other. A mark on an idle stream, and a wait for what is complete, take
effect at once and need no turn of it.
"""

from __future__ import annotations

import os
import time
from typing import Final

from engine_shim.device import (
    DeviceCode,
    DeviceError,
    DeviceStatistics,
    check_name,
    check_timeout,
)
from engine_shim.device_cpu_state import CpuEvent, SharedState
from engine_shim.device_cpu_stream import CpuStream
from engine_shim.device_memory import MemfdMemory

QUEUE_MAX: Final = 1024
SUBMIT_TIMEOUT_NS: Final = 10_000_000_000
COPY_THREADS_MAX: Final = 2
"""Threads of a large copy where there are cores: a third adds little, as memory is busy then."""


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
