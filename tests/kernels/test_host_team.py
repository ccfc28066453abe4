"""Copies by several threads: refusals first, then the same bytes and checksums as by one."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Callable

import pytest

from kvd_kernels import reference
from kvd_kernels.host import NOT_COPIED, CopyQueue, Mapping, copy_kernels, copy_spans, copy_sums

MakeRegion = Callable[..., Mapping]

SIZE = 8 << 20
PIECE = 256 << 10
LENGTHS = (0, 1, 64, 4097, 147456, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 63)


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def scattered(seed: int) -> array[int]:
    """Spans of all lengths at odd places, both ends in another order, none over another."""
    draw = random.Random(seed)
    lengths = [draw.choice(LENGTHS) for _ in range(12)]
    offsets = []
    for _ in range(2):
        at, places = draw.randrange(64), {}
        for index in draw.sample(range(len(lengths)), len(lengths)):
            places[index] = at
            at += lengths[index] + draw.randrange(100)
        assert at <= SIZE
        offsets.append(places)
    spans = array("Q")
    for index, length in enumerate(lengths):
        spans.extend((offsets[0][index], offsets[1][index], length))
    return spans


@pytest.mark.parametrize("threads", [0, -1, 17, 1 << 70])
def test_a_number_of_threads_that_cannot_be(make_region: MakeRegion, threads: int) -> None:
    src, dst = make_region(4096, noise(4096)), make_region(4096)
    spans, one = array("Q", [0, 0, 64]), array("I", [1])
    with pytest.raises((ValueError, OverflowError), match="threads"):
        copy_spans(dst, src, spans, threads=threads)
    with pytest.raises((ValueError, OverflowError), match="threads"):
        copy_sums(dst, src, spans, one, array("I", [0]), threads=threads)
    assert dst.read_bytes(0, 4096) == bytes(4096)


def test_one_bad_span_keeps_every_thread_from_copying(make_region: MakeRegion) -> None:
    src, dst = make_region(SIZE, noise(SIZE)), make_region(SIZE)
    spans = array("Q", [0, 0, 4 * PIECE, 4 * PIECE, SIZE - 1, 2])
    with pytest.raises(IndexError, match="span 1: 2 bytes at src offset"):
        copy_spans(dst, src, spans, threads=2)
    assert dst.read_bytes(0, SIZE) == bytes(SIZE)


@pytest.mark.parametrize("kernel", copy_kernels())
@pytest.mark.parametrize("threads", [2, 3, 16])
def test_several_threads_copy_what_one_does(
    make_region: MakeRegion, kernel: str, threads: int
) -> None:
    src, dst = make_region(SIZE, noise(SIZE)), make_region(SIZE)
    spans = scattered(threads)
    expected = bytearray(SIZE)
    reference.copy_spans(expected, src.read_bytes(0, SIZE), spans)
    moved = copy_spans(dst, src, spans, kernel=kernel, threads=threads)
    assert moved == sum(spans[2::3])
    assert dst.read_bytes(0, SIZE) == bytes(expected)
    assert copy_spans(dst, src, array("Q"), kernel=kernel, threads=threads) == 0


@pytest.mark.parametrize("kernel", copy_kernels())
@pytest.mark.parametrize("counts", [[1] * 12, [12], [0, 5, 0, 1, 6, 0], [3, 3, 3, 3]])
def test_several_threads_sum_what_one_does(
    make_region: MakeRegion, kernel: str, counts: list[int]
) -> None:
    src = make_region(SIZE, noise(SIZE))
    alone, team = make_region(SIZE), make_region(SIZE)
    spans = scattered(len(counts))
    spans[6] = NOT_COPIED
    found = []
    for dst, threads in ((alone, 1), (team, 3)):
        sums = array("I", range(len(counts)))
        copy_sums(dst, src, spans, array("I", counts), sums, kernel=kernel, threads=threads)
        found.append((sums, dst.read_bytes(0, SIZE)))
    assert found[0] == found[1]


def own_threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_the_helpers_of_a_queue_stay_from_copy_to_copy(make_region: MakeRegion) -> None:
    """Making one takes a good part of the time that a layer's copy takes."""
    before = own_threads()
    src, dst = make_region(SIZE, noise(SIZE)), make_region(SIZE)
    halves = array("Q", [0, SIZE // 2, SIZE // 2, SIZE // 2, 0, SIZE // 2])
    queue = CopyQueue()
    assert queue.finish(queue.submit(dst, src, halves, threads=3)) == SIZE
    made = own_threads() - before
    assert len(made) == 3  # that of the queue, and two helpers
    for threads in (2, 1, 3, 2):
        for word in range(8):
            dst.store_u64(word * SIZE // 8, 0)
        sums = array("I", [0, 0])
        ones = array("I", [1, 1])
        row = [queue.submit(dst, src, halves, ones, sums, threads=threads) for _ in range(3)]
        assert [queue.finish(ticket) for ticket in row] == [SIZE] * 3
        data = src.read_bytes(0, SIZE)
        assert dst.read_bytes(0, SIZE) == data[SIZE // 2 :] + data[: SIZE // 2]
        assert own_threads() - before == made
    queue.close()
    assert own_threads() <= before


def test_short_copies_of_a_team_follow_one_another(make_region: MakeRegion) -> None:
    """Each finds what those before it wrote, however late a helper of the last one is."""
    size, rounds = 1 << 20, 200
    a, b = make_region(size, noise(size)), make_region(size)
    queue = CopyQueue()
    there, back = array("Q"), array("Q")
    for at in range(0, size, PIECE):
        there.extend((at, (at + PIECE) % size, PIECE))
        back.extend((at, at, PIECE))
    expected = bytearray(a.read_bytes(0, size))
    tickets = []
    for _ in range(rounds):
        tickets.append(queue.submit(b, a, there, threads=4))
        tickets.append(queue.submit(a, b, back, threads=4))
    for ticket in tickets:
        assert queue.finish(ticket) == size
    turned = rounds * PIECE % size
    expected = expected[turned:] + expected[:turned]
    assert a.read_bytes(0, size) == bytes(expected)
    queue.close()
