"""The checksum area: what kvd records is what members read, and they cannot write it."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator

import pytest

from kvd.memory.sum_area import SUM_BYTES, SumArea
from kvd.wire.sum_layout import (
    HEADER_BYTES,
    Sum,
    SumShape,
    SumView,
    area_bytes,
    make_word,
    pack_header,
    word_offset,
)
from kvd_kernels.host import Mapping

SHAPE = SumShape(5, 3, b"d" * 32)


def sums(*crcs: int) -> bytes:
    return struct.pack(f"<{len(crcs)}I", *crcs)


@pytest.fixture
def area() -> Iterator[SumArea]:
    made = SumArea(SHAPE)
    yield made
    made.close()


@pytest.fixture
def view(area: SumArea) -> Iterator[SumView]:
    mapping = Mapping(area.fd, area.size, writable=False)
    yield SumView(mapping)
    mapping.close()


def test_places_that_are_not_there(area: SumArea, view: SumView) -> None:
    for span, block in ((3, 0), (0, 5), (-1, 0), (0, -1)):
        with pytest.raises(IndexError):
            area.store(span, (block,), (1,), sums(1))
        with pytest.raises(IndexError):
            view.get(span, block)
        with pytest.raises(IndexError):
            view.full(span, (1, block, 2), 1)


def test_many_blocks_are_read_at_once_if_all_have_a_checksum_over_so_many_tokens(
    area: SumArea, view: SumView
) -> None:
    area.store(1, (4, 0, 2), (8, 8, 7), sums(40, 1, 20))
    assert view.full(1, (), 8) == []
    assert view.full(1, (0, 4), 8) == [(0, 1), (4, 40)]
    assert view.full(1, (0, 2, 4), 8) is None, "one covers fewer tokens"
    assert view.full(1, (0, 3), 8) is None, "one has none"
    assert view.full(0, (0, 4), 8) is None, "another span"


def test_words_that_cannot_be() -> None:
    for tokens, crc in ((0, 1), (1 << 32, 1), (1, -1), (1, 1 << 32)):
        with pytest.raises(ValueError, match="does not fit"):
            make_word(tokens, crc)


@pytest.mark.parametrize(
    "header", [b"", pack_header(SHAPE)[1:], b"KVDSUMS1" + b"\2" + bytes(60)], ids=["", "cut", "v2"]
)
def test_memory_that_is_no_area(header: bytes) -> None:
    fd = os.memfd_create("none")
    os.ftruncate(fd, area_bytes(SHAPE))
    os.pwrite(fd, header, 0)
    with pytest.raises(ValueError, match="not a checksum area"):
        SumView(Mapping(fd, area_bytes(SHAPE), writable=False))
    os.close(fd)


def test_memory_that_is_too_short() -> None:
    fd = os.memfd_create("short")
    os.pwrite(fd, pack_header(SHAPE), 0)
    for size, text in ((HEADER_BYTES - 1, "at least"), (area_bytes(SHAPE) - 1, "it has")):
        os.ftruncate(fd, size)
        with pytest.raises(ValueError, match=text):
            SumView(Mapping(fd, size, writable=False))
    os.close(fd)


def test_what_is_stored_is_read_and_nothing_else(area: SumArea, view: SumView) -> None:
    area.store(1, (4, 0), (64, 7), sums(0xFFFFFFFF, 0x12))
    found = {(span, block): view.get(span, block) for span in range(3) for block in range(5)}
    assert found.pop((1, 4)) == Sum(64, 0xFFFFFFFF)
    assert found.pop((1, 0)) == Sum(7, 0x12)
    assert set(found.values()) == {None}
    assert len({word_offset(SHAPE, span, block) for span, block in found}) == len(found)


@pytest.mark.parametrize("said", [b"", sums(0, 5)], ids=["none at all", "none of the first"])
def test_a_save_without_a_checksum_voids_the_one_before(
    area: SumArea, view: SumView, said: bytes
) -> None:
    area.store(2, (1, 2), (4, 4), sums(8, 9))
    area.store(2, (1, 2), (4, 4), said)
    assert view.get(2, 1) is None
    assert view.get(2, 2) == (Sum(4, 5) if said else None)


def test_a_save_that_made_no_rows_valid_has_none(area: SumArea, view: SumView) -> None:
    area.store(0, (0,), (0,), sums(8))
    assert view.get(0, 0) is None


def test_forgetting_a_block(area: SumArea, view: SumView) -> None:
    for span in range(3):
        area.store(span, (1, 2), (4, 4), sums(8, 9))
    area.forget(1)
    assert [view.get(span, 1) for span in range(3)] == [None] * 3
    assert view.get(0, 2) == Sum(4, 9)


def test_nobody_else_can_write(area: SumArea) -> None:
    area.store(0, (0,), (4,), sums(1))
    with pytest.raises(PermissionError):
        Mapping(area.fd, area.size, writable=True)
    with pytest.raises(PermissionError):
        os.pwrite(area.fd, b"x", HEADER_BYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(area.fd, 0)
    again = os.open(f"/proc/self/fd/{area.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", HEADER_BYTES)
    os.close(again)
    assert area.get(0, 0) == Sum(4, 1)


def test_a_later_life_takes_over_what_is_known(area: SumArea) -> None:
    area.store(2, (4,), (4,), sums(77))
    adopted = SumArea.adopt(area.fd, SHAPE)
    area.close()
    assert adopted.get(2, 4) == Sum(4, 77)
    adopted.store(2, (4,), (4,), sums(78))
    assert adopted.get(2, 4) == Sum(4, 78)
    adopted.close()


def test_a_smaller_pool_keeps_the_words_of_its_blocks(area: SumArea) -> None:
    for span in range(3):
        area.store(span, (1, 4), (4, 4), sums(10 + span, 20 + span))
    adopted = SumArea.adopt(area.fd, SHAPE._replace(block_count=3))
    assert [adopted.get(span, 1) for span in range(3)] == [Sum(4, 10), Sum(4, 11), Sum(4, 12)]
    assert [adopted.get(span, 2) for span in range(3)] == [None] * 3
    adopted.close()


@pytest.mark.parametrize(
    "other",
    [
        SHAPE._replace(num_spans=2),
        SHAPE._replace(digest=b"e" * 32),
        SHAPE._replace(block_count=6),
    ],
)
def test_the_area_of_another_pool_is_not_taken_over(
    area: SumArea, other: SumShape, memfds: Callable[[], list[str]]
) -> None:
    before = memfds()
    with pytest.raises(ValueError, match="another pool"):
        SumArea.adopt(area.fd, other)
    assert memfds() == before


def test_it_leaves_nothing(memfds: Callable[[], list[str]]) -> None:
    before = memfds()
    made = SumArea(SHAPE)
    made.close()
    made.close()
    assert memfds() == before


def test_the_core_counts_as_many_bytes() -> None:
    from kvd.core import copies

    assert copies.SUM_BYTES == SUM_BYTES
