"""Which spans carry checksums, and which bytes these cover."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.plan import runs
from kvd.plan.runs import NOT_COPIED, BlockRows, SummedSpans
from kvd.plan.sums import SAMPLE_EVERY, add_block_groups, add_group, is_summed
from kvd_kernels import host


def pieces(spans: SummedSpans) -> list[list[tuple[int, ...]]]:
    """The pieces of each group."""
    triples = [tuple(spans.buffer[at : at + 3]) for at in range(0, len(spans.buffer), 3)]
    found = []
    for count in spans.counts:
        found.append(triples[:count])
        triples = triples[count:]
    assert not triples
    assert len(spans.sums) == len(spans.counts)
    return found


def test_the_kernel_knows_the_same_place_for_what_is_not_copied() -> None:
    assert runs.NOT_COPIED == host.NOT_COPIED


def test_modes() -> None:
    places = [(block, layer) for block in range(64) for layer in range(64)]
    assert not any(is_summed("off", *place) for place in places)
    assert all(is_summed("always", *place) for place in places)
    sampled = [place for place in places if is_summed("sampled", *place)]
    assert len(sampled) * SAMPLE_EVERY == len(places)
    assert {layer for _, layer in sampled} == {block for block, _ in sampled} == set(range(64))


def test_pieces_are_joined_within_a_group_only() -> None:
    spans = SummedSpans()
    spans.begin_group()
    spans.add(0, 100, 4)
    spans.add(4, 104, 4)
    spans.begin_group()
    spans.add(8, 108, 4)
    spans.read(112, 2)
    spans.read(114, 2)
    spans.read(120, 1)
    spans.add(12, 121, 3)
    assert pieces(spans) == [
        [(0, 100, 8)],
        [(8, 108, 4), (NOT_COPIED, 112, 4), (NOT_COPIED, 120, 1), (12, 121, 3)],
    ]
    assert spans.num_bytes == 15


@given(st.data())
def test_a_group_reads_every_covered_row_once_in_order(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6))
    covered = (0, data.draw(st.integers(1, size)))
    start = data.draw(st.integers(0, covered[1]))
    copied = (start, data.draw(st.integers(start, covered[1])))
    slot_size = data.draw(st.integers(1, 4))
    parts: list[tuple[BlockRows, BlockRows]] = []
    want: list[int] = []
    moved: list[int] = []
    for part, row in enumerate((3, 2)):
        src = BlockRows(1000 * part + 7, 100, size, row, (4,))
        ids = data.draw(st.permutations(range(8)))
        dst = BlockRows(5000 + 1000 * part, slot_size * row, slot_size, row, ids)
        parts.append((dst, src))
        first = 1000 * part + 7 + 400
        want += range(first, first + covered[1] * row)
        moved += range(first + copied[0] * row, first + copied[1] * row)
    spans = SummedSpans()
    add_group(spans, covered, copied, parts)
    (group,) = pieces(spans)
    read = [byte for _, at, count in group for byte in range(at, at + count)]
    assert read == want
    copies = [(to, at, count) for to, at, count in group if to != NOT_COPIED]
    assert [byte for _, at, count in copies for byte in range(at, at + count)] == moved
    assert spans.num_bytes == len(moved)


def sequence(data: st.DataObject, size: int, row: int, skipped: int) -> BlockRows:
    """Rows of a sequence whose first `skipped` blocks are not there, in any blocks."""
    ids = tuple(data.draw(st.lists(st.integers(0, 9), min_size=8 - skipped, max_size=8 - skipped)))
    base, stride = data.draw(st.integers(0, 99)), size * row + data.draw(st.integers(0, 7))
    return BlockRows(base, stride, size, row, ids, skipped * size)


@given(st.data())
def test_whole_blocks_at_once_are_the_groups_of_each(data: st.DataObject) -> None:
    size, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    other = data.draw(st.sampled_from((size, size, 2 * size)))
    parts = [
        (sequence(data, size, row, data.draw(st.integers(0, 2))), sequence(data, other, row, 0))
        for row in data.draw(st.lists(st.integers(1, 5), min_size=width, max_size=width))
    ]
    first = data.draw(st.integers(2, 7))
    blocks = range(first, data.draw(st.integers(first, 8)))
    one_by_one, at_once = SummedSpans(), SummedSpans()
    for spans in (one_by_one, at_once):
        add_group(spans, (2 * size, 2 * size + 1), (2 * size, 2 * size + 1), parts)
    for at in blocks:
        tokens = (at * size, (at + 1) * size)
        add_group(one_by_one, tokens, tokens, parts)
    add_block_groups(at_once, blocks, parts)
    assert joined(at_once) == joined(one_by_one)
    assert at_once.num_bytes == one_by_one.num_bytes


def joined(spans: SummedSpans) -> list[list[tuple[int, int]]]:
    """(destination, source) of each byte of each group."""
    return [
        [(to + at, source + at) for to, source, count in group for at in range(count)]
        for group in pieces(spans)
    ]


@pytest.mark.parametrize("blocks", [range(2), range(7, 9)])
def test_blocks_that_are_not_there_are_refused(blocks: range) -> None:
    rows = BlockRows(0, 4, 2, 2, (1, 2, 3, 4, 5, 6, 7), 2)
    with pytest.raises(IndexError, match="lies outside 7 blocks"):
        add_block_groups(SummedSpans(), blocks, [(rows, rows)])
