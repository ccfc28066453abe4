"""What hot buffers cost and save, by request and group of layers: counted always, timed at times.

Counts come from the books for nothing. Times are taken in one step of `SAMPLED_EVERY` of a request:
then the clock is read around the books, around the wait for loads, and, by two calls in the copying
stream, around the copies themselves. The share of a copy that was hidden behind other work is

    overlap = 1 - waited / copied

Steps are sampled by request: those of several take turns in each layer, and the time that one waits
must not be held against the copies of another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from operator import add, attrgetter
from typing import Final

from engine_shim.device import DeviceError
from engine_shim.hot_residency import HotStatistics

SAMPLED_EVERY: Final = 16
SAMPLED_STEP: Final = 4  # not one of the first: these fill the buffer


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """One group of layers, of one request or of several.

    rows:       what became of the rows that were selected.
    steps:      begun; sampled: of these, the ones that were timed.
    managed_ns: time in the books, of the sampled steps; likewise
    waited_ns:  time that compute waited for loads,
    copied_ns:  time that loads took in their stream.
    merged_misses: misses that another query of the step had too, and that were copied once; counted
                by steps of native operations alone.
    """

    rows: HotStatistics = field(default_factory=HotStatistics)
    steps: int = 0
    sampled: int = 0
    managed_ns: int = 0
    waited_ns: int = 0
    copied_ns: int = 0
    merged_misses: int = 0

    def __sub__(self, earlier: GroupFigures) -> GroupFigures:
        """What came since, field by field."""
        names = (field.name for field in fields(self))
        return GroupFigures(**{it: getattr(self, it) - getattr(earlier, it) for it in names})

    @property
    def managed_us(self) -> float:
        """Time in the books for a step of a request, 0 while none was timed."""
        return self.managed_ns / self.sampled / 1000 if self.sampled else 0.0

    @property
    def overlap(self) -> float:
        """The share of the copies that was hidden; 1 where nothing was copied."""
        return max(0.0, 1 - self.waited_ns / self.copied_ns) if self.copied_ns else 1.0


def together(one: GroupFigures, other: GroupFigures) -> GroupFigures:
    """Sum field by field."""
    return GroupFigures(*map(add, _FIGURES(one), _FIGURES(other)))


_FIGURES: Final = attrgetter(*(it.name for it in fields(GroupFigures)))


@dataclass(slots=True)
class GroupMeter:
    """The times of one group and request; the thread of the copying stream adds to `copied_ns`."""

    steps: int = 0
    sampled: int = 0
    is_sampled: bool = False
    managed_ns: int = 0
    waited_ns: int = 0
    copied_ns: int = 0
    merged_misses: int = 0

    def begin(self) -> None:
        """A step begins."""
        self.is_sampled = self.steps % SAMPLED_EVERY == SAMPLED_STEP
        self.sampled += self.is_sampled
        self.steps += 1

    def managing(self) -> AbstractContextManager[None]:
        """Time what is done in the books, if the step is timed."""
        return self._timing("managed_ns") if self.is_sampled else nullcontext()

    def waiting(self) -> AbstractContextManager[None]:
        """Time a wait for loads, if the step is timed."""
        return self._timing("waited_ns") if self.is_sampled else nullcontext()

    @contextmanager
    def _timing(self, name: str) -> Iterator[None]:
        started = time.perf_counter_ns()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter_ns() - started)

    def copy_timer(self) -> CopyTimer | None:
        """What times a copy of this step, None when it is not timed."""
        return CopyTimer(self) if self.is_sampled else None

    def figures(self, rows: HotStatistics) -> GroupFigures:
        """Return the figures; rows: what became of the request's rows."""
        return GroupFigures(
            rows,
            self.steps,
            self.sampled,
            self.managed_ns,
            self.waited_ns,
            self.copied_ns,
            self.merged_misses,
        )


class CopyTimer:
    """Two functions for the stream of a copy: one before it, one behind it."""

    def __init__(self, meter: GroupMeter) -> None:
        """meter: gets the time between the two, unless one of them is told of a failure."""
        self._meter = meter
        self._started = 0

    @property
    def before(self) -> Callable[[DeviceError | None], None]:
        """To be called when the copy begins."""
        return partial(self._mark, False)

    @property
    def behind(self) -> Callable[[DeviceError | None], None]:
        """To be called when it has ended."""
        return partial(self._mark, True)

    def _mark(self, is_end: bool, failure: DeviceError | None) -> None:
        if failure is not None:
            return
        if not is_end:
            self._started = time.perf_counter_ns()
        elif self._started:
            self._meter.copied_ns += time.perf_counter_ns() - self._started
