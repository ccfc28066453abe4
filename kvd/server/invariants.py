"""The check of kvd's books as part of the status, at a bounded cost.

A full check looks at every slot and block within one callback, so it is run only while that takes
a few milliseconds; larger books get a check of their totals, and the answer says so. A result is
reused until twenty times its cost has passed: however often the status is asked for, checking
takes at most a twentieth of the loop's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from kvd.core.blocks import BlockState, BlockTable
from kvd.core.check import problems
from kvd.core.state import State

FULL_NS_MAX: Final = 4_000_000
"""Longest full check that is run within a request, estimated."""

# Measured cost of `check.problems` for each thing it looks at, ns, rounded up.
_NS_PER_SLOT: Final = 1_500
_NS_PER_BLOCK: Final = 130
_NS_PER_USED_BLOCK: Final = 600

_REST: Final = 20
_PROBLEMS_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of a check.

    took_ns: CPU time.
    ran_at:  monotonic clock, ns.
    """

    problems: tuple[str, ...]
    scope: Literal["full", "totals"]
    took_ns: int
    ran_at: int

    @property
    def ok(self) -> bool:
        """No contradiction was found."""
        return not self.problems


class InvariantWatch:
    """Runs the check when it is asked for and due."""

    def __init__(
        self,
        clock: Callable[[], int] = time.monotonic_ns,
        cpu_clock: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._last: Checked | None = None

    def result(self, state: State) -> Checked:
        """Return the latest result, made now if the one before is old enough."""
        now = self._clock()
        last = self._last
        if last is not None and now - last.ran_at < _REST * last.took_ns:
            return last
        full = estimate_ns(state) <= FULL_NS_MAX
        start = self._cpu_clock()
        found = problems(state) if full else list(_totals(state))
        took = self._cpu_clock() - start
        scope: Literal["full", "totals"] = "full" if full else "totals"
        self._last = Checked(tuple(found[:_PROBLEMS_MAX]), scope, took, now)
        return self._last

    def age_ns(self, checked: Checked) -> int:
        """How long ago a check ran."""
        return max(0, self._clock() - checked.ran_at)


def estimate_ns(state: State) -> int:
    """What a full check of these books costs, ns, with a margin."""
    slots = sum(len(member.slots) for member in state.members.values())
    if state.pool is None:
        return slots * _NS_PER_SLOT
    table = state.pool.blocks
    used = table.total - table.counts[BlockState.RESET]
    return slots * _NS_PER_SLOT + table.total * _NS_PER_BLOCK + used * _NS_PER_USED_BLOCK


def _totals(state: State) -> Iterator[str]:
    """What can be compared without looking at every block."""
    if state.pool is None:
        return
    table = state.pool.blocks
    yield from _total_problems(table)


def _total_problems(table: BlockTable) -> Iterator[str]:
    counts = table.counts
    if sum(counts) != table.total or min(counts) < 0:
        yield f"block counts {counts} of {table.total} blocks"
    if counts[BlockState.RESET] != len(table.free):
        yield f"{counts[BlockState.RESET]} blocks are reset, {len(table.free)} are free"
    if counts[BlockState.READY] != len(table.index):
        yield f"{counts[BlockState.READY]} ready blocks, {len(table.index)} keys in the index"
