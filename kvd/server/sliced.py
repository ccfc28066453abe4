"""Long reads of the live books in short pieces, so that the event loop never waits for them.

A piece of work is a generator that yields wherever the loop may go on to something else. Between
two steps the books may change: work therefore keeps names, never iterators over live tables, and
looks every name up again. Run to its end at once (`run_now`) it sees one moment; run in slices it
sees each item at some moment of the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")

Work: TypeAlias = Generator[None, None, T]

STRIDE: Final = 32
"""Items of a table between two yields: 32 x at most 30 us is under 1 ms."""

SLICE_NS: Final = 1_500_000
"""CPU time after which the loop goes on; with one stride on top a callback stays under 5 ms."""


def run_now(work: Work[T]) -> T:
    """Run work to its end without a pause."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            value: T = stop.value
            return value


async def run_sliced(work: Work[T], slice_ns: int = SLICE_NS) -> T:
    """Run work; let the loop go on whenever a slice of CPU time is used up."""
    until = time.thread_time_ns() + slice_ns
    while True:
        try:
            next(work)
        except StopIteration as stop:
            value: T = stop.value
            return value
        if time.thread_time_ns() >= until:
            await asyncio.sleep(0)
            until = time.thread_time_ns() + slice_ns
