"""What users of hot buffers name and see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Final

from engine_shim.hot_meter import GroupFigures, together
from engine_shim.hot_native import NativeBooks
from engine_shim.hot_residency import HotStatistics, Residency

NAMED_GROUPS: Final = 8


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
    residency:    makes the books of a buffer of so many slots; ClockResidency defines them.
    """

    slots: int
    scratch_rows: int
    num_buffers: int
    timeout_ns: int = 10_000_000_000
    track_rows: bool = False
    writes_region: bool = True
    residency: Callable[[int], Residency] = field(default_factory=NativeBooks)


@dataclass(frozen=True, slots=True)
class HotFigures:
    """What happened so far.

    rows:          of all requests, closed ones included; groups: the same by group, with times.
    free, parked:  hot buffers not lent; parked ones wait for a copy to end.
    load_failures: loads that failed; holes: reads and writes refused with a HoleError.
    """

    rows: HotStatistics
    free: int
    parked: int
    load_failures: int
    holes: int
    groups: tuple[GroupFigures, ...] = ()

    def __sub__(self, earlier: HotFigures) -> HotFigures:
        """What came since; `free` and `parked` are those of now."""
        pairs = zip(self.groups, earlier.groups, strict=True)
        return HotFigures(
            self.rows - earlier.rows,
            self.free,
            self.parked,
            self.load_failures - earlier.load_failures,
            self.holes - earlier.holes,
            tuple(group - before for group, before in pairs),
        )

    def named(self) -> dict[str, float]:
        """Return all of it as figures by name, for status and metrics.

        Of groups, the first `NAMED_GROUPS`: `hot_0_hits` are those of the first one.
        """
        made = {f"hot_{it.name}": float(getattr(self.rows, it.name)) for it in fields(self.rows)}
        made |= {
            "hot_free": float(self.free),
            "hot_parked": float(self.parked),
            "hot_load_failures": float(self.load_failures),
            "hot_holes": float(self.holes),
            "hot_merged_misses": float(sum(group.merged_misses for group in self.groups)),
            **_times("hot", reduce(together, self.groups, GroupFigures())),
        }
        for at, group in enumerate(self.groups[:NAMED_GROUPS]):
            for name in ("hits", "misses", "merged"):
                made[f"hot_{at}_{name}"] = float(getattr(group.rows, name))
            made |= _times(f"hot_{at}", group)
        return made


def _times(prefix: str, figures: GroupFigures) -> dict[str, float]:
    """Time in the books for a step of a group, and the share of the copies that was hidden."""
    return {f"{prefix}_managed_us": figures.managed_us, f"{prefix}_overlap": figures.overlap}
