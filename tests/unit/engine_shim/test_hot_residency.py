"""The books of a hot buffer, case by case, for each kind of them.

`tests/stateful/test_hot_machine.py` mixes the cases, and `test_hot_native.py` compares both kinds.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest

from engine_shim.hot_native import NativeBooks
from engine_shim.hot_residency import (
    POSITIONS_MAX,
    ClockResidency,
    HotStatistics,
    Plan,
    Residency,
)

Make = Callable[..., Residency]


@pytest.fixture(params=["python", "native"])
def make(request: pytest.FixtureRequest) -> Make:
    """Make books of one kind."""
    return ClockResidency if request.param == "python" else NativeBooks()


def step(books: Residency, *selections: list[int]) -> Plan:
    """Begin a step that selects."""
    books.begin_step()
    plan = books.select(selections)
    assert books.check() == []
    return plan


def places(plan: Plan) -> dict[int, int]:
    """Place of each selected position."""
    return dict(zip(plan.positions, plan.places, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 10), "slots is 0"), ((-1, 10), "slots is -1"), ((1, 0), "positions_max is 0")],
)
def test_books_that_cannot_be(make: Make, arguments: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(*arguments)


@pytest.mark.parametrize("bad", [-2, 100, 1 << 40, 1 << 80, -(1 << 80)])
def test_selection_out_of_range_changes_nothing(make: Make, bad: int) -> None:
    books = make(4, 100)
    step(books, [1, 2])
    before = books.statistics()
    with pytest.raises(ValueError, match=r"positions go from .* to .*; give -1 for padding"):
        books.select([[3, 4], [bad]])
    assert books.statistics() == before
    assert [books.slot_of(it) >= 0 for it in (1, 2, 3, 4)] == [True, True, False, False]


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 3), (4, 3), (99, 101)])
def test_rows_that_cannot_be_admitted(make: Make, start: int, end: int) -> None:
    books = make(4, 100)
    with pytest.raises(ValueError, match=rf"rows \[{start}, {end}\) cannot be admitted"):
        books.admit(start, end)
    assert books.statistics() == HotStatistics()


def test_empty_selection(make: Make) -> None:
    plan = step(make(2), [], [-1, -1])
    assert (len(plan.positions), plan.num_given, plan.misses, plan.scratch) == (0, 0, (), ())


def test_first_a_miss_then_a_hit(make: Make) -> None:
    books = make(4)
    first = step(books, [7, 3, 9])
    assert list(first.positions) == [3, 7, 9]
    assert {position for position, _ in first.misses} == {3, 7, 9}
    assert dict(first.misses) == places(first)
    second = step(books, [9, 3])
    assert second.misses == ()
    assert second.num_hits == 2
    assert places(second) == {it: places(first)[it] for it in (3, 9)}


def test_queries_are_merged_and_padding_is_no_position(make: Make) -> None:
    books = make(8)
    plan = step(books, [5, 1, -1], [1, 5, 2], [5, -1, -1])
    assert list(plan.positions) == [1, 2, 5]
    assert plan.num_given == 6
    assert books.statistics() == HotStatistics(selected=6, merged=3, misses=3)


def test_victims_are_rows_of_earlier_steps(make: Make) -> None:
    books = make(4)
    step(books, [0, 1, 2, 3])
    plan = step(books, [2, 3, 10, 11])
    assert plan.scratch == ()
    assert plan.num_hits == 2
    assert [books.slot_of(it) for it in (0, 1)] == [-1, -1]
    assert sorted(plan.places) == [0, 1, 2, 3]
    assert books.statistics().evicted == 2


def test_hits_are_safe_even_when_a_miss_comes_first(make: Make) -> None:
    books = make(2)
    step(books, [100, 101])
    plan = step(books, [1, 2, 100, 101])
    assert plan.num_hits == 2
    assert plan.scratch == (1, 2)
    assert places(plan) == {1: 2, 2: 3, 100: 0, 101: 1}


def test_what_finds_no_slot_is_used_once(make: Make) -> None:
    books = make(2)
    plan = step(books, [4, 5, 6, 7])
    assert len(plan.misses) == 2
    assert plan.scratch == (6, 7)
    assert list(plan.places) == [0, 1, 2, 3]
    assert [books.slot_of(it) for it in (6, 7)] == [-1, -1]
    again = step(books, [6, 7])
    assert {position for position, _ in again.misses} == {6, 7}


def test_second_selection_of_a_step_spares_the_first(make: Make) -> None:
    books = make(3)
    books.begin_step()
    first = books.select([[1, 2]])
    second = books.select([[3, 4]])
    assert places(first).items() <= {1: 0, 2: 1}.items()
    assert second.scratch == (4,)
    assert books.slot_of(3) == 2


def test_admitted_rows_are_hits_and_no_victims(make: Make) -> None:
    books = make(3)
    step(books, [0, 1, 2])
    books.begin_step()
    books.admit(3, 5)
    plan = books.select([[0, 1, 2, 3, 4]])
    assert {3, 4}.isdisjoint(position for position, _ in plan.misses)
    assert {3, 4}.isdisjoint(plan.scratch)
    assert plan.num_hits >= 2
    assert books.statistics().admitted == 2


def test_row_admitted_again_keeps_its_slot(make: Make) -> None:
    books = make(3)
    step(books, [6])
    slot = books.slot_of(6)
    books.begin_step()
    books.admit(6, 7)
    assert books.slot_of(6) == slot
    assert books.check() == []


def test_rows_of_the_step_are_never_missed(make: Make) -> None:
    books = make(2)
    books.begin_step()
    books.admit(5, 8)
    assert [books.slot_of(it) >= 0 for it in (5, 6, 7)] == [False, True, True], "newest first"
    assert books.select([[5]]).scratch == (5,)
    books.invalidate_from(7)  # a slot is free again, but the row is not in the region
    plan = books.select([[5, 6]])
    assert plan.misses == ()
    assert plan.scratch == (5,)
    assert books.check() == []


def test_rejected_rows_lose_their_slots(make: Make) -> None:
    books = make(4)
    step(books, [1, 2, 3, 4])
    assert books.invalidate_from(3) == 2
    assert [books.slot_of(it) >= 0 for it in (1, 2, 3, 4)] == [True, True, False, False]
    assert books.check() == []
    assert books.invalidate_from(3) == 0
    plan = step(books, [8, 9, 1, 2])
    assert plan.scratch == ()
    assert plan.num_hits == 2, "free slots are taken before others are emptied"
    assert books.statistics().evicted == 0


def test_reset_empties_all(make: Make) -> None:
    books = make(4)
    step(books, [1, 2, 3, 4])
    books.reset()
    assert books.check() == []
    assert [books.slot_of(it) for it in range(5)] == [-1] * 5
    assert len(step(books, [1, 2, 3, 4]).misses) == 4
    assert books.statistics().misses == 8, "statistics stay"


def test_last_position_of_the_longest_request(make: Make) -> None:
    books = make(4)
    last = POSITIONS_MAX - 1
    plan = step(books, [last, 0])
    assert places(plan) == {0: 0, last: 1}
    assert books.slot_of(last) == 1
    assert books.slot_of(POSITIONS_MAX) == -1
    with pytest.raises(ValueError, match=f"0 to {last}"):
        books.select([[POSITIONS_MAX]])


def test_check_sees_broken_books() -> None:
    books = ClockResidency(3)
    step(books, [5, 6])
    table: array[int] = books._cache_slots  # what another table says, on purpose
    table[6] = 0
    assert any("position 6 is said to be in slot 0" in wrong for wrong in books.check())
    assert any("slot 1 is said to hold position 6" in wrong for wrong in books.check())


def test_clock_keeps_rows_in_use_for_long(make: Make) -> None:
    draw = random.Random(5)
    books = make(32)
    selection = draw.sample(range(1000), 16)
    for _ in range(400):
        selection = [it if draw.random() < 0.85 else draw.randrange(1000) for it in selection]
        plan = step(books, selection)
        assert len(set(plan.places)) == len(plan.places)
        assert plan.scratch == ()
    counts = books.statistics()
    assert counts.misses / (counts.hits + counts.misses) < 0.2
