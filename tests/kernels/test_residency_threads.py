"""Tables and steps in two threads at once."""

from __future__ import annotations

import threading

import numpy as np

from kvd_kernels.residency import HotStep, HotTables, figures_of
from tests.kernels.residency_cases import array_of, give


def run_steps(tables: HotTables, table: int, found: list[bytes]) -> None:
    """Run 200 steps with a seed of the table's; notes the places of each."""
    step, draw = HotStep(2, 256), np.random.default_rng(table)
    for _ in range(200):
        tables.begin_step(table)
        give(step, draw.choice(4000, (2, 256)).astype(np.int32))
        step.select(tables, table, 2)
        found.append(array_of(step.places, figures_of(step).positions).tobytes())


def test_two_threads_on_two_tables() -> None:
    together: list[list[bytes]] = [[], []]
    tables = HotTables(2, 700, 4000)
    threads = [threading.Thread(target=run_steps, args=(tables, it, together[it])) for it in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    alone: list[list[bytes]] = [[], []]
    for table in (0, 1):
        run_steps(HotTables(2, 700, 4000), table, alone[table])
    assert together == alone


def test_a_step_belongs_to_one_thread_at_a_time() -> None:
    scores = np.random.default_rng(0).standard_normal((1, 1 << 20)).astype(np.float32)
    step, outcomes = HotStep(1, 4096, scores=scores), list[str]()
    end = threading.Event()

    def search() -> None:
        while not end.is_set():
            try:
                step.top_k(0, 1 << 20, 4096)
            except RuntimeError as error:
                outcomes.append(str(error))
                end.set()

    threads = [threading.Thread(target=search) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert end.wait(60)
    for thread in threads:
        thread.join(60)
    assert "the step is in use by another thread" in outcomes[0]
