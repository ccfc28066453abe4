"""Gathers by several threads: the same bytes as by one."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvd_kernels.rows import row_kernels
from tests.kernels.rows_world import Lists, Shape, World

KERNELS = row_kernels()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("count", [511, 512, 1500])
def test_two_threads_gather_what_one_does(kernel: str, count: int) -> None:
    shape = Shape(
        part_bytes=(128, 24), blocks=64, blocks_max=20, block_tokens=100, num_slots=1500, gap=64
    )
    one, two = World(shape, kernel), World(shape, kernel, threads=2)
    draw = np.random.default_rng(count)
    lists = Lists(draw.integers(0, 2000, count).tolist(), draw.permutation(1500)[:count].tolist())
    for world in (one, two):
        world.write(2000)
        for _ in range(5):
            world.copier.gather(world.rows(lists), 1, 1, count)
    assert all(np.array_equal(a, b) for a, b in zip(one.memory, two.memory, strict=True))
    one.reference.gather(lists.positions, lists.slots, 1, 1)
    assert one.same()


def test_copiers_of_many_threads_do_not_disturb_each_other() -> None:
    """One copier, a list of each thread; whoever finds the helper taken does without."""
    shape = Shape(part_bytes=(64,), blocks=64, blocks_max=16, block_tokens=64, num_slots=1024)
    world = World(shape, threads=2)
    world.write(1024)
    draw = np.random.default_rng(3)
    lists = [Lists(draw.permutation(1024).tolist(), list(range(1024))) for _ in range(3)]

    def run(request: int) -> None:
        rows = world.rows(lists[request])
        for _ in range(20):
            world.copier.gather(rows, request, 0, 1024)

    threads = [threading.Thread(target=run, args=(request,)) for request in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for request in range(3):
        world.reference.gather(lists[request].positions, lists[request].slots, request, 0)
    assert world.same()


def test_a_copier_that_was_never_used_ends() -> None:
    for _ in range(20):
        World(Shape(), threads=2)
