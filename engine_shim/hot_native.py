"""The books of hot buffers kept natively: what `ClockResidency` defines, without its cost.

`NativeBooks` makes the books of one thread's hot buffers, which share the arrays of a step. A call
is one native operation; its arrays are copied as a whole into the plan.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from engine_shim.hot_residency import ABSENT, POSITIONS_MAX, HotStatistics, Plan
from kvd_kernels.residency import CHOSEN_MAX, QUERIES_MAX, HotStep, HotTables

SELECTED_MAX: Final = CHOSEN_MAX * QUERIES_MAX
"""Most positions that a selection can have, all queries together."""


class NativeBooks:
    """Makes `NativeResidency` of any size, for one thread; see HotOptions.residency."""

    def __init__(self, kernel: str = "auto") -> None:
        """Choose the kernel: one of `kvd_kernels.residency.residency_kernels()`, or "auto"."""
        self._kernel = kernel
        self._step: HotStep | None = None

    def __call__(self, slots: int, positions_max: int = POSITIONS_MAX) -> NativeResidency:
        """Make the books of an empty buffer. Raises: ValueError for a size out of range."""
        if self._step is None:
            self._step = HotStep(QUERIES_MAX, CHOSEN_MAX, kernel=self._kernel)
        return NativeResidency(HotTables(1, slots, positions_max), self._step)


class NativeResidency:
    """The books of one hot buffer; see `Residency`."""

    def __init__(self, tables: HotTables, step: HotStep, table: int = 0) -> None:
        """Keep the books in one of several tables, which nobody else uses."""
        self._tables = tables
        self._table = table
        self._step = step
        self._selection = step.selection.cast("B").cast("i")
        self._arrays = (step.positions, step.places)
        self._loads = (step.load_positions, step.load_slots)

    @property
    def tables(self) -> HotTables:
        """Tables that the books are one of, for operations that take them."""
        return self._tables

    @property
    def table(self) -> int:
        """Which one."""
        return self._table

    def begin_step(self) -> None:
        """See Residency."""
        self._tables.begin_step(self._table)

    def admit(self, start: int, end: int) -> None:
        """See Residency."""
        last = self._tables.positions_max
        if not 0 <= start < end <= last:
            raise ValueError(
                f"rows [{start}, {end}) cannot be admitted; give a range within [0, {last})"
            )
        self._tables.admit(self._table, start, end)

    def select(self, selections: Iterable[Sequence[int]]) -> Plan:
        """See Residency. Raises: ValueError also for more than SELECTED_MAX positions."""
        given = list(selections)
        step = self._step
        try:
            step.select(self._tables, self._table, self._fill(given))
        except (OverflowError, ValueError):
            raise self._refusal(given) from None
        num_positions, num_loads, num_scratch, num_given = step.figures
        positions, places = (array("i", it[:num_positions].tobytes()) for it in self._arrays)
        misses = tuple(zip(*(it[:num_loads].tolist() for it in self._loads), strict=True))
        scratch = tuple(step.scratch[:num_scratch].tolist())
        return Plan(positions, places, misses, scratch, self._tables.slots, num_given)

    def slot_of(self, position: int) -> int:
        """See Residency."""
        if not 0 <= position < self._tables.positions_max:
            return ABSENT
        return self._tables.slot_of(self._table, position)

    def invalidate_from(self, position: int) -> int:
        """See Residency."""
        return self._tables.invalidate_from(self._table, min(position, self._tables.positions_max))

    def reset(self) -> None:
        """See Residency."""
        self._tables.reset(self._table)

    def statistics(self) -> HotStatistics:
        """See Residency."""
        return HotStatistics(*self._tables.counts(self._table))

    def check(self) -> list[str]:
        """See Residency."""
        return self._tables.check(self._table)

    def _fill(self, selections: Sequence[Sequence[int]]) -> int:
        """Write what is selected, one behind the other; returns the rows that it takes."""
        end = 0
        for selection in selections:
            start, end = end, end + len(selection)
            self._selection[start:end] = array("i", selection)
        num_rows = max(1, -(-end // CHOSEN_MAX))
        for row in range(num_rows):
            self._step.counts[row] = min(CHOSEN_MAX, end - row * CHOSEN_MAX)
        return num_rows

    def _refusal(self, selections: Sequence[Sequence[int]]) -> ValueError:
        count = sum(map(len, selections))
        if count > SELECTED_MAX:
            return ValueError(f"{count} positions are selected; give {SELECTED_MAX} at most")
        low, high = min(map(min, filter(len, selections))), max(map(max, filter(len, selections)))
        return ValueError(
            f"positions go from {low} to {high}; give -1 for padding, or 0 to "
            f"{self._tables.positions_max - 1}"
        )
