"""Who loses a slot: the clock's second chance, told case by case, then every kernel beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sparse_traces import DrawnTrace
from kvd_kernels.residency_reference import Table
from tests.kernels.residency_cases import Pair, as_ints, every_kernel, every_layout

# A clock must not miss more than this for each miss of exact LRU.
MISSED_MOST = 1.06
STEPS_TO_WRAP = 130  # more than the native books number before they start over

# --- the definition -------------------------------------------------------------------------------


class Steps:
    """A table and what it holds after each step of one selection."""

    def __init__(self, slots: int) -> None:
        self.table = Table(slots)

    def step(self, *positions: int) -> list[int]:
        """Select, and return what each slot holds."""
        self.table.begin_step()
        self.table.select([as_ints(positions)])
        held: list[int] = self.table.tokens.tolist()
        return held


def test_what_was_loaded_and_never_hit_goes_first() -> None:
    steps = Steps(4)
    steps.step(0, 1, 2, 3)
    steps.step(0, 1)
    assert steps.step(8) == [0, 1, 8, 3], "the hand took the chances of 0 and 1"
    assert steps.step(9) == [0, 1, 8, 9]


def test_a_chance_saves_once() -> None:
    steps = Steps(3)
    steps.step(0, 1, 2)
    steps.step(0)
    assert steps.step(7) == [0, 7, 2]
    assert steps.step(8) == [0, 7, 8]
    assert steps.step(9) == [9, 7, 8]


def test_what_was_hit_again_is_saved_again() -> None:
    steps = Steps(3)
    steps.step(0, 1, 2)
    for new in range(10, 20):
        assert 0 in steps.step(0, new)


def test_when_all_have_a_chance_the_second_round_takes_the_first_slot() -> None:
    steps = Steps(3)
    steps.step(0, 1, 2)
    steps.step(0, 1, 2)
    assert steps.step(9) == [9, 1, 2]
    assert steps.step(10, 11) == [9, 10, 11], "all chances are gone"


def test_what_the_step_uses_keeps_its_chance_when_the_hand_passes() -> None:
    steps = Steps(3)
    steps.step(0, 1, 2)
    assert steps.step(0, 7) == [0, 7, 2]
    assert steps.step(8) == [0, 7, 8]
    assert steps.step(9) == [0, 9, 8]


def test_a_new_row_has_no_chance_until_it_is_hit() -> None:
    table = Table(2)
    table.admit(5, 7)
    table.begin_step()
    table.admit(6, 8)  # 6 has a slot by now, which is a hit
    assert sorted(table.tokens.tolist()) == [6, 7]
    table.begin_step()
    table.assign(as_ints([1]))
    assert sorted(table.tokens.tolist()) == [1, 6]


# --- every kernel beside it -----------------------------------------------------------------------


@every_kernel
@every_layout
@pytest.mark.parametrize("slots", [1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 130])
def test_hand_stops_within_and_at_the_ends_of_what_it_sees_at_once(
    kernel: str, layout: str, slots: int
) -> None:
    draw = random.Random(slots)
    pair = Pair(slots, kernel=kernel, layout=layout)
    pair.begin_step()
    for first in range(0, slots, 64):
        pair.select(list(range(first, min(slots, first + 64))))
    for _ in range(60):
        pair.begin_step()
        pair.select(draw.sample(range(2 * slots + 1), draw.randint(1, min(slots + 1, 40))))


@every_kernel
@every_layout
def test_chances_outlast_the_numbers_of_steps(kernel: str, layout: str) -> None:
    for idle in range(STEPS_TO_WRAP):
        pair = Pair(10, kernel=kernel, layout=layout)
        pair.begin_step()
        pair.select(list(range(10)))
        pair.begin_step()
        pair.select([0, 1, 2, 5, 9])
        for _ in range(idle):
            pair.tables.begin_step(1)
            pair.defined.begin_step()
        pair.begin_step()
        pair.select([20, 21, 22])
        pair.begin_step()
        pair.select([30, 31, 32, 33, 34])


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 40),
    steps=st.lists(
        st.tuples(st.sets(st.integers(0, 60), max_size=30), st.integers(0, 60)), max_size=25
    ),
)
def test_any_steps(slots: int, steps: Sequence[tuple[set[int], int]]) -> None:
    pair = Pair(slots, positions_max=64)
    for selected, start in steps:
        pair.begin_step()
        pair.admit(start, start + 3)
        pair.select(list(selected))
        pair.invalidate_from(start + 1 + len(selected) % 3)


# --- beside exact LRU -----------------------------------------------------------------------------


class Lru:
    """Exact LRU by steps; of those that a step used last together, the lowest go first."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._used: dict[int, int] = {}

    def misses(self, number: int, positions: Sequence[int]) -> int:
        """Use positions in a step; returns the misses."""
        missed = sum(position not in self._used for position in positions)
        self._used.update(dict.fromkeys(positions, number))
        by_age = sorted(self._used, key=lambda it: (self._used[it], it))
        for position in by_age[: max(0, len(by_age) - self._slots)]:
            del self._used[position]
        return missed


@pytest.mark.parametrize("overlap", [0.6, 0.8, 0.95])
@pytest.mark.parametrize("many", [2, 4])
def test_misses_beside_exact_lru(overlap: float, many: int) -> None:
    k, ours, exact = 256, 0, 0
    trace = DrawnTrace(16_384, k, overlap, 5)
    pair, lru = Pair(many * k, queries=1, k=k), Lru(many * k)
    for number in range(120):
        [selection] = trace.step()
        pair.tables.begin_step(1)
        np.asarray(pair.step.selection)[0] = selection
        pair.step.counts[0] = k
        missed = pair.step.select(pair.tables, 1, 1), lru.misses(number, selection.tolist())
        if number >= 30:  # both have filled by then
            ours, exact = ours + missed[0], exact + missed[1]
    assert ours <= MISSED_MOST * exact
