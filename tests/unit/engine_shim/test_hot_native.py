"""Native books do exactly what `ClockResidency` defines, with every kernel."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_shim.hot_native import SELECTED_MAX, NativeBooks
from engine_shim.hot_residency import ClockResidency, Plan
from engine_shim.hot_types import HotOptions
from kvd_kernels.residency import residency_kernels

LAST = 40


def test_selection_that_is_too_long_changes_nothing() -> None:
    books = NativeBooks()(4)
    with pytest.raises(ValueError, match=f"{SELECTED_MAX + 1} positions are selected; give "):
        books.select([[1] * SELECTED_MAX, [2]])
    assert books.slot_of(1) == -1
    assert books.statistics().selected == 0


def test_unknown_kernel() -> None:
    with pytest.raises(ValueError, match="kernel is 'best' but this CPU runs"):
        NativeBooks("best")(4)


def test_hot_buffers_have_native_books() -> None:
    options = HotOptions(4, 0, 1)
    assert isinstance(options.residency, NativeBooks)


@pytest.mark.parametrize("count", [4095, 4096, 4097, SELECTED_MAX - 1, SELECTED_MAX])
def test_long_selections(count: int) -> None:
    books, defined = NativeBooks()(7), ClockResidency(7)
    selections = [list(range(n, count, 3)) for n in range(3)]
    assert same(books.select(selections), defined.select(selections)).num_given == count


def test_books_of_one_thread_do_not_mix() -> None:
    make = NativeBooks()
    first, second = make(4), make(4)
    plan = first.select([[1, 2]])
    second.select([[3, 4]])
    assert list(plan.positions) == [1, 2], "a plan is a copy"
    assert [books.slot_of(1) for books in (first, second)] == [0, -1]


def same(native: Plan, defined: Plan) -> Plan:
    """Both plans are equal; returns one."""
    assert native.positions == defined.positions
    assert native.places == defined.places
    assert native.misses == defined.misses
    assert native.scratch == defined.scratch
    assert (native.slots, native.num_given) == (defined.slots, defined.num_given)
    return native


@pytest.mark.parametrize("kernel", residency_kernels())
def test_rows_that_come_back_are_spared_alike(kernel: str) -> None:
    draw = random.Random(8)
    books, defined = NativeBooks(kernel)(37, LAST), ClockResidency(37, LAST)
    selection = draw.sample(range(LAST), 20)
    for _ in range(300):
        selection = [it if draw.random() < 0.8 else draw.randrange(LAST) for it in selection]
        for each in (books, defined):
            each.begin_step()
        same(books.select([selection]), defined.select([selection]))
    assert books.statistics() == defined.statistics()
    assert books.statistics().evicted > 0


selections = st.lists(st.lists(st.integers(-1, LAST - 1), max_size=20), max_size=4)
stories = st.lists(
    st.one_of(
        st.tuples(st.just("select"), selections),
        st.tuples(st.just("admit"), st.tuples(st.integers(0, LAST - 5), st.integers(1, 5))),
        st.tuples(st.just("invalidate_from"), st.integers(0, LAST + 3)),
        st.tuples(st.just("begin_step"), st.just(())),
        st.tuples(st.just("reset"), st.just(())),
    ),
    max_size=40,
)


@pytest.mark.parametrize("kernel", residency_kernels())
@settings(max_examples=150, deadline=None)
@given(slots=st.sampled_from([1, 2, 5, 8, 17]), story=stories)
def test_same_story_same_books(kernel: str, slots: int, story: list[tuple[str, object]]) -> None:
    books, defined = NativeBooks(kernel)(slots, LAST), ClockResidency(slots, LAST)
    for each in (books, defined):
        each.begin_step()
    for name, argument in story:
        if name == "select":
            assert isinstance(argument, list)
            same(books.select(argument), defined.select(argument))
        elif name == "admit":
            assert isinstance(argument, tuple)
            for each in (books, defined):
                each.admit(argument[0], sum(argument))
        elif name == "invalidate_from":
            assert isinstance(argument, int)
            assert books.invalidate_from(argument) == defined.invalidate_from(argument)
        else:
            for each in (books, defined):
                getattr(each, name)()
        assert books.check() == []
        for position in range(-1, LAST + 1):
            assert books.slot_of(position) == (defined.slot_of(position) if position >= 0 else -1)
    assert books.statistics() == defined.statistics()
