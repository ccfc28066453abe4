"""The log writer: a slow, stuck or broken output costs events, never the caller's time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from kvd.server.log_writer import LINE_CHARS_MAX, LogEvent, LogWriter, Render


def event(text: str) -> LogEvent:
    return LogEvent(0.0, "info", text, {})


def make_writer(fd: int, events_max: int = 4096) -> LogWriter:
    return LogWriter(
        fd, lambda: lambda e: e.event, lambda count: event(f"dropped {count}"), events_max
    )


class Pipe:
    """Both ends of a pipe, each closed once."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def close_reader(self) -> None:
        if self.reader >= 0:
            os.close(self.reader)
        self.reader = -1

    def close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
        self.writer = -1


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close_reader()
    made.close_writer()


def fill_pipe(fd: int) -> int:
    """Write until the pipe takes no more; returns the bytes written."""
    os.set_blocking(fd, False)
    written = 0
    try:
        while True:
            written += os.write(fd, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(fd, True)
        return written


def read_all(fd: int) -> str:
    """Read until the other end is closed."""
    parts = []
    while part := os.read(fd, 1 << 16):
        parts.append(part)
    return b"".join(parts).decode()


def test_a_stuck_output_never_blocks_the_caller(pipe: Pipe) -> None:
    """Nobody reads: ten thousand events take no time, and what does not fit is counted."""
    fill_pipe(pipe.writer)
    writer = make_writer(pipe.writer, events_max=100)
    start = time.thread_time()
    for number in range(10_000):
        writer.write(event(f"line {number}"))
    assert time.thread_time() - start < 1
    assert writer.dropped >= 10_000 - 100 - 64  # one batch may be on its way
    assert not writer.close(seconds=0.01)
    drainer = threading.Thread(target=read_all, args=(pipe.reader,))
    drainer.start()
    assert writer.close(seconds=10)
    pipe.close_writer()
    drainer.join()


def test_dropped_events_are_told_when_the_output_moves_again(pipe: Pipe) -> None:
    junk = fill_pipe(pipe.writer)
    writer = make_writer(pipe.writer, events_max=10)
    for number in range(200):
        writer.write(event(f"line {number}"))
    read: list[str] = []
    drainer = threading.Thread(target=lambda: read.append(read_all(pipe.reader)))
    drainer.start()
    assert writer.close(seconds=10)
    pipe.close_writer()
    drainer.join()
    lines = read[0][junk:].splitlines()
    assert lines[0] == "line 0"
    told = sum(int(line.split()[1]) for line in lines if line.startswith("dropped"))
    assert told == writer.dropped
    assert told + sum(line.startswith("line") for line in lines) == 200


def test_a_closed_pipe_drops_and_does_not_raise(pipe: Pipe) -> None:
    pipe.close_reader()
    writer = make_writer(pipe.writer)
    writer.write(event("nobody hears this"))
    assert writer.close(seconds=10)
    assert writer.dropped >= 1


def test_events_after_close_are_dropped(pipe: Pipe) -> None:
    writer = make_writer(pipe.writer)
    assert writer.close(seconds=10)
    writer.write(event("late"))
    assert writer.dropped == 1


def test_lines_come_in_order_and_in_full(pipe: Pipe) -> None:
    writer = make_writer(pipe.writer)
    for number in range(500):
        writer.write(event(f"line {number}"))
    assert writer.close(seconds=10)
    pipe.close_writer()
    assert read_all(pipe.reader).splitlines() == [f"line {number}" for number in range(500)]
    assert writer.dropped == 0


def test_an_endless_line_is_cut(pipe: Pipe) -> None:
    writer = make_writer(pipe.writer)
    writer.write(event("x" * 100_000))
    assert writer.close(seconds=10)
    pipe.close_writer()
    assert len(read_all(pipe.reader)) == LINE_CHARS_MAX + 1


def test_text_that_is_no_unicode_is_written_escaped(pipe: Pipe) -> None:
    writer = make_writer(pipe.writer)
    writer.write(event("half \udc80"))
    assert writer.close(seconds=10)
    pipe.close_writer()
    assert read_all(pipe.reader) == "half \\udc80\n"


def test_nothing_is_loaded_before_the_first_event(pipe: Pipe) -> None:
    made: list[int] = []

    def make() -> Render:
        made.append(1)
        return lambda one: one.event

    writer = LogWriter(pipe.writer, make, lambda count: event(str(count)))
    assert writer.close(seconds=10)
    assert made == []
