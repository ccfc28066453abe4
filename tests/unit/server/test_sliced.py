"""Work in slices: the result is the same, and the loop goes on in between."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvd.server.sliced import Work, run_now, run_sliced


def burn(ns: int) -> None:
    until = time.thread_time_ns() + ns
    while time.thread_time_ns() < until:
        pass


def counting(steps: int, cost_ns: int = 0) -> Work[int]:
    done = 0
    for _ in range(steps):
        burn(cost_ns)
        done += 1
        yield
    return done


def failing() -> Work[int]:
    yield
    raise ValueError("bad")


def test_an_error_of_the_work_comes_out() -> None:
    with pytest.raises(ValueError, match="bad"):
        run_now(failing())
    with pytest.raises(ValueError, match="bad"):
        asyncio.run(run_sliced(failing()))


@pytest.mark.parametrize("steps", [0, 1, 1000])
def test_both_ways_have_the_same_result(steps: int) -> None:
    assert run_now(counting(steps)) == steps
    assert asyncio.run(run_sliced(counting(steps), slice_ns=1)) == steps


def test_the_loop_goes_on_while_long_work_runs() -> None:
    async def main() -> int:
        turns = 0
        work = asyncio.ensure_future(run_sliced(counting(20, cost_ns=300_000), slice_ns=1_000_000))
        while not work.done():
            turns += 1
            await asyncio.sleep(0)
        assert await work == 20
        return turns

    # 6 ms of work in slices of 1 ms and a step
    assert asyncio.run(main()) >= 4


def test_short_work_is_not_interrupted() -> None:
    async def main() -> int:
        turns = 0
        work = asyncio.ensure_future(run_sliced(counting(10), slice_ns=10**9))
        while not work.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(main()) == 1
