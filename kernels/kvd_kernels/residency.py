"""Which rows of a request are in its hot buffer: selection, look-up and placement, natively.

A step of one request and one layer group, either op by op::

    tables.begin_step(table)
    tables.admit(table, start, end)             rows that the step writes get slots
    step.lim(tables, table, query, length, k)   scores -> the best k, each a slot or a miss
    step.merge_misses(queries)                  distinct misses of all queries, references to them
    step.assign(tables, table)                  slots for them: rows to load, and scratch rows

or, for positions that are known already, in one call instead of the last three::

    step.select(tables, table, queries)

All arrays are registered once and stay where they are, so that a call takes a few integers and can
be replayed. Both classes speak of memoryviews, which `numpy.asarray` and `torch.frombuffer` take as
they are; nothing here needs either. What each operation means is defined in
`kvd_kernels.residency_reference`; where the two differ, that one is right.

Ranges: positions 0 to 1,048,575, slots 1 to 262,144, k 1 to 4096, queries 1 to 14. All else is
refused with a ValueError that names the argument and its range.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvd_kernels._residency import HotStep, HotTables, residency_kernels

__all__ = [
    "ABSENT",
    "CHOSEN_MAX",
    "NO_WINNER",
    "POSITIONS_MAX",
    "QUERIES_MAX",
    "SLOTS_MAX",
    "Counts",
    "Figures",
    "HotStep",
    "HotTables",
    "counts_of",
    "figures_of",
    "residency_kernels",
]

POSITIONS_MAX: Final = 1 << 20
SLOTS_MAX: Final = 1 << 18
CHOSEN_MAX: Final = 4096
QUERIES_MAX: Final = 14
ABSENT: Final = -1
NO_WINNER: Final = -(1 << 31)
"""Winner code of padding."""


class Counts(NamedTuple):
    """Rows of a table since it was made; those of `lim` and `lookup` are not in the first three.

    selected: positions given to `select`; merged: of these, repeats of another's; hits: of the
    distinct ones, those that had a slot.
    misses: rows that got one in order to be loaded; scratch: rows that found none.
    admitted: rows of a step that got a slot when they were written.
    evicted: rows that lost their slot to another; invalidated: to `invalidate_from`.
    """

    selected: int
    merged: int
    hits: int
    misses: int
    scratch: int
    admitted: int
    evicted: int
    invalidated: int


class Figures(NamedTuple):
    """Sizes of what the last operation of a step wrote; see HotStep."""

    positions: int
    loads: int
    scratch: int
    given: int


def counts_of(tables: HotTables, table: int) -> Counts:
    """Return the counts of a table."""
    return Counts(*tables.counts(table))


def figures_of(step: HotStep) -> Figures:
    """Return the sizes of what the last operation wrote."""
    return Figures(*step.figures)
