"""How the event loop fares: lag of its ticks, and CPU time of its longest callbacks.

Lag is what engines feel; thread CPU time tells whether kvd itself was the cause, since on a busy
host the scheduler delays callbacks that cost nothing.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class LoopMeter:
    """Counts what callbacks cost; reading it resets nothing."""

    def __init__(self) -> None:
        """Nothing measured yet."""
        self.callbacks = 0
        self.cpu_ns = 0
        self.cpu_ns_max = 0
        self.cpu_ns_max_of: dict[str, int] = {}
        self.lag_ns_max = 0
        self.lag_ns_last = 0
        self.received_at = 0
        """When the frame that is handled now was received (monotonic, ns); 0 for none."""
        self.gates = 0
        self.gate_ns = 0
        self.gate_ns_max = 0
        self.oom_score_adj = 0
        """How readily the kernel ends this process, as found at start."""
        self.relief: Callable[[], None] | None = None
        """Called after every measured callback; measured under its own name."""

    def timed(self, name: str, callback: Callable[P, R]) -> Callable[P, R]:
        """The same callback, measured."""

        def measured(*args: P.args, **kwargs: P.kwargs) -> R:
            before = time.thread_time_ns()
            try:
                return callback(*args, **kwargs)
            finally:
                self.add(name, time.thread_time_ns() - before)

        return measured

    def add(self, name: str, cpu_ns: int) -> None:
        """One callback has run."""
        self.callbacks += 1
        self._note(name, cpu_ns)
        if self.relief is not None:
            before = time.thread_time_ns()
            self.relief()
            self._note("relief", time.thread_time_ns() - before)

    def _note(self, name: str, cpu_ns: int) -> None:
        self.cpu_ns += cpu_ns
        self.cpu_ns_max = max(self.cpu_ns_max, cpu_ns)
        if cpu_ns > self.cpu_ns_max_of.get(name, 0):
            self.cpu_ns_max_of[name] = cpu_ns

    def gates_stored(self, count: int) -> None:
        """Gate words were stored: what counts is the time since their frame was received."""
        if self.received_at:
            ns = time.monotonic_ns() - self.received_at
            self.gates += count
            self.gate_ns += ns * count
            self.gate_ns_max = max(self.gate_ns_max, ns)

    def lagged(self, lag_ns: int) -> None:
        """A timer fired so much later than it was due."""
        self.lag_ns_last = max(0, lag_ns)
        self.lag_ns_max = max(self.lag_ns_max, lag_ns)

    def reset_max(self) -> None:
        """Forget the extremes (start-up is over)."""
        self.cpu_ns_max, self.lag_ns_max = 0, 0
        self.cpu_ns_max_of.clear()

    def figures(self) -> dict[str, float]:
        """Everything, seconds and bytes."""
        longest = {
            f"loop_{name}_cpu_seconds_max": cpu_ns / 1e9
            for name, cpu_ns in self.cpu_ns_max_of.items()
        }
        return longest | {
            "loop_callbacks": float(self.callbacks),
            "loop_cpu_seconds": self.cpu_ns / 1e9,
            "loop_callback_cpu_seconds_max": self.cpu_ns_max / 1e9,
            "loop_lag_seconds": self.lag_ns_last / 1e9,
            "loop_lag_seconds_max": self.lag_ns_max / 1e9,
            "gate_stores": float(self.gates),
            "gate_store_seconds": self.gate_ns / 1e9,
            "gate_store_seconds_max": self.gate_ns_max / 1e9,
            "rss_bytes": float(_rss_bytes()),
            "loop_tasks": float(_num_tasks()),
            "oom_score_adj": float(self.oom_score_adj),
        }


def _rss_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError):
        return 0


def _num_tasks() -> int:
    """Tasks of the running loop, the one that asks included; 0 outside a loop."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0
