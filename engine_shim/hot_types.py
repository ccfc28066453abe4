"""What users of hot buffers name and see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine_shim.hot_residency import ClockResidency, HotStatistics, Residency


@dataclass(frozen=True, slots=True)
class HotHandle:
    """One request, for as long as it is open. The epoch alone identifies it."""

    request: str
    epoch: int


@dataclass(frozen=True, slots=True)
class HotOptions:
    """Sizes and habits.

    slots:        rows of a hot buffer in each layer; twice the selection of a query is a start.
    scratch_rows: rows of the scratch tile; queries of a step times selection is always enough.
    num_buffers:  requests that can decode at a time.
    timeout_ns:   longest wait for a load.
    track_rows:   for debugging: note every row written, not a watermark.
    writes_region: whether this rank writes the step's rows into the region, or another rank does,
                  no later than the end of the layer. Then a step's rows must find slots: a step has
                  `slots` rows at most.
    residency:    makes the books of a buffer of so many slots.
    """

    slots: int
    scratch_rows: int
    num_buffers: int
    timeout_ns: int = 10_000_000_000
    track_rows: bool = False
    writes_region: bool = True
    residency: Callable[[int], Residency] = ClockResidency


@dataclass(frozen=True, slots=True)
class HotFigures:
    """What happened so far.

    rows:          of all requests, closed ones included.
    free, parked:  hot buffers not lent; parked ones wait for a copy to end.
    load_failures: loads that failed; holes: reads and writes refused with a HoleError.
    """

    rows: HotStatistics
    free: int
    parked: int
    load_failures: int
    holes: int
