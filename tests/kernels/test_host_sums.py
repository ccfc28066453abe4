"""copy_sums and checksum_spans: refusals first, then every kernel against the reference."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_kernels import reference
from kvd_kernels.host import (
    NOT_COPIED,
    Mapping,
    checksum_spans,
    copy_kernels,
    copy_sums,
    crc32c,
)

MakeRegion = Callable[..., Mapping]

KERNELS = copy_kernels()
SIZE = 1 << 16
SHORT = (0, 1, 7, 8, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1152)
MIDDLE = (2048, 4095, 4096, 8192, 8193, 16384, 16385, 18432, 24576, 34815, 34816, 34817, 52223)
LENGTHS = (*SHORT, *MIDDLE, 52224, 65536, 65537, 78336, 147456)


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def words(*values: int) -> array[int]:
    return array("I", values)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "counts", "sums", "text"),
    [
        ([0, 0, 4], [2], [0], "counts add up to 2, not to the 1 spans"),
        ([0, 0, 4], [], [], "counts add up to 0"),
        ([0, 0, 4], [1], [0, 0], "sums has 2 words for 1 groups"),
        ([0, 0, 4, 1], [1], [0], "multiple of 24"),
    ],
)
def test_what_does_not_add_up_is_refused(
    make_region: MakeRegion, spans: list[int], counts: list[int], sums: list[int], text: str
) -> None:
    src, dst = make_region(SIZE, noise(SIZE)), make_region(SIZE)
    into = words(*sums)
    with pytest.raises(ValueError, match=text):
        copy_sums(dst, src, array("Q", spans), words(*counts), into)
    assert list(into) == sums
    assert dst.read_bytes(0, SIZE) == bytes(SIZE)


@pytest.mark.parametrize(
    "bad",
    [(SIZE, 0, 1), (0, SIZE - 3, 4), (NOT_COPIED, SIZE, 1), (NOT_COPIED, 0, SIZE + 1)],
)
def test_a_span_outside_refuses_everything(
    make_region: MakeRegion, bad: tuple[int, int, int]
) -> None:
    src, dst = make_region(SIZE, noise(SIZE)), make_region(SIZE)
    sums = words(5)
    with pytest.raises(IndexError, match="span 1"):
        copy_sums(dst, src, array("Q", [0, 0, 4096, *bad]), words(2), sums)
    assert list(sums) == [5]
    assert dst.read_bytes(0, SIZE) == bytes(SIZE)


def test_sums_must_be_writable_words(make_region: MakeRegion) -> None:
    src, dst = make_region(SIZE), make_region(SIZE)
    spans = array("Q", [0, 0, 4])
    with pytest.raises(ValueError, match="read-only"):
        copy_sums(dst, src, spans, words(1), bytes(4))
    with pytest.raises(TypeError, match="u32 words"):
        copy_sums(dst, src, spans, words(1), array("Q", [0]))
    with pytest.raises(TypeError, match="u32 words"):
        copy_sums(dst, src, spans, array("d", [1]), words(0))
    with pytest.raises(ValueError, match="multiple of 16"):
        checksum_spans(src, array("Q", [0, 4, 5]), words(1), words(0))
    with pytest.raises(IndexError):
        checksum_spans(src, array("Q", [SIZE - 1, 2]), words(1), words(0))


def test_a_destination_may_not_be_a_source(make_region: MakeRegion) -> None:
    region = make_region(SIZE, noise(SIZE))
    with pytest.raises(ValueError, match="also a source"):
        copy_sums(region, region, array("Q", [0, 100, 101]), words(1), words(0))
    sums = words(0)
    spans = array("Q", [0, 4096, 100, NOT_COPIED, 0, 100])
    assert copy_sums(region, region, spans, words(2), sums) == 100


# --- what is computed -----------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_and_alignments(make_region: MakeRegion, kernel: str, length: int) -> None:
    total = length + 8192
    content = noise(total)
    src, dst = make_region(total, content), make_region(total)
    for to, start in ((0, 0), (64, 128), (1, 0), (0, 1), (63, 4001)):
        sums = words(0, 77)
        spans = array("Q", [to, start, length, NOT_COPIED, start, length])
        assert copy_sums(dst, src, spans, words(1, 1), sums, kernel=kernel) == length
        part = content[start : start + length]
        assert list(sums) == [crc32c(part), crc32c(part, 77)]
        assert dst.read_bytes(to, length) == part
        assert dst.read_bytes(to + length, total - to - length) == bytes(total - to - length)
        dst.write_bytes(0, bytes(total))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_group_goes_on_in_another_call(make_region: MakeRegion, kernel: str) -> None:
    content = noise(SIZE)
    src, dst = make_region(SIZE, content), make_region(SIZE)
    sums = words(0)
    copy_sums(dst, src, array("Q", [0, 0, 30000]), words(1), sums, kernel=kernel)
    copy_sums(dst, src, array("Q", [30000, 30000, 20000]), words(1), sums, kernel=kernel)
    assert list(sums) == [crc32c(content[:50000])]
    again = words(0)
    checksum_spans(dst, array("Q", [0, 50000]), words(1), again)
    assert again == sums


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_groups_and_empty_groups(make_region: MakeRegion, kernel: str) -> None:
    src, dst = make_region(SIZE), make_region(SIZE)
    assert copy_sums(dst, src, b"", b"", bytearray(), kernel=kernel) == 0
    sums = words(3, 4)
    assert copy_sums(dst, src, array("Q", [0, 0, 0]), words(0, 1), sums, kernel=kernel) == 0
    assert list(sums) == [3, 4]


@st.composite
def groups(draw: st.DrawFn) -> list[list[tuple[int, int, int]]]:
    """Draw groups of spans whose destinations do not overlap."""
    lengths = st.one_of(st.sampled_from((*SHORT, *MIDDLE[:6])), st.integers(0, 3000))
    drawn: list[list[tuple[int, int, int]]] = []
    end = 0
    for _ in range(draw(st.integers(0, 6))):
        spans: list[tuple[int, int, int]] = []
        for _ in range(draw(st.integers(0, 4))):
            to = NOT_COPIED if draw(st.booleans()) else end + draw(st.integers(0, 99))
            length = draw(lengths)
            if to != NOT_COPIED:
                length = max(0, min(length, SIZE - to))
                to, end = min(to, SIZE), min(to, SIZE) + length
            spans.append((to, draw(st.integers(0, SIZE - length)), length))
        drawn.append(spans)
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_groups_are_as_the_reference_says(make_region: MakeRegion, kernel: str) -> None:
    content = noise(SIZE)
    src, dst = make_region(SIZE, content), make_region(SIZE)

    @settings(max_examples=40, deadline=None)
    @given(groups(), st.integers(0, 2**32 - 1))
    def check(drawn: list[list[tuple[int, int, int]]], seed: int) -> None:
        spans = array("Q", [word for group in drawn for span in group for word in span])
        counts = words(*(len(group) for group in drawn))
        expected, wanted = bytearray(SIZE), [seed] * len(drawn)
        sums = words(*wanted)
        moved = reference.copy_sums(expected, content, spans, counts, wanted)
        dst.write_bytes(0, bytes(SIZE))
        assert copy_sums(dst, src, spans, counts, sums, kernel=kernel) == moved
        assert list(sums) == wanted
        assert dst.read_bytes(0, SIZE) == expected

    check()


def test_reading_is_as_the_reference_says(make_region: MakeRegion) -> None:
    content = noise(SIZE)
    ranges, counts = array("Q", [5, 1000, 0, 0, 9, 3000, SIZE - 1, 1]), words(1, 0, 3)
    sums, wanted = words(0, 1, 2), [0, 1, 2]
    checksum_spans(make_region(SIZE, content), ranges, counts, sums)
    reference.checksum_spans(content, ranges, counts, wanted)
    assert list(sums) == wanted
