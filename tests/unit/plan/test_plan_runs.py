"""Row ranges between block lists: every row moves once, to its own place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.plan.runs import BlockRows, CopySpans, SummedSpans, add_rows


def moved(spans: CopySpans) -> dict[int, int]:
    """Destination byte -> source byte."""
    found: dict[int, int] = {}
    triples = spans.buffer
    for at in range(0, len(triples), 3):
        dst, src, nbytes = triples[at : at + 3]
        for byte in range(nbytes):
            assert dst + byte not in found, "a byte is written twice"
            found[dst + byte] = src + byte
    return found


@given(st.data())
def test_rows_land_where_their_token_belongs(data: st.DataObject) -> None:
    row = data.draw(st.integers(1, 4))
    sizes = [data.draw(st.integers(1, 5), label="block_tokens") for _ in range(2)]
    start = data.draw(st.integers(0, 20))
    end = data.draw(st.integers(start, 40))
    sides = []
    for size in sizes:
        first = data.draw(st.integers(0, start // size)) * size
        count = -(-max(end - first, 1) // size)
        ids = data.draw(st.permutations(range(count + 2)))[:count]
        stride = size * row + data.draw(st.integers(0, 3))
        sides.append(BlockRows(data.draw(st.integers(0, 9)), stride, size, row, ids, first))
    spans = CopySpans()
    add_rows(spans, start, end, *sides)
    expected = {}
    for token in range(start, end):
        dst, src = (_place(side, token) for side in sides)
        expected.update({dst + byte: src + byte for byte in range(row)})
    assert moved(spans) == expected
    assert spans.num_bytes == (end - start) * row


def _place(rows: BlockRows, token: int) -> int:
    index = (token - rows.first_token) // rows.block_tokens
    within = (token - rows.first_token) % rows.block_tokens
    return rows.base + rows.ids[index] * rows.block_stride + within * rows.row_bytes


def test_neighbours_are_one_span() -> None:
    whole = BlockRows(0, 8, 4, 2, [0, 1, 2])
    spans = CopySpans()
    add_rows(spans, 0, 12, whole, BlockRows(100, 8, 4, 2, [5, 6, 7]))
    assert list(spans.buffer) == [0, 140, 24]
    assert len(spans) == 1


@st.composite
def ids_in_runs(draw: st.DrawFn) -> list[int]:
    """Ids of 6 blocks that often follow each other, up or down, as they come out of a pool."""
    ids = [20]
    while len(ids) < 6:
        ids.append(ids[-1] + draw(st.sampled_from([1, 1, 1, -1, 2])))
    return ids


@given(ids_in_runs(), ids_in_runs(), st.integers(0, 24), st.integers(0, 24), st.booleans())
def test_neighbours_are_joined_as_if_they_came_one_by_one(
    to: list[int], of: list[int], start: int, end: int, summed: bool
) -> None:
    dst, src = BlockRows(7, 8, 4, 2, to), BlockRows(100, 8, 4, 2, of)
    all_, single = [SummedSpans() if summed else CopySpans() for _ in range(2)]
    for spans in (all_, single):
        if isinstance(spans, SummedSpans):
            spans.begin_group()
    add_rows(all_, start, end, dst, src)
    for token in range(start, end):
        single.add(_place(dst, token), _place(src, token), 2)
    assert list(all_.buffer) == list(single.buffer)
    assert all_.num_bytes == single.num_bytes
    if isinstance(all_, SummedSpans) and isinstance(single, SummedSpans):
        assert list(all_.counts) == list(single.counts)


def test_rows_of_different_sizes_and_tokens_without_a_block_are_refused() -> None:
    rows = BlockRows(0, 8, 4, 2, [0, 1])
    with pytest.raises(ValueError, match="rows of 3 bytes do not fit rows of 2"):
        add_rows(CopySpans(), 0, 4, rows, BlockRows(0, 12, 4, 3, [0, 1]))
    with pytest.raises(IndexError, match="token 8 lies outside 2 blocks"):
        add_rows(CopySpans(), 4, 9, rows, BlockRows(0, 8, 4, 2, [0, 1, 2]))
    with pytest.raises(IndexError, match="token 3 lies outside"):
        BlockRows(0, 8, 4, 2, [0], first_token=4).locate(3)


def test_lists_of_spans_can_be_joined() -> None:
    spans, more = CopySpans(), CopySpans()
    spans.add(0, 10, 5)
    more.add(5, 15, 5)
    more.add(20, 40, 1)
    spans.extend(more)
    assert list(spans.buffer) == [0, 10, 10, 20, 40, 1]
    assert spans.num_bytes == 11


def test_whole_blocks_count_in_their_group() -> None:
    spans = SummedSpans()
    spans.begin_group()
    rows = BlockRows(0, 20, 4, 2, [3, 1, 2])
    add_rows(spans, 0, 11, rows, BlockRows(100, 8, 4, 2, [5, 6, 7]))
    assert list(spans.buffer) == [60, 140, 8, 20, 148, 8, 40, 156, 6]
    assert list(spans.counts) == [3]
    assert spans.num_bytes == 22


def test_shifted_spans_are_the_same_pieces_elsewhere() -> None:
    spans = CopySpans()
    spans.add(100, 10, 5)
    spans.add(200, 30, 7)
    away = spans.shifted(1000, -10).shifted(0, 5)
    assert away.num_bytes == 12
    assert len(away) == 2
    assert away.unshifted == (spans.buffer, 1000, -5)
    assert list(away.buffer) == [1100, 5, 5, 1200, 25, 7]
    assert away.unshifted == (away.buffer, 0, 0)
    assert list(spans.buffer) == [100, 10, 5, 200, 30, 7]


def test_pieces_with_checksums_are_not_shifted() -> None:
    """Their sums are of one copy, and would be those of the last one."""
    with pytest.raises(TypeError, match="one copy"):
        SummedSpans().shifted(1, 1)
