"""Virtual time: a heap of calls, ordered by (time, sequence)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

MS = 1_000_000
"""One millisecond of virtual time, ns."""


class Clock:
    """Integer time that jumps from call to call. Nothing here knows the real time."""

    def __init__(self) -> None:
        self.now = 0
        self.calls = 0
        self._sequence = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, delay: int, call: Callable[..., None], *args: Any) -> None:
        """Make the call `delay` ns from now; equal times keep the order of these calls."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + max(0, delay), self._sequence, call, args))

    def run_until(self, end: int) -> None:
        """Make every call that is due before `end`; the time is `end` afterwards."""
        heap = self._heap
        while heap and heap[0][0] < end:
            self.now, _, call, args = heapq.heappop(heap)
            self.calls += 1
            call(*args)
        self.now = end
