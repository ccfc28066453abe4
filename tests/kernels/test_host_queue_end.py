"""The end of queued copies: cancel, close, drop, fork, exit; and threads that share a queue."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvd_kernels.host import CopyQueue, Mapping, crc32c
from tests.kernels.queue_rig import (
    ATTEMPTS,
    LONG_COPY,
    SIZE,
    LongCopy,
    MakeRegion,
    noise,
    span,
    words,
)

# --- cancel, close, drop --------------------------------------------------------------------------


def test_what_has_begun_is_not_cancelled_and_what_has_not_is(
    queue: CopyQueue, long_copy: LongCopy, make_region: MakeRegion
) -> None:
    src, dst = make_region(SIZE, noise(SIZE)), make_region(SIZE)
    for _ in range(ATTEMPTS):
        running = long_copy.begin(queue)
        sums = words(0)
        first = queue.submit(dst, src, span(0, 0, 8))
        second = queue.submit(dst, src, span(8, 8, 8), words(1), sums)
        third = queue.submit(dst, src, span(16, 16, 8))
        dropped = queue.cancel(second), queue.cancel(first)
        caught = long_copy.runs
        assert not queue.cancel(running)
        assert queue.finish(running) == sum(LONG_COPY[2::3])
        assert queue.finish(third) == 8
        if caught:
            break
    else:
        pytest.fail("no copy was caught while it ran")
    assert dropped == (True, True)
    assert dst.read_bytes(0, 24) == bytes(16) + src.read_bytes(16, 8)
    for ticket in (first, second):
        with pytest.raises(ValueError, match=f"ticket {ticket} is none"):
            queue.finish(ticket)
        assert not queue.cancel(ticket)
    sums.append(0)  # not borrowed any more


def test_close_waits_for_what_runs_and_drops_the_rest(
    long_copy: LongCopy, make_region: MakeRegion
) -> None:
    src, dst = make_region(SIZE, noise(SIZE)), make_region(SIZE)
    for _ in range(ATTEMPTS):
        queue = CopyQueue()
        running = long_copy.begin(queue)
        sums = words(3)
        behind = [
            queue.submit(dst, src, span(0, 0, 8)),
            queue.submit(dst, src, span(8, 8, 8), words(1), sums),
        ]
        closers = [threading.Thread(target=queue.close) for _ in range(3)]
        caught = long_copy.runs
        for closer in closers:
            closer.start()
        queue.close()
        assert not long_copy.runs
        for closer in closers:
            closer.join(30)
            assert not closer.is_alive()
        assert queue.finish(running) == sum(LONG_COPY[2::3])
        dropped = [text for ticket in behind if (text := failure_of(queue, ticket))]
        assert set(dropped) <= {"the queue was closed before it"}
        if caught and len(dropped) == 2:
            break
    else:
        pytest.fail("no copy was caught while it ran")
    assert list(sums) == [3]
    sums.append(0)
    assert dst.read_bytes(0, 16) == bytes(16)


def failure_of(queue: CopyQueue, ticket: int) -> str:
    try:
        queue.finish(ticket)
    except ValueError as error:
        return str(error)
    return ""


def test_a_queue_that_is_dropped_gives_back_what_it_borrowed(
    long_copy: LongCopy, make_region: MakeRegion
) -> None:
    src, dst, sums = make_region(SIZE), make_region(SIZE), words(3)
    queue = CopyQueue()
    long_copy.begin(queue)
    queue.submit(dst, src, span(0, 0, 8), words(1), sums)
    with pytest.raises(BufferError):
        sums.append(0)
    del queue
    assert not long_copy.runs, "what had begun is waited for"
    sums.append(0)
    assert list(sums) == [3, 0], "nobody finished it"
    for region in (src, dst, long_copy.src, long_copy.dst):
        region.close()


# --- threads --------------------------------------------------------------------------------------


def test_several_threads_submit(queue: CopyQueue, make_region: MakeRegion) -> None:
    content, errors = noise(SIZE), []

    def work(number: int, region: Mapping) -> None:
        draw = random.Random(number)
        for _ in range(150):
            start, sums = draw.randrange(SIZE // 2), words(0)
            first, second, last = (SIZE - 256 * at for at in (3, 2, 1))
            tickets = [
                queue.submit(region, region, span(first, start, 256)),
                queue.submit(region, region, span(second, first, 256)),
                queue.submit(region, region, span(last, second, 256), words(1), sums),
            ]
            dropped = draw.random() < 0.3 and queue.cancel(tickets[2])
            tickets = tickets[:2] if dropped else tickets
            moved = [queue.finish(ticket) for ticket in reversed(tickets)]
            wanted = [0] if dropped else [crc32c(content[start : start + 256])]
            if moved != [256] * len(tickets) or list(sums) != wanted:
                errors.append((number, start, dropped, list(sums)))

    threads = [
        threading.Thread(target=work, args=(number, make_region(SIZE, content)))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


def test_of_threads_that_finish_one_copy_one_gets_it(
    queue: CopyQueue, make_region: MakeRegion
) -> None:
    content = noise(SIZE)
    src, dst = make_region(SIZE, content), make_region(SIZE)
    for _ in range(100):
        sums, start = words(0), threading.Barrier(3)
        ticket = queue.submit(dst, src, span(0, 0, SIZE), words(1), sums)
        got: list[int | str] = []

        def work(ticket: int = ticket, got: list[int | str] = got, at: Any = start) -> None:
            at.wait(30)
            try:
                got.append(queue.finish(ticket))
            except ValueError as error:
                got.append(str(error))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(map(str, got)) == sorted(
            [str(SIZE), *[f"ticket {ticket} is none that is still to be finished"] * 2]
        )
        assert list(sums) == [crc32c(content)]


@pytest.mark.parametrize("method", ["finish", "close", "del"])
def test_others_go_on_while_a_thread_waits(long_copy: LongCopy, method: str) -> None:
    """No thread gives the interpreter lock away here unless it waits for something."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        assert any(goes_on_beside(method, long_copy) for _ in range(ATTEMPTS))
    finally:
        sys.setswitchinterval(before)


def goes_on_beside(method: str, long_copy: LongCopy) -> bool:
    """Whether this thread gets on before a call in another one has returned."""
    queues = [CopyQueue()]
    ticket = long_copy.begin(queues[0])
    calls: dict[str, Callable[[], object]] = {
        "finish": lambda: queues[0].finish(ticket),
        "close": lambda: queues[0].close(),
        "del": queues.clear,
    }
    returned: list[bool] = []

    def call() -> None:
        calls[method]()
        returned.append(not long_copy.runs)

    thread = threading.Thread(target=call)
    thread.start()
    went_on = not returned
    thread.join(30)
    assert returned == [True]
    return went_on


# --- processes ------------------------------------------------------------------------------------

_REGIONS = """
import os, sys, threading
from array import array
from kvd_kernels.host import CopyQueue, Mapping
def region(size):
    fd = os.memfd_create("queue")
    os.ftruncate(fd, size)
    return Mapping(fd, size, writable=True)
SIZE = 8 << 20
src, dst, queue, sums = region(SIZE), region(SIZE), CopyQueue(), array("I", [0])
src.store_u64(0, 1)
long = queue.submit(dst, src, array("Q", [0, 0, SIZE] * 50))
short = queue.submit(dst, src, array("Q", [0, 0, 8]), array("I", [1]), sums)
while not dst.load_u64(0):
    pass
"""

_FORK = (
    _REGIONS
    + """
child = os.fork()
if child == 0:
    calls = (
        lambda: queue.submit(dst, src, array("Q", [0, 0, 8])),
        lambda: queue.finish(long),
        lambda: queue.cancel(short),
        lambda: queue.wait(0),
        queue.rouse,
    )
    refused = 0
    for call in calls:
        try:
            call()
        except ValueError as error:
            refused += "parent process" in str(error)
    queue.close()
    del queue, calls, call, src, dst
    sums.append(0)
    os._exit(0 if refused == 5 else 2)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert queue.finish(long) == SIZE * 50 and queue.finish(short) == 8 and sums[0]
raise SystemExit(status)
"""
)

_EXIT = (
    _REGIONS
    + """
begun = threading.Event()
class Last:
    def __init__(self):
        self.queue, self.short, self.write = queue, short, os.write
    def __del__(self):  # the interpreter is ending; the thread's copy ends before this one
        self.queue.finish(self.short)
        self.write(1, b"last")
def finish():
    begun.set()
    queue.finish(long)
threading.Thread(target=finish, daemon=True).start()
begun.wait()
sys.modules["last"] = Last()
"""
)


@pytest.mark.slow
def test_a_forked_child_is_refused_and_harms_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _FORK], check=False, timeout=60)
    assert done.returncode == 0


@pytest.mark.slow
def test_a_copy_that_runs_when_the_interpreter_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _EXIT], capture_output=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"last", b"")
