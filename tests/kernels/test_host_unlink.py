"""unlink_blocks, link_range and mark_blocks: refusals, and any queues against the reference."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_kernels import reference
from kvd_kernels.host import link_range, mark_blocks, unlink_blocks

TOTAL, QUEUES = 6, 2
Links = tuple["array[int]", "array[int]", bytearray]


def links(queues: list[list[int]]) -> Links:
    """Links of such queues."""
    after, before = (array("i", range(TOTAL + QUEUES)) for _ in range(2))
    home = bytearray(TOTAL)
    for queue, blocks in enumerate(queues):
        ring = [TOTAL + queue, *blocks]
        for at, node in enumerate(ring):
            before[node] = ring[at - 1]
            after[ring[at - 1]] = node
        for block in blocks:
            home[block] = queue + 1
    return after, before, home


def test_blocks_leave_and_the_rest_stays_in_order() -> None:
    ours = links([[0, 1, 2], [5, 4]])
    assert unlink_blocks(*ours, [1, 5, 3, 1]) == [1, 1]
    after, _, home = ours
    assert (after[TOTAL], after[0], after[2]) == (0, 2, TOTAL)
    assert after[TOTAL + 1] == 4
    assert list(home) == [1, 0, 1, 0, 2, 0]


@pytest.mark.parametrize("block", [-1, TOTAL, 2**31, 2**70, -(2**70)])
def test_a_block_that_is_none_is_refused_and_those_before_it_have_left(block: int) -> None:
    ours = links([[0, 1], []])
    with pytest.raises(IndexError, match="is outside the 6 blocks of the pool"):
        unlink_blocks(*ours, [0, block])
    assert list(ours[2]) == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("blocks", [(1,), [1.0], ["1"], array("i", [1])])
def test_only_a_list_of_int_is_taken(blocks: object) -> None:
    with pytest.raises(TypeError, match="blocks must be a list of int"):
        unlink_blocks(*links([[], []]), blocks)  # type: ignore[arg-type]


def test_buffers_of_another_shape_are_refused() -> None:
    after, before, home = links([[], []])
    with pytest.raises(ValueError, match="after has 5 entries for 6 blocks"):
        unlink_blocks(after[:5], before, home, [])
    with pytest.raises(ValueError, match="before has 28 bytes, not 32"):
        unlink_blocks(after, before[:7], home, [])
    with pytest.raises(ValueError, match="home is read-only"):
        unlink_blocks(after, before, bytes(home), [])
    with pytest.raises(ValueError, match="up to 255 queues"):
        unlink_blocks(array("i", [0]) * 300, before, home, [])


@pytest.mark.parametrize(("which", "value"), [(0, -1), (0, 8), (1, -1), (1, 1 << 30), (2, 3)])
def test_links_that_lead_outside_are_refused(which: int, value: int) -> None:
    ours = links([[0, 1], []])
    ours[which][1] = value
    with pytest.raises(ValueError, match="the links of block 1 lead outside its queue"):
        unlink_blocks(*ours, [1])


@settings(max_examples=200, deadline=None)
@given(
    st.permutations(range(TOTAL)),
    st.integers(0, TOTAL),
    st.integers(0, TOTAL),
    st.lists(st.integers(0, TOTAL - 1), max_size=12),
)
def test_any_queues_end_as_those_of_the_reference(
    order: list[int], cut: int, end: int, leaving: list[int]
) -> None:
    queues = [order[: min(cut, end)], order[cut:end]]
    ours, theirs = links(queues), links(queues)
    assert unlink_blocks(*ours, leaving) == reference.unlink_blocks(*theirs, leaving)
    assert ours == theirs
    for queue, blocks in enumerate(queues):
        ring = [TOTAL + queue, *(block for block in blocks if block not in leaving)]
        for at, node in enumerate(ring):
            assert (ours[0][ring[at - 1]], ours[1][node]) == (node, ring[at - 1])


@pytest.mark.parametrize(
    ("queue", "start", "stop"), [(2, 0, 1), (0, 3, 3), (0, 4, 3), (0, 5, 7), (1 << 20, 0, 1)]
)
def test_a_range_that_is_none_is_refused_and_changes_nothing(
    queue: int, start: int, stop: int
) -> None:
    ours = links([[0, 1], []])
    with pytest.raises(IndexError, match="are not all in the pool"):
        link_range(*ours, queue, start, stop)
    with pytest.raises(IndexError, match="are not all in the pool"):
        reference.link_range(*ours, queue, start, stop)
    assert ours == links([[0, 1], []])


@pytest.mark.parametrize("bad", [-1, 1 << 40, 1.5])
def test_a_range_of_no_numbers_is_refused(bad: object) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        link_range(*links([[], []]), 0, 0, bad)  # type: ignore[arg-type]


def test_a_range_behind_links_that_lead_outside_is_refused() -> None:
    ours = links([[0, 1], []])
    ours[1][TOTAL] = 99
    with pytest.raises(ValueError, match="the links of queue 0 lead outside it"):
        link_range(*ours, 0, 2, 4)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1), st.integers(0, 3), st.integers(0, TOTAL - 1), st.integers(1, TOTAL))
def test_any_range_is_put_where_the_reference_puts_it(
    queue: int, before: int, start: int, count: int
) -> None:
    start = max(start, before)
    stop = min(start + count, TOTAL)
    if start == stop:
        return
    there = [list(range(before)), []]
    ours, theirs, wanted = links(there), links(there), [list(blocks) for blocks in there]
    link_range(*ours, queue, start, stop)
    reference.link_range(*theirs, queue, start, stop)
    wanted[queue].extend(range(start, stop))
    assert ours == theirs == links(wanted)


def test_marks_refuse_what_does_not_fit() -> None:
    marks = bytearray(3)
    with pytest.raises(IndexError, match="block 3 is outside the 3 blocks of the pool"):
        mark_blocks(marks, bytes(3), [1, 3])
    assert marks == b"\0\1\0"
    with pytest.raises(ValueError, match="marks has 3 bytes, not 4"):
        mark_blocks(marks, bytes(4), [])
    with pytest.raises(ValueError, match="marks is read-only"):
        mark_blocks(bytes(3), bytes(3), [])
    with pytest.raises(TypeError, match="blocks must be a list of int"):
        mark_blocks(marks, bytes(3), (1,))  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=6, max_size=6), st.lists(st.integers(0, 5), max_size=8))
def test_any_marks_are_those_of_the_reference(home: bytes, blocks: list[int]) -> None:
    ours, theirs = bytearray(6), bytearray(6)
    assert mark_blocks(ours, home, blocks) == reference.mark_blocks(theirs, home, blocks)
    assert ours == theirs
