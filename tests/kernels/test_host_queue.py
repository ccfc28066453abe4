"""CopyQueue: refusals first, then order, sums and news."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from kvd_kernels import reference
from kvd_kernels.host import CopyQueue, Mapping, copy_kernels, crc32c
from tests.kernels.conftest import until_asleep
from tests.kernels.queue_rig import (
    ATTEMPTS,
    LONG,
    LONG_COPY,
    SIZE,
    LongCopy,
    MakeRegion,
    noise,
    span,
    words,
)

# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lists", "options", "error", "text"),
    [
        ((span(0, 0, 1),), {"threads": 0}, ValueError, "threads is 0"),
        ((span(0, 0, 1),), {"threads": 17}, ValueError, "threads is 17"),
        ((span(0, 0, 1),), {"kernel": "none"}, ValueError, "kernel 'none'"),
        ((array("Q", [0, 0]),), {}, ValueError, "multiple of 24"),
        ((array("d", [0, 0, 1]),), {}, TypeError, "native u64"),
        (([0, 0, 1],), {}, TypeError, "spans must be a bytes-like object"),
        ((span(0, 0, 1), words(1)), {}, TypeError, "both counts and sums"),
        ((span(0, 0, 1), None, words(1)), {}, TypeError, "both counts and sums"),
        ((span(0, 0, 1), words(1), words()), {}, ValueError, "sums has 0 words for 1 groups"),
        ((span(0, 0, 1), words(1), bytes(4)), {}, ValueError, "read-only"),
        ((span(0, 0, 1), words(1), array("Q", [0])), {}, TypeError, "u32 words"),
    ],
)
def test_what_is_no_copy_is_not_queued(
    queue: CopyQueue,
    make_region: MakeRegion,
    lists: tuple[Any, ...],
    options: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    src, dst = make_region(SIZE, noise(SIZE)), make_region(SIZE)
    with pytest.raises(error, match=text):
        queue.submit(dst, src, *lists, **options)
    with pytest.raises(TypeError):
        queue.submit(bytearray(8), src, span(0, 0, 1))  # type: ignore[arg-type]
    assert queue.submit(dst, src, span(8, 0, 8)) == 1, "no ticket is lost"
    assert queue.finish(1) == 8
    assert dst.read_bytes(0, 8) == bytes(8)


def test_tickets_that_are_none(queue: CopyQueue, make_region: MakeRegion) -> None:
    region = make_region(SIZE)
    ticket = queue.submit(region, region, span(0, 64, 8))
    for none in (0, ticket + 1, 1 << 63):
        with pytest.raises(ValueError, match=f"ticket {none} is none"):
            queue.finish(none)
        assert not queue.cancel(none)
    with pytest.raises(TypeError):
        queue.finish(-1)
    assert queue.finish(ticket) == 8
    with pytest.raises(ValueError, match=f"ticket {ticket} is none"):
        queue.finish(ticket)
    assert not queue.cancel(ticket)


def test_closed_queue(queue: CopyQueue, make_region: MakeRegion) -> None:
    src, dst = make_region(SIZE, noise(SIZE)), make_region(SIZE)
    ticket = queue.submit(dst, src, span(0, 0, 8))
    while queue.cancel(ticket):  # so that it has begun
        ticket = queue.submit(dst, src, span(0, 0, 8))
    queue.close()
    queue.close()
    for lists in ((), (words(1), words(0))):
        with pytest.raises(ValueError, match="the queue is closed"):
            queue.submit(dst, src, span(0, 0, 8), *lists)
    queue.rouse()
    assert queue.wait(queue.wait(0)) > 0, "nothing is waited for"
    assert queue.finish(ticket) == 8, "it ran before the close, and its outcome is kept"
    never = CopyQueue()
    never.close()
    with pytest.raises(ValueError, match="the queue is closed"):
        never.submit(dst, src, span(0, 0, 8))


@pytest.mark.parametrize("kernel", copy_kernels())
def test_a_copy_that_fails_moves_nothing_and_those_behind_it_run(
    queue: CopyQueue, make_region: MakeRegion, kernel: str
) -> None:
    content = noise(SIZE)
    src, dst, fixed = make_region(SIZE, content), make_region(SIZE), make_region(8, writable=False)
    sums, other = words(5), words(6)
    bad = array("Q", [0, 0, 64, SIZE - 1, 0, 2])
    tickets = [
        queue.submit(dst, src, bad, kernel=kernel),
        queue.submit(dst, src, bad, words(2), sums, kernel=kernel),
        queue.submit(dst, src, span(0, 0, 64), words(2), other, kernel=kernel),
        queue.submit(fixed, src, span(0, 0, 8), kernel=kernel),
        queue.submit(src, src, span(0, 4, 8), kernel=kernel),
        queue.submit(dst, src, span(64, 64, 64), kernel=kernel),
    ]
    errors: list[tuple[type[Exception], str]] = [
        (IndexError, "span 1"),
        (IndexError, "span 1"),
        (ValueError, "counts add up to 2, not to the 1 spans"),
        (ValueError, "read-only"),
        (ValueError, "also a source"),
    ]
    assert queue.finish(tickets.pop()) == 64
    for ticket, (error, text) in zip(tickets, errors, strict=True):
        with pytest.raises(error, match=text):
            queue.finish(ticket)
    assert (list(sums), list(other)) == ([5], [6])
    assert dst.read_bytes(0, 192) == bytes(64) + content[64:128] + bytes(64)


def test_a_mapping_closed_before_the_turn(queue: CopyQueue, make_region: MakeRegion) -> None:
    src, dst, gone = (make_region(SIZE, noise(SIZE)) for _ in range(3))
    gone.close()
    tickets = [
        queue.submit(gone, src, span(0, 0, 8)),
        queue.submit(dst, gone, span(0, 0, 8), words(1), words(0)),
    ]
    for ticket in tickets:
        with pytest.raises(ValueError, match="the mapping is closed"):
            queue.finish(ticket)


def test_a_mapping_closed_at_any_time(queue: CopyQueue, make_memfd: Callable[..., int]) -> None:
    """The copy has its bytes, or finds the mapping closed; it never touches what is gone."""
    fd = make_memfd(SIZE)
    src = Mapping(fd, SIZE, writable=True)
    src.write_bytes(0, noise(SIZE))
    for _ in range(200):
        dst = Mapping(make_memfd(SIZE), SIZE, writable=True)
        tickets = [queue.submit(dst, src, span(0, 0, SIZE)) for _ in range(3)]
        dst.close()
        ends = [outcome(queue, ticket) for ticket in tickets]
        assert set(ends) <= {SIZE, "the mapping is closed"}
        assert ends == sorted(ends, key=str), "once closed, it stays so"


# --- what is copied -------------------------------------------------------------------------------


def test_each_copy_reads_what_the_one_before_it_wrote(
    queue: CopyQueue, make_region: MakeRegion
) -> None:
    steps = 200
    region, content = make_region(SIZE, noise(256)), noise(256)
    for at in range(steps):
        queue.submit(region, region, span(256 * (at + 1), 256 * at, 256), threads=1 + at % 2)
    for ticket in range(steps, 0, -1):
        assert queue.finish(ticket) == 256
    assert region.read_bytes(0, 256 * (steps + 1)) == content * (steps + 1)


@pytest.mark.parametrize("kernel", copy_kernels())
@pytest.mark.parametrize("seed", range(5))
def test_any_copies_are_as_the_reference_says(
    queue: CopyQueue, make_region: MakeRegion, kernel: str, seed: int
) -> None:
    draw, size = random.Random(seed), 4096
    content = draw.randbytes(size)
    regions = [make_region(size, content) for _ in range(2)]
    models = [bytearray(content) for _ in range(2)]
    model = reference.CopyQueue()
    sums, model_sums = [words(0, seed) for _ in range(40)], [[0, seed] for _ in range(40)]
    open_tickets = []
    for number in range(40):
        dst, src = draw.sample(range(2), 2)
        spans = array("Q")
        for part in range(4):  # the last may lie outside
            start = draw.randrange(size - 900 if part < 3 else size - 200)
            spans.extend((part * 1024 + draw.randrange(480), start, draw.randrange(500)))
        shift: dict[str, Any] = {
            "dst_shift": draw.choice((0, 5, -5)),
            "src_shift": draw.choice((0, 64, -300)),
        }
        for at in range(0, 12, 3):
            spans[at] += 5
            spans[at + 1] += 300
        if number % 2 and draw.random() < 0.3:
            spans[0] = reference.NOT_COPIED
        lists = (words(1, 3), sums[number]) if number % 2 else ()
        model_lists: tuple[Any, ...] = ((1, 3), model_sums[number]) if number % 2 else ()
        ticket = queue.submit(regions[dst], regions[src], spans, *lists, kernel=kernel, **shift)
        assert model.submit(models[dst], models[src], spans, *model_lists, **shift) == ticket
        open_tickets.append(ticket)
        while open_tickets and draw.random() < 0.4:
            ticket = open_tickets.pop(draw.randrange(len(open_tickets)))
            assert outcome(queue, ticket) == outcome(model, ticket)
    for ticket in open_tickets:
        assert outcome(queue, ticket) == outcome(model, ticket)
    assert [region.read_bytes(0, size) for region in regions] == models
    assert [list(pair) for pair in sums] == model_sums


def outcome(queue: CopyQueue | reference.CopyQueue, ticket: int) -> int | str:
    try:
        return queue.finish(ticket)
    except (IndexError, ValueError) as error:
        text = str(error)
        return text[:6] if text.startswith("span") else text.partition(":")[0]


def test_lists_are_those_of_the_submission(
    queue: CopyQueue, long_copy: LongCopy, make_region: MakeRegion
) -> None:
    content = noise(SIZE)
    src, dst = make_region(SIZE, content), make_region(SIZE)
    spans, counts, sums = array("Q", [0, 0, 8, 8, 8, 8]), words(2), words(0)
    queue.finish(long_copy.begin(queue))
    ticket = queue.submit(dst, src, spans, counts, sums)
    with pytest.raises(BufferError):
        sums.append(0)
    spans[2] = 1 << 40
    counts[0] = 7
    spans.extend(spans)
    counts.append(1)
    assert queue.finish(ticket) == 16
    assert list(sums) == [crc32c(content[:16])]
    sums.append(0)
    follow = queue.submit(dst, src, span(16, 16, 8), words(1, 0), sums)
    queue.finish(follow)
    assert list(sums) == [crc32c(content[:24]), 0], "they go on from what they were"


def test_a_mapping_that_nobody_else_has(queue: CopyQueue, make_region: MakeRegion) -> None:
    content = noise(SIZE)
    src, dst = make_region(SIZE, content), make_region(SIZE)
    first = queue.submit(src, src, span(0, 64, 64))
    ticket = queue.submit(dst, src, span(0, 0, 128))
    del src
    assert queue.finish(first) == 64
    assert queue.finish(ticket) == 128
    assert dst.read_bytes(0, 128) == content[64:128] * 2


# --- news -----------------------------------------------------------------------------------------


def test_ends_and_calls_of_rouse_are_news(queue: CopyQueue, make_region: MakeRegion) -> None:
    region = make_region(SIZE)
    queue.rouse()
    first = queue.wait(0)
    queue.rouse()
    second = queue.wait(first)
    ticket = queue.submit(region, region, span(0, 64, 8))
    third = queue.wait(second)
    assert first < second < third
    assert not queue.cancel(ticket), "it has ended"
    assert queue.finish(ticket) == 8
    assert queue.wait(0) == queue.wait(second) == third, "old news is no news missed"


@pytest.mark.parametrize("call", ["rouse", "close", "submit"])
def test_a_sleeper_is_woken(queue: CopyQueue, make_region: MakeRegion, call: str) -> None:
    region, woken = make_region(SIZE), []
    sleepers = [threading.Thread(target=lambda: woken.append(queue.wait(0))) for _ in range(3)]
    for sleeper in sleepers:
        sleeper.start()
    for sleeper in sleepers:
        assert sleeper.native_id is not None
        until_asleep(sleeper.native_id)
    assert woken == []
    if call == "submit":
        queue.submit(region, region, span(0, 64, 8))
    else:
        getattr(queue, call)()
    for sleeper in sleepers:
        sleeper.join(30)
    assert woken == [0 if call == "close" else 1] * 3


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("long_sums", [False, True])
def test_an_end_is_news_before_the_next_copy_has_ended(
    queue: CopyQueue, long_copy: LongCopy, make_region: MakeRegion, threads: int, long_sums: bool
) -> None:
    """Nobody is told before others can help with the next copy; but not after it either."""
    src, dst = make_region(SIZE, noise(SIZE)), make_region(SIZE)
    for _ in range(ATTEMPTS):
        long_copy.dst.store_u64(LONG - 8, 0)
        short = queue.submit(dst, src, span(0, 0, SIZE))
        counts = (words(len(LONG_COPY) // 3), words(0)) if long_sums else (None, None)
        long = queue.submit(long_copy.dst, long_copy.src, LONG_COPY, *counts, threads=threads)
        assert queue.finish(short) == SIZE
        caught = long_copy.runs
        queue.finish(long)
        if caught:
            break
    else:
        pytest.fail("the end was told when the next copy had ended")


def test_an_end_is_news_when_the_next_copy_fails(queue: CopyQueue, make_region: MakeRegion) -> None:
    src, dst = make_region(SIZE, noise(SIZE)), make_region(SIZE)
    for _ in range(ATTEMPTS):
        good, bad = queue.submit(dst, src, span(0, 0, 8)), queue.submit(dst, src, span(SIZE, 0, 8))
        assert queue.finish(good) == 8
        with pytest.raises(IndexError):
            queue.finish(bad)


@pytest.mark.parametrize("nice", [3, 12])
def test_copies_keep_the_policy_and_the_niceness_of_their_process(nice: int) -> None:
    """Long turns are asked for within these."""
    script = (
        "import os, threading\n"
        "from array import array\n"
        "from kvd_kernels.host import CopyQueue, Mapping\n"
        "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))\n"
        f"os.nice({nice})\n"
        "size = 4 << 20\n"
        "fds = [os.memfd_create('r') for _ in range(2)]\n"
        "[os.ftruncate(fd, size) for fd in fds]\n"
        "dst, src = (Mapping(fd, size, writable=True) for fd in fds)\n"
        "queue = CopyQueue()\n"
        "spans = array('Q', [word for at in range(16) for word in (at << 18, at << 18, 1 << 18)])\n"
        "for _ in range(8):\n"
        "    assert queue.finish(queue.submit(dst, src, spans, threads=2)) == size\n"
        "tasks = [int(name) for name in os.listdir('/proc/self/task')]\n"
        "nices = sorted(os.getpriority(os.PRIO_PROCESS, task) for task in tasks)\n"
        "print({os.sched_getscheduler(task) for task in tasks} == {os.SCHED_BATCH}, nices)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == f"True {[nice, nice, max(nice, 8)]}\n", done.stderr
