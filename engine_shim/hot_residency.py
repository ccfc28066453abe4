"""Which rows of one request are in its hot buffer, and where: the books, without the bytes.

Layers that share a selection share these books: their rows stand at the same slots of their own
buffers. Two tables say the same thing both ways:

    cache_slots[position] -> slot, -1 when the row is absent
    tokens[slot]          -> position, -1 when the slot is empty

so hit or miss is one look-up per selected row, whatever the buffer's size. Recency is kept without
a list, by a clock with a second chance: per slot the number of the last step that used it, and
whether it was hit since the hand last came by. The hand passes slots that this step uses, takes the
chance of one that was hit, and stops at one that was not: the victim. A row that this step uses is
thereby never evicted by it; a row that finds no victim goes to the step's scratch tile, is used
once, and is never resident.

The rows that a step itself writes are *admitted* before its selection. They are at hand, so they
are never missed: one that finds no slot goes to the scratch tile as well.

`Residency` is what every implementation has to keep; `ClockResidency` defines it, and
`engine_shim.hot_native` has one that does the same in a fraction of the time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from operator import add, attrgetter, sub
from typing import Final, Protocol

ABSENT: Final = -1
POSITIONS_MAX: Final = 1 << 20
"""Longest request, in tokens; a table entry of 4 bytes each, made as positions are reached."""

_GROW: Final = 4096


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the rows of one step's selection are.

    positions: [N] int32, the distinct positions selected, ascending.
    places:    [N] int32, their places: below `slots` a hot slot, else slots + row of the scratch
               tile.
    misses:    (position, slot) to be loaded before the slot is read.
    scratch:   positions in the order of the scratch tile's rows.
    slots:     size of the hot buffer.
    num_given: positions selected, by all queries, before they were merged.
    """

    positions: array[int]
    places: array[int]
    misses: tuple[tuple[int, int], ...]
    scratch: tuple[int, ...]
    slots: int
    num_given: int

    @property
    def num_hits(self) -> int:
        """Selected rows that were in the hot buffer."""
        return len(self.positions) - len(self.misses) - len(self.scratch)


@dataclass(frozen=True, slots=True)
class HotStatistics:
    """Rows since the request was opened, or of all requests.

    selected: positions given by all queries; merged: of these, repeats of another query's.
    hits, misses, scratch: what became of the distinct ones.
    admitted: rows of a step put into a slot when they were written.
    evicted: rows that lost their slot to another; invalidated: to a rejected draft.
    """

    selected: int = 0
    merged: int = 0
    hits: int = 0
    misses: int = 0
    scratch: int = 0
    admitted: int = 0
    evicted: int = 0
    invalidated: int = 0

    def __add__(self, other: HotStatistics) -> HotStatistics:
        """Sum field by field."""
        return HotStatistics(*map(add, _COUNTS(self), _COUNTS(other)))

    def __sub__(self, earlier: HotStatistics) -> HotStatistics:
        """What came since, field by field."""
        return HotStatistics(*map(sub, _COUNTS(self), _COUNTS(earlier)))


# Figures of many requests and layers are summed while an engine waits.
_COUNTS: Final = attrgetter(*(field.name for field in fields(HotStatistics)))


def total(rows: Iterable[HotStatistics]) -> HotStatistics:
    """Sum of several."""
    return sum(rows, start=HotStatistics())


class Residency(Protocol):
    """The books of one hot buffer. A step is: begin_step, admit, select (once or more)."""

    def begin_step(self) -> None:
        """Start a step: nothing is in use any more."""

    def admit(self, start: int, end: int) -> None:
        """Give slots to the rows [start, end) that this step writes.

        Raises: ValueError for a range outside [0, positions_max) or one that is empty.
        """

    def select(self, selections: Iterable[Sequence[int]]) -> Plan:
        """Place what the step's queries selected.

        Args:    selections: for each query its positions in any order; -1 is padding.
        Raises:  ValueError for a position outside [-1, positions_max); nothing changes then.
        Leaves:  misses resident: whoever does not load them must `reset`.
        """

    def slot_of(self, position: int) -> int:
        """Return the slot of a row, -1 when it is absent."""

    def invalidate_from(self, position: int) -> int:
        """Empty the slots of rows at `position` and beyond; returns how many there were."""

    def reset(self) -> None:
        """Empty all slots; statistics stay."""

    def statistics(self) -> HotStatistics:
        """Return the counts so far."""

    def check(self) -> list[str]:
        """Return what is wrong with the books; [] when nothing is."""


class ClockResidency:
    """The definition, in plain Python."""

    def __init__(self, slots: int, positions_max: int = POSITIONS_MAX) -> None:
        """Make the books of an empty buffer.

        Raises: ValueError naming the argument.
        """
        for name, value in (("slots", slots), ("positions_max", positions_max)):
            if value < 1:
                raise ValueError(f"{name} is {value}; give 1 or more")
        self._slots = slots
        self._positions_max = positions_max
        self._cache_slots = array("i")
        self._tokens = array("i", [ABSENT]) * slots
        self._stamps = array("Q", [0]) * slots
        self._chances = bytearray(slots)
        self._step = 0
        self._hand = 0
        self._free = list(range(slots - 1, -1, -1))
        self._fresh = range(0)
        self._reached = 0  # no resident position is at or beyond it
        self._all_used_in = -1
        self._counts = dict.fromkeys((field.name for field in fields(HotStatistics)), 0)

    def begin_step(self) -> None:
        """Start a step."""
        self._step += 1
        self._fresh = range(0)

    def admit(self, start: int, end: int) -> None:
        """Give slots to the rows that this step writes, the newest first."""
        if not 0 <= start < end <= self._positions_max:
            raise ValueError(
                f"rows [{start}, {end}) cannot be admitted; give a range within "
                f"[0, {self._positions_max})"
            )
        self._grow(end)
        self._fresh = range(start, end)
        placed = 0
        for position in reversed(self._fresh):
            slot = self._cache_slots[position]
            if slot != ABSENT:
                self._hit(slot)
            else:
                slot = self._place(position)
            placed += slot != ABSENT
        self._counts["admitted"] += placed

    def select(self, selections: Iterable[Sequence[int]]) -> Plan:
        """Place what the queries selected, hits first: no miss can take the slot of a hit."""
        num_given, positions = self._merge(selections)
        places = array("i", [ABSENT]) * len(positions)
        absent: list[int] = []
        for at, position in enumerate(positions):
            slot = places[at] = self._cache_slots[position]
            if slot == ABSENT:
                absent.append(at)
            else:
                self._hit(slot)
        misses: list[tuple[int, int]] = []
        scratch: list[int] = []
        for at in absent:
            position = positions[at]
            slot = ABSENT if position in self._fresh else self._place(position)
            if slot == ABSENT:
                places[at] = self._slots + len(scratch)
                scratch.append(position)
            else:
                places[at] = slot
                misses.append((position, slot))
        plan = Plan(positions, places, tuple(misses), tuple(scratch), self._slots, num_given)
        self._counts["selected"] += num_given
        self._counts["merged"] += num_given - len(positions)
        self._counts["hits"] += plan.num_hits
        self._counts["misses"] += len(misses)
        self._counts["scratch"] += len(scratch)
        return plan

    def slot_of(self, position: int) -> int:
        """Return the slot of a row, -1 when it is absent."""
        return self._cache_slots[position] if position < len(self._cache_slots) else ABSENT

    def invalidate_from(self, position: int) -> int:
        """Empty the slots of rows at `position` and beyond."""
        num_emptied = 0
        for stale in range(position, self._reached):
            slot = self._cache_slots[stale]
            if slot != ABSENT:
                self._empty(slot)
                self._free.append(slot)
                num_emptied += 1
        self._reached = min(self._reached, position)
        self._fresh = range(self._fresh.start, min(self._fresh.stop, position))
        self._all_used_in = -1
        self._counts["invalidated"] += num_emptied
        return num_emptied

    def reset(self) -> None:
        """Empty all slots."""
        for slot in range(self._slots):
            if self._tokens[slot] != ABSENT:
                self._empty(slot)
        self._free = list(range(self._slots - 1, -1, -1))
        self._reached = 0
        self._fresh = range(0)
        self._all_used_in = -1

    def statistics(self) -> HotStatistics:
        """Return the counts so far."""
        return HotStatistics(**self._counts)

    def check(self) -> list[str]:
        """Compare both tables with each other and with the free slots."""
        wrong = []
        for position, slot in enumerate(self._cache_slots):
            if slot != ABSENT and self._tokens[slot] != position:
                wrong.append(f"position {position} is said to be in slot {slot}")
            if slot != ABSENT and position >= self._reached:
                wrong.append(f"position {position} is resident beyond {self._reached}")
        for slot, position in enumerate(self._tokens):
            if position != ABSENT and self._cache_slots[position] != slot:
                wrong.append(f"slot {slot} is said to hold position {position}")
            if (position == ABSENT) != (slot in self._free):
                wrong.append(f"slot {slot} with position {position} is wrongly free or not")
        if len(set(self._free)) != len(self._free):
            wrong.append("a slot is free twice")
        return wrong

    def _merge(self, selections: Iterable[Sequence[int]]) -> tuple[int, array[int]]:
        """Count the positions, and return the distinct ones ascending."""
        num_given, distinct = 0, set[int]()
        for selection in selections:
            num_given += len(selection) - selection.count(ABSENT)
            distinct.update(selection)
        distinct.discard(ABSENT)
        if distinct:
            low, high = min(distinct), max(distinct)
            if low < 0 or high >= self._positions_max:
                raise ValueError(
                    f"positions go from {low} to {high}; give -1 for padding, or 0 to "
                    f"{self._positions_max - 1}"
                )
            self._grow(high + 1)
        return num_given, array("i", sorted(distinct))

    def _grow(self, num_positions: int) -> None:
        missing = num_positions - len(self._cache_slots)
        if missing > 0:
            room = min(-(-missing // _GROW) * _GROW, self._positions_max - len(self._cache_slots))
            self._cache_slots.extend(array("i", [ABSENT]) * room)

    def _hit(self, slot: int) -> None:
        """Note that the step uses what is in a slot."""
        self._stamps[slot], self._chances[slot] = self._step, True

    def _place(self, position: int) -> int:
        """Put a row into a slot, for this step; returns it, or -1 when the step uses all."""
        slot = self._free.pop() if self._free else self._evict()
        if slot != ABSENT:
            self._tokens[slot] = position
            self._cache_slots[position] = slot
            self._stamps[slot], self._chances[slot] = self._step, False
            self._reached = max(self._reached, position + 1)
        return slot

    def _evict(self) -> int:
        """Empty the next slot that neither this step uses nor a chance saves; returns it, or -1."""
        if self._all_used_in == self._step:
            return ABSENT
        for _ in range(2 * self._slots):  # all chances are gone after one round
            slot = self._hand
            self._hand = (slot + 1) % self._slots
            if self._stamps[slot] == self._step:
                continue
            if not self._chances[slot]:
                self._empty(slot)
                self._counts["evicted"] += 1
                return slot
            self._chances[slot] = False
        self._all_used_in = self._step
        return ABSENT

    def _empty(self, slot: int) -> None:
        self._cache_slots[self._tokens[slot]] = ABSENT
        self._tokens[slot] = ABSENT
        self._stamps[slot] = 0
