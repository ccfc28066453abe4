"""The definition of each residency operation, in numpy.

Tests compare `kvd_kernels.residency` with this file; where the two differ, this file is right. It
is written to be read, not to be fast.

Symbols: T tokens of a context, k what a query selects, P queries of a step, N distinct positions.
A *winner code* is one int32: the slot of a position that has one, ~position for one that has none,
NO_WINNER for padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

ABSENT: Final = -1
PADDING: Final = -1
NO_WINNER: Final = -(1 << 31)


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> Floats:
    """Return bfloat16 values, given by their bits, as the float32 that each of them is."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def top_k(scores: Floats, k: int) -> Ints:
    """Return the positions of the k best of scores [T], ascending; all T when k is more.

    Of equal scores the lower position is better; -0 equals 0; NaN counts as -inf.
    """
    ranked = np.where(np.isnan(scores), np.float32(-np.inf), scores)
    best_first = np.argsort(-ranked, kind="stable")
    return np.sort(best_first[:k]).astype(np.int32)


def is_miss(winners: Ints) -> npt.NDArray[np.bool_]:
    """Say of each winner code whether it names a position that has no slot."""
    missed: npt.NDArray[np.bool_] = (winners < 0) & (winners != NO_WINNER)
    return missed


def merge_misses(winners: Sequence[Ints]) -> tuple[Ints, list[Ints]]:
    """Return the distinct misses of P queries, ascending, and for each query references to them.

    A reference is the index of a miss among the distinct ones, ABSENT for what is no miss.
    """
    missed = [~codes[is_miss(codes)] for codes in winners]
    distinct = np.unique(np.concatenate([np.empty(0, np.int32), *missed])).astype(np.int32)
    references = []
    for codes in winners:
        found = np.searchsorted(distinct, ~codes)
        references.append(np.where(is_miss(codes), found, ABSENT).astype(np.int32))
    return distinct, references


@dataclass(slots=True)
class Placed:
    """Where rows are.

    positions: [N] distinct positions, ascending.
    places:    [N] of each its slot, or slots + row of the scratch tile.
    loads:     (position, slot) of rows to be loaded before their slots are read.
    scratch:   positions in the order of the scratch tile's rows, which are used once.
    """

    positions: Ints
    places: Ints
    loads: list[tuple[int, int]] = field(default_factory=list)
    scratch: list[int] = field(default_factory=list)


class Table:
    """The books of one hot buffer.

    tokens[slot] is the position in a slot, stamps[slot] the last step that used it. A position is
    resident when a slot names it; no two name the same. The native table finds it by a word per
    position, which is no more than a short cut.

    A victim is found by a clock with a second chance. A look-up that hits a slot gives it a chance;
    what is put into a slot starts without. The hand goes round: it passes what this step uses,
    takes the chance of a slot that has one, and stops at one that has none.
    """

    def __init__(self, slots: int) -> None:
        """All slots are empty; the lowest is taken first."""
        self.slots = slots
        self.tokens = np.full(slots, ABSENT, np.int32)
        self.stamps = np.zeros(slots, np.int64)
        self.chances = np.zeros(slots, np.bool_)
        self.step = 1
        self.hand = 0
        self.fresh = range(0)
        self.evicted = 0
        self._free = list(range(slots - 1, -1, -1))

    def slot_of(self, position: int) -> int:
        """Return the slot of a position, ABSENT when it has none."""
        found = np.flatnonzero(self.tokens == position)
        return int(found[0]) if position >= 0 and len(found) > 0 else ABSENT

    def begin_step(self) -> None:
        """Start a step: nothing is in use any more, and no row is the step's own."""
        self.step += 1
        self.fresh = range(0)

    def admit(self, start: int, end: int) -> None:
        """Give slots to rows [start, end) that the step writes, the newest first."""
        self.fresh = range(start, end)
        for position in reversed(self.fresh):
            slot = self.slot_of(position)
            if slot != ABSENT:
                self._hit(slot)
                continue
            slot = self._take_slot()
            if slot != ABSENT:
                self._put(slot, position)

    def lookup(self, positions: Ints) -> Ints:
        """Return winner codes; hits are in use from here on. Repeats and PADDING are legal."""
        winners = np.full(len(positions), NO_WINNER, np.int32)
        for at, position in enumerate(positions):
            slot = self.slot_of(int(position))
            if slot != ABSENT:
                winners[at] = slot
                self._hit(slot)
            elif position != PADDING:
                winners[at] = ~position
        return winners

    def lim(self, scores: Floats, k: int) -> tuple[Ints, Ints]:
        """Select the k best of scores; returns their positions and winner codes."""
        positions = top_k(scores, k)
        return positions, self.lookup(positions)

    def assign(self, misses: Ints) -> Placed:
        """Give places to distinct misses, ascending.

        A free slot, or that of a victim, which is none that this step uses. Where there is none,
        and for rows that the step itself writes, a row of the scratch tile. What has a slot by now
        keeps it.
        """
        return self._place(misses, self.lookup(misses))

    def select(self, selections: Sequence[Ints]) -> Placed:
        """Merge what P queries select, look it up, and place what is missed: hits come first, so
        that no miss takes the slot of one.
        """
        given = np.concatenate([np.empty(0, np.int32), *selections])
        positions = np.unique(given[given != PADDING]).astype(np.int32)
        return self._place(positions, self.lookup(positions))

    def invalidate_from(self, position: int) -> int:
        """Empty the slots of rows at `position` and beyond; returns how many there were."""
        stale = sorted(int(token) for token in self.tokens if token >= position)
        for token in stale:
            slot = self.slot_of(token)
            self.tokens[slot] = ABSENT
            self.stamps[slot], self.chances[slot] = 0, False
            self._free.append(slot)
        self.fresh = range(self.fresh.start, min(self.fresh.stop, position))
        return len(stale)

    def reset(self) -> None:
        """Empty all slots, for another request."""
        self.tokens[:], self.stamps[:], self.chances[:] = ABSENT, 0, False
        self._free = list(range(self.slots - 1, -1, -1))
        self.begin_step()

    def _place(self, positions: Ints, winners: Ints) -> Placed:
        placed = Placed(positions, winners.copy())
        for at in np.flatnonzero(is_miss(winners)):
            position = int(positions[at])
            slot = ABSENT if position in self.fresh else self._take_slot()
            if slot == ABSENT:
                placed.places[at] = self.slots + len(placed.scratch)
                placed.scratch.append(position)
            else:
                self._put(slot, position)
                placed.places[at] = slot
                placed.loads.append((position, slot))
        return placed

    def _take_slot(self) -> int:
        """Return an empty slot, one emptied if need be, or ABSENT when this step uses all."""
        if self._free:
            return self._free.pop()
        for _ in range(2 * self.slots):  # all chances are gone after one round
            slot = self.hand
            self.hand = (slot + 1) % self.slots
            if self.stamps[slot] == self.step:
                continue
            if not self.chances[slot]:
                self.evicted += 1
                return slot
            self.chances[slot] = False
        return ABSENT

    def _hit(self, slot: int) -> None:
        self.stamps[slot], self.chances[slot] = self.step, True

    def _put(self, slot: int, position: int) -> None:
        self.tokens[slot] = position
        self.stamps[slot], self.chances[slot] = self.step, False
