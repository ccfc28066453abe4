"""One hot buffer's books beside dumb dictionaries of what is written where.

`memory` says which row is in which slot, `region` which row is at which position. A row is a number
that is given out once, so a row that is read from a wrong slot, or after another was put there, is
seen. The books are the native ones, or those that define them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvd_kernels import residency_reference as reference
from kvd_kernels.residency import HotStep, HotTables
from kvd_kernels.residency_reference import Ints, Placed, Table
from tests.kernels.residency_cases import as_ints, give, placed_by, row_of

TOKENS_MAX: Final = 60
QUERIES: Final = 3
K: Final = 6
SLOT_COUNTS: Final = (3, 6, 13)
TABLE: Final = 1  # of two, so that a wrong address is seen

Scores = npt.NDArray[np.float32]


class Books(Protocol):
    """The operations of a table, with arrays as values."""

    def begin_step(self) -> None: ...
    def admit(self, start: int, end: int) -> None: ...
    def slot_of(self, position: int) -> int: ...
    def lim(self, scores: Scores, lengths: Sequence[int]) -> list[tuple[Ints, Ints]]: ...
    def assign(self) -> tuple[Placed, list[Ints]]: ...
    def select(self, selections: Sequence[Ints]) -> Placed: ...
    def invalidate_from(self, position: int) -> object: ...
    def reset(self) -> None: ...
    def check(self) -> list[str]: ...


class NativeTable:
    """Native books."""

    def __init__(self, slots: int, kernel: str, layout: str) -> None:
        self._tables = HotTables(2, slots, TOKENS_MAX, layout=layout)
        self._scores = np.zeros((QUERIES, TOKENS_MAX), np.float32)
        self._step = HotStep(QUERIES, K, scores=self._scores, kernel=kernel)
        self._queries = 0

    def begin_step(self) -> None:
        self._tables.begin_step(TABLE)

    def admit(self, start: int, end: int) -> None:
        self._tables.admit(TABLE, start, end)

    def slot_of(self, position: int) -> int:
        return self._tables.slot_of(TABLE, position)

    def lim(self, scores: Scores, lengths: Sequence[int]) -> list[tuple[Ints, Ints]]:
        self._scores[:] = scores
        self._queries = len(lengths)
        for query, length in enumerate(lengths):
            self._step.lim(self._tables, TABLE, query, length, K)
        return [
            (self._row(self._step.selection, it), self._row(self._step.winners, it))
            for it in range(self._queries)
        ]

    def assign(self) -> tuple[Placed, list[Ints]]:
        self._step.merge_misses(self._queries)
        self._step.assign(self._tables, TABLE)
        references = [self._row(self._step.references, it) for it in range(self._queries)]
        return placed_by(self._step), references

    def select(self, selections: Sequence[Ints]) -> Placed:
        give(self._step, [it.tolist() for it in selections])
        self._step.select(self._tables, TABLE, len(selections))
        return placed_by(self._step)

    def invalidate_from(self, position: int) -> object:
        return self._tables.invalidate_from(TABLE, position)

    def reset(self) -> None:
        self._tables.reset(TABLE)

    def check(self) -> list[str]:
        return [*self._tables.check(0), *self._tables.check(TABLE)]

    def _row(self, view: memoryview[int], query: int) -> Ints:
        return row_of(view, query, self._step.counts[query])


class DefinedTable:
    """The books that define the native ones."""

    def __init__(self, slots: int) -> None:
        table = Table(slots)
        self._table = table
        self._winners: list[Ints] = []
        self.begin_step, self.admit, self.slot_of = table.begin_step, table.admit, table.slot_of
        self.select, self.reset = table.select, table.reset
        self.invalidate_from = table.invalidate_from

    def lim(self, scores: Scores, lengths: Sequence[int]) -> list[tuple[Ints, Ints]]:
        found = [self._table.lim(scores[it, :length], K) for it, length in enumerate(lengths)]
        self._winners = [winners for _, winners in found]
        return found

    def assign(self) -> tuple[Placed, list[Ints]]:
        distinct, references = reference.merge_misses(self._winners)
        return self._table.assign(distinct), references

    def check(self) -> list[str]:
        held = [token for token in self._table.tokens.tolist() if token >= 0]
        return ["a position has two slots"] if len(set(held)) < len(held) else []


class ResidencyWorld:
    """Every method acts on the books and the dictionaries, and asserts that they agree."""

    def __init__(self, slots: int, books: Books) -> None:
        self.slots = slots
        self.books = books
        self.region: dict[int, int] = {}
        self.memory: dict[int, int] = {}
        self._rows = itertools.count(1)

    @property
    def num_tokens(self) -> int:
        return len(self.region)

    def land(self, count: int) -> None:
        """Rows come into the region from elsewhere."""
        for position in range(self.num_tokens, min(TOKENS_MAX, self.num_tokens + count)):
            self.region[position] = next(self._rows)

    def new_request(self) -> None:
        """Another request takes the buffer over."""
        self.region = {}
        self.books.reset()

    def preempt(self) -> None:
        """The request loses its hot buffer and gets it again, empty; its rows stay."""
        self.books.reset()
        assert all(self.books.slot_of(it) < 0 for it in range(TOKENS_MAX)), "a row outlived reset"

    def truncate(self, num_tokens: int) -> None:
        """Rows of rejected drafts are void."""
        self.books.invalidate_from(num_tokens)
        for position in [it for it in self.region if it >= num_tokens]:
            del self.region[position]
        assert all(self.books.slot_of(it) < 0 for it in range(num_tokens, TOKENS_MAX))

    def begin(self, width: int) -> dict[int, int]:
        """Begin a step of so many rows; returns them. They are not in the region yet."""
        start = self.num_tokens
        own = {start + it: next(self._rows) for it in range(width)}
        self.books.begin_step()
        self.books.admit(start, start + width)
        for position, row in own.items():
            slot = self.books.slot_of(position)
            if slot >= 0:
                self.memory[slot] = row
        placed = sum(self.books.slot_of(it) >= 0 for it in own)
        assert placed == min(width, self.slots), "a row of the step got no slot"
        return own

    def step_by_scores(self, width: int, scores: Scores) -> None:
        """Search, merge, assign, load, read."""
        width = min(width, TOKENS_MAX - self.num_tokens)
        if width < 1:
            return
        start = self.num_tokens
        own = self.begin(width)
        lengths = [start + query + 1 for query in range(width)]
        found = self.books.lim(scores, lengths)
        for (positions, _), row, length in zip(found, scores, lengths, strict=False):
            ranked = sorted(range(length), key=lambda it: (-row[it], it))
            assert positions.tolist() == sorted(ranked[:K]), "not the best"
        placed, references = self.books.assign()
        self.load(placed, own)
        for (positions, winners), refers in zip(found, references, strict=True):
            for position, winner, index in zip(positions, winners, refers, strict=True):
                place = int(winner) if winner >= 0 else int(placed.places[index])
                self.read(int(position), place, placed, own)
        self.region.update(own)

    def step_by_positions(self, width: int, picks: Sequence[Sequence[int]]) -> None:
        """Select, load, read."""
        width = min(width, TOKENS_MAX - self.num_tokens)
        if width < 1:
            return
        start = self.num_tokens
        own = self.begin(width)
        selections = [
            as_ints([it % (start + query + 1) if it >= 0 else -1 for it in picks[query]])
            for query in range(width)
        ]
        placed = self.books.select(selections)
        wanted = {int(it) for row in selections for it in row if it >= 0}
        assert placed.positions.tolist() == sorted(wanted)
        assert len(set(placed.places.tolist())) == len(placed.places), "two rows share a place"
        self.load(placed, own)
        for position, place in zip(placed.positions.tolist(), placed.places.tolist(), strict=True):
            self.read(position, place, placed, own)
        self.region.update(own)

    def load(self, placed: Placed, own: dict[int, int]) -> None:
        """Copy rows from the region, where the step's own ones are not."""
        for position, slot in placed.loads:
            assert position not in own, "a row of this step is missed"
            self.memory[slot] = self.region[position]

    def read(self, position: int, place: int, placed: Placed, own: dict[int, int]) -> None:
        """Read a row where it is said to be."""
        expected = own.get(position, self.region.get(position))
        if place >= self.slots:
            assert placed.scratch[place - self.slots] == position
        else:
            assert self.memory[place] == expected, f"position {position}: a wrong row"

    def check(self) -> None:
        """Both directions agree, and every resident row is the right one."""
        assert self.books.check() == []
        for position in range(TOKENS_MAX):
            slot = self.books.slot_of(position)
            if slot >= 0:
                assert self.memory[slot] == self.region[position], "a wrong row is resident"
