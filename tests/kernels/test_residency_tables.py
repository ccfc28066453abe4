"""Tables and steps: refusals first, then every kernel against the reference."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_kernels.residency import NO_WINNER, HotStep, HotTables, counts_of, figures_of
from kvd_kernels.residency_reference import Table, merge_misses
from tests.kernels.residency_cases import (
    Pair,
    array_of,
    as_ints,
    assert_same,
    every_kernel,
    every_layout,
    give,
    placed_by,
    row_of,
)

# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tables", "slots", "positions_max", "text"),
    [
        (0, 4, 10, "num_tables is 0 but must be 1 to 65536"),
        (1, 0, 10, "slots is 0 but must be 1 to 262144"),
        (1, 262_145, 10, "slots is 262145 but must be 1 to 262144"),
        (1, 4, 0, "positions_max is 0 but must be 1 to 1048576"),
        (1, 4, 1_048_577, "positions_max is 1048577 but must be 1 to 1048576"),
    ],
)
def test_tables_that_cannot_be(num_tables: int, slots: int, positions_max: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        HotTables(num_tables, slots, positions_max)


@every_layout
def test_most_tables_take_no_memory_until_they_are_used(layout: str) -> None:
    tables = HotTables(65_536, 1 << 18, layout=layout)
    tables.begin_step(65_535)
    assert tables.check(65_535) == []
    with pytest.raises(ValueError, match="num_tables is 65537 but must be 1 to 65536"):
        HotTables(65_537, 1)


@pytest.mark.parametrize("table", [-1, 2, 1 << 65])
def test_tables_that_are_not_there(table: int) -> None:
    tables, step = HotTables(2, 4, 100), HotStep(2, 8, scores=np.zeros((2, 9), np.float32))
    text = f"table is {table} but must be 0 to 1"
    for call in (
        lambda: tables.begin_step(table),
        lambda: tables.admit(table, 0, 1),
        lambda: tables.invalidate_from(table, 0),
        lambda: tables.reset(table),
        lambda: tables.slot_of(table, 0),
        lambda: tables.counts(table),
        lambda: tables.check(table),
        lambda: step.lim(tables, table, 0, 1, 1),
        lambda: step.lookup(tables, table, 0),
        lambda: step.assign(tables, table),
        lambda: step.select(tables, table, 1),
    ):
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 3), (4, 3), (99, 101), (100, 101)])
def test_rows_that_cannot_be_admitted(start: int, end: int) -> None:
    tables = HotTables(1, 4, 100)
    with pytest.raises(ValueError, match=r"(start|end) is -?\d+ but must be"):
        tables.admit(0, start, end)
    assert counts_of(tables, 0).admitted == 0


@pytest.mark.parametrize("position", [-1, 101])
def test_positions_that_cannot_be_invalidated(position: int) -> None:
    with pytest.raises(ValueError, match=f"position is {position} but must be 0 to 100"):
        HotTables(1, 4, 100).invalidate_from(0, position)


@every_kernel
@pytest.mark.parametrize("bad", [-2, 100, (1 << 31) - 1, -(1 << 31)])
def test_a_position_out_of_range_changes_nothing(kernel: str, bad: int) -> None:
    tables, step = HotTables(1, 4, 100), HotStep(3, 40, kernel=kernel)
    give(step, [[1, 2, -1]])
    step.select(tables, 0, 1)
    before = counts_of(tables, 0)
    cache_slots = np.array(np.asarray(tables.cache_slots(0)))
    give(step, [[3, 4], [*range(20), bad, *range(15)]])
    with pytest.raises(ValueError, match=f"selection has position {bad}; give -1 for padding, or "):
        step.select(tables, 0, 2)
    with pytest.raises(ValueError, match=f"selection has position {bad}"):
        step.lookup(tables, 0, 1)
    assert counts_of(tables, 0) == before
    assert np.array_equal(cache_slots, np.asarray(tables.cache_slots(0)))


@pytest.mark.parametrize("count", [-1, 9])
def test_counts_that_cannot_be(count: int) -> None:
    tables, step = HotTables(1, 4, 100), HotStep(2, 8)
    step.counts[1] = count
    text = rf"counts\[1\] is {count} but must be 0 to 8"
    with pytest.raises(ValueError, match=text):
        step.select(tables, 0, 2)
    with pytest.raises(ValueError, match=text):
        step.lookup(tables, 0, 1)
    with pytest.raises(ValueError, match=text):
        step.merge_misses(2)


@pytest.mark.parametrize("queries", [0, 3])
def test_queries_that_are_not_there(queries: int) -> None:
    tables, step = HotTables(1, 4, 100), HotStep(2, 8)
    with pytest.raises(ValueError, match=f"queries is {queries} but must be 1 to 2"):
        step.select(tables, 0, queries)
    with pytest.raises(ValueError, match=f"queries is {queries} but must be 1 to 2"):
        step.merge_misses(queries)


def test_misses_beyond_the_end_of_another_table() -> None:
    step = HotStep(1, 8)
    give(step, [[50]])
    step.lookup(HotTables(1, 4, 100), 0, 0)
    step.merge_misses(1)
    with pytest.raises(ValueError, match="the misses reach position 50 but the table ends at 20"):
        step.assign(HotTables(1, 4, 20), 0)


def test_results_are_read_only() -> None:
    step = HotStep(2, 8)
    for view in (step.winners, step.references, step.positions, step.places, step.figures):
        assert view.readonly
    assert not step.selection.readonly
    assert not step.counts.readonly


def test_arrays_outlive_the_step_and_the_tables() -> None:
    places = HotStep(1, 8).places
    tokens = HotTables(1, 8).tokens(0)
    assert list(places) == [0] * 8
    assert tokens.tolist() == [0] * 8


# --- against the reference ------------------------------------------------------------------------


@every_kernel
@every_layout
def test_padding_and_repeats_in_one_selection(kernel: str, layout: str) -> None:
    pair = Pair(8, kernel=kernel, layout=layout)
    pair.begin_step()
    pair.select([5, -1, 5, 0, -1, 0, 7])
    pair.select([-1, -1])
    pair.select([])
    pair.select([0, 0, 0], [7, 5], [], [-1, 9])
    assert counts_of(pair.tables, 1).selected == 5 + 6


@every_kernel
@every_layout
@pytest.mark.parametrize("slots", [1, 2, 7, 8, 9, 40])
def test_everything_misses_then_everything_hits(kernel: str, layout: str, slots: int) -> None:
    pair = Pair(slots, kernel=kernel, layout=layout)
    for first in (0, 0, 100, 100, 1_048_576 - slots):
        pair.begin_step()
        placed = pair.select(list(range(first, first + slots)))
        assert len(placed.loads) in (0, slots)
        assert placed.scratch == []


@every_kernel
@every_layout
def test_selections_of_all_queries_exceed_the_slots(kernel: str, layout: str) -> None:
    pair = Pair(10, kernel=kernel, layout=layout)
    for shift in (0, 3, 50):
        pair.begin_step()
        placed = pair.select(*([it + shift for it in range(n, 60, 4)] for n in range(4)))
        assert len(placed.scratch) == 60 - 10
        assert sorted(placed.places) == list(range(60))


@every_kernel
@every_layout
def test_growth_across_the_edge_of_a_block(kernel: str, layout: str) -> None:
    pair = Pair(16, kernel=kernel, layout=layout, positions_max=160)
    for end in range(1, 160):
        pair.begin_step()
        pair.admit(end - 1, end)
        pair.select([it for it in range(end - 9, end) if it >= 0])


def test_rows_of_the_step_are_never_missed() -> None:
    pair = Pair(2)
    pair.begin_step()
    pair.admit(5, 8)
    placed = pair.select([5])
    assert placed.scratch == [5]
    pair.invalidate_from(7)  # a slot is free again, but the row is not in the region
    assert pair.select([5, 6]).loads == []


def test_last_position_and_most_slots() -> None:
    tables, step = HotTables(1, 1 << 18), HotStep(1, 4)
    give(step, [[0, (1 << 20) - 1]])
    assert step.select(tables, 0, 1) == 2
    assert tables.slot_of(0, (1 << 20) - 1) == 1
    assert tables.check(0) == []


@every_kernel
@every_layout
def test_step_by_step_is_the_same_as_at_once(kernel: str, layout: str) -> None:
    draw = np.random.default_rng(11)
    scores = np.zeros((4, 3000), np.float32)
    pair = Pair(96, kernel=kernel, layout=layout, scores=scores)
    for begun in range(12):
        scores[:] = draw.standard_normal(scores.shape)
        pair.begin_step()
        length = 2000 + 4 * begun
        pair.admit(length, length + 4)
        for query in range(4):
            pair.lim(query, length + query + 1, 40)
        winners = [row_of(pair.step.winners, it, 40) for it in range(4)]
        distinct, references = merge_misses(winners)
        assert pair.step.merge_misses(4) == len(distinct)
        assert array_of(pair.step.positions, len(distinct)).tolist() == distinct.tolist()
        for query in range(4):
            assert row_of(pair.step.references, query, 40).tolist() == references[query].tolist()
        pair.step.assign(pair.tables, 1)
        assert_same(placed_by(pair.step), pair.defined.assign(distinct))
        pair.compare()


def test_assigning_twice_places_nothing_twice() -> None:
    tables, step = HotTables(1, 8), HotStep(1, 8)
    give(step, [[3, 4]])
    step.lookup(tables, 0, 0)
    step.merge_misses(1)
    assert step.assign(tables, 0) == 2
    assert step.assign(tables, 0) == 0
    assert tables.check(0) == []


@every_kernel
def test_merge_of_winners_with_repeats_and_padding(kernel: str) -> None:
    tables, step = HotTables(1, 64), HotStep(14, 32, kernel=kernel)
    give(step, [[2, 9]])
    step.select(tables, 0, 1)
    draw = random.Random(3)
    given_rows = [[draw.choice([-1, 2, 9, *range(40, 60)]) for _ in range(29)] for _ in range(14)]
    give(step, given_rows)
    table = Table(64)
    table.select([as_ints([2, 9])])
    for query, row in enumerate(given_rows):
        step.lookup(tables, 0, query)
        winners = row_of(step.winners, query, len(row)).tolist()
        assert winners == table.lookup(as_ints(row)).tolist()
        assert [it == NO_WINNER for it in winners] == [it == -1 for it in row]
    rows = [row_of(step.winners, query, 29) for query in range(14)]
    distinct, references = merge_misses(rows)
    assert step.merge_misses(14) == len(distinct)
    assert array_of(step.positions, len(distinct)).tolist() == distinct.tolist()
    for query in range(14):
        assert row_of(step.references, query, 29).tolist() == references[query].tolist()


def test_what_a_table_said_of_the_request_before_is_not_believed() -> None:
    tables, step = HotTables(1, 4, 100, layout="map"), HotStep(1, 8)
    give(step, [[1, 2, 3, 4]])
    step.select(tables, 0, 1)
    said = np.array(np.asarray(tables.cache_slots(0)))
    tables.reset(0)
    assert np.array_equal(said, np.asarray(tables.cache_slots(0))), "nothing is cleared"
    assert [tables.slot_of(0, it) for it in range(6)] == [-1] * 6
    assert tables.check(0) == []


def test_check_sees_broken_books() -> None:
    tables, step = HotTables(1, 4, 100, layout="map"), HotStep(1, 8)
    give(step, [[1, 2, 3, 4]])
    step.select(tables, 0, 1)
    np.asarray(tables.cache_slots(0))[0] = tables.cache_slots(0)[2]
    assert tables.check(0)[0] == "position 0 is said to be in slot 1"
    assert tables.check(0)[-1] == "a slot is lost"


@every_kernel
def test_words_that_lead_nowhere_harm_nothing(kernel: str) -> None:
    tables, step = HotTables(1, 4, 100, layout="map"), HotStep(1, 32, kernel=kernel)
    words = [0xFFFFFFFF, 4 << 14 | 1, 1 << 30 | 1, 3 << 14 | 2, 3 << 14]
    np.asarray(tables.cache_slots(0))[:] = np.resize(np.array(words, np.uint32), 100)
    give(step, [range(30)])
    assert step.lookup(tables, 0, 0) == 30
    assert tables.slot_of(0, 1) == -1


@every_kernel
@every_layout
def test_steps_beyond_the_last_number(kernel: str, layout: str) -> None:
    pair = Pair(6, kernel=kernel, layout=layout)
    draw = random.Random(2)
    for _ in range(600):
        pair.begin_step()
        pair.select(draw.sample(range(12), 4), draw.sample(range(12), 2))


def test_requests_beyond_the_last_generation() -> None:
    tables, step = HotTables(1, 4, 100), HotStep(1, 8)
    for _ in range(2):
        give(step, [[50, 60]])
        assert step.select(tables, 0, 1) == 2
        for _ in range(16_383):
            tables.reset(0)
            assert tables.slot_of(0, 60) == -1, "a row of a request long gone is resident"


@pytest.mark.slow
def test_requests_cycled_through_one_buffer_never_see_each_other() -> None:
    tables, step = HotTables(1, 32, 4096), HotStep(1, 16)
    draw = random.Random(7)
    for _ in range(65_536):
        wanted = sorted(draw.sample(range(200), 8))
        tables.reset(0)
        tables.begin_step(0)
        give(step, [wanted])
        assert step.select(tables, 0, 1) == 8, "a row of the request before was taken for its own"
    assert tables.check(0) == []


selections = st.lists(
    st.lists(st.integers(-1, 60), min_size=0, max_size=40), min_size=1, max_size=4
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("select"), selections),
        st.tuples(st.just("admit"), st.tuples(st.integers(0, 60), st.integers(1, 5))),
        st.tuples(st.just("invalidate_from"), st.integers(0, 70)),
        st.tuples(st.just("begin_step"), st.none()),
        st.tuples(st.just("reset"), st.none()),
    ),
    max_size=30,
)


@every_kernel
@every_layout
@settings(max_examples=100, deadline=None)
@given(slots=st.sampled_from([1, 2, 5, 16, 17, 40]), story=actions)
def test_any_sequence(
    kernel: str, layout: str, slots: int, story: list[tuple[str, object]]
) -> None:
    pair = Pair(slots, kernel=kernel, layout=layout)
    for name, argument in story:
        if name == "select":
            assert isinstance(argument, list)
            pair.select(*argument)
        elif name == "admit":
            assert isinstance(argument, tuple)
            pair.admit(argument[0], sum(argument))
        elif name == "invalidate_from":
            assert isinstance(argument, int)
            pair.invalidate_from(argument)
        elif name == "begin_step":
            pair.begin_step()
        else:
            pair.reset()
    assert figures_of(pair.step).positions >= 0
