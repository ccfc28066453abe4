"""Cases of bench.sparse: what hot buffers miss, on drawn traces and on recorded ones.

Our clock with a second chance sees the same selections as exact LRU, which needs a list. The
recorded ones are those of `bench.sparse_record`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from bench.report import Better, Row, compare, measure
from bench.sparse_baselines import Baselines, Ints
from bench.sparse_record import Recording
from bench.sparse_traces import DrawnTrace, load_trace
from kvd_kernels.residency import HotStep, HotTables, figures_of

K: Final = 2048
CONTEXT: Final = 131_072
POSITIONS_MAX: Final = 1 << 20
OVERLAPS: Final = (0.6, 0.8, 0.95)
STEPS: Final = 150
WIDTH: Final = 4
SLOTS: Final = (4096, 8192)
RECORDED_SLOTS: Final = (2, 4, 8)  # in selections
MISSED_MOST: Final = 1.08
"""Misses for each one of exact LRU: 0.98 to 1.05 were seen, and which rows a decode selects follows
the rounding of the CPU it runs on."""

PERCENT: Final = 100.0

Steps = Sequence[Sequence[Ints]]


@dataclass(frozen=True, slots=True)
class Missed:
    """Percent of the distinct positions that are missed once the buffer has filled."""

    ours: float
    lru: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what this part can be told."""
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="also recorded selections; see sparse_traces.py"
    )


def cases(arguments: argparse.Namespace) -> list[Row]:
    """Measure everything of this part."""
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        baselines = Baselines(Path(folder))
        for name, slots, steps in drawn():
            rows.append(misses(baselines, f"{slots} slots {name}", slots, steps))
        for name, steps in recorded(arguments.trace):
            rows.append(adjacent_overlap(name, steps))
            k = max(len(row) for step in steps for row in step)
            for slots in (many * k for many in RECORDED_SLOTS):
                rows.append(misses(baselines, f"{slots} slots {name}", slots, steps))
    return rows


def drawn() -> Iterator[tuple[str, int, Steps]]:
    """Yield name, slots and steps of drawn traces."""
    for overlap in OVERLAPS:
        trace = DrawnTrace(CONTEXT, K, overlap, 5)
        steps = [trace.step() for _ in range(STEPS)]
        for slots in SLOTS:
            yield f"overlap {overlap}", slots, steps
    steps = [trace.step(WIDTH) for _ in range(STEPS)]
    yield f"overlap {overlap} {WIDTH} queries", SLOTS[-1], steps


def recorded(given: Path | None) -> Iterator[tuple[str, Steps]]:
    """Yield name and steps of a decode with one position a step, and with several; then a file."""
    for layer, trace in Recording().run().items():
        yield f"recorded layer {layer}", trace.steps
        yield f"recorded layer {layer} {WIDTH} queries", widened(trace.steps)
    if given is not None:
        yield f"recorded {given.name}", load_trace(given).steps


def widened(steps: Steps) -> Steps:
    """Return the steps of a decode whose drafts are all right, from one without drafts.

    A position selects the same whether it is computed alone or with others.
    """
    queries = [row for step in steps for row in step]
    return [queries[first : first + WIDTH] for first in range(0, len(queries), WIDTH)]


def adjacent_overlap(name: str, steps: Steps) -> Row:
    """Share of the distinct positions of a step that the step before selected too."""
    distinct = [np.unique(np.concatenate(step)) for step in steps]
    shares = [len(np.intersect1d(last, now)) / len(now) for last, now in pairwise(distinct)]
    # The mean, as a drawn trace's overlap is one.
    return measure(f"{name} overlap of adjacent steps", "kept", [statistics.fmean(shares)], unit="")


def misses(baselines: Baselines, name: str, slots: int, steps: Steps) -> Row:
    """Return what is missed beside exact LRU."""
    found = count_misses(baselines, slots, steps)
    return compare(
        f"{name} / exact LRU",
        "missed",
        [found.ours],
        [found.lru],
        unit="%",
        target=MISSED_MOST,
        better=Better.LOWER,
    )


def count_misses(baselines: Baselines, slots: int, steps: Steps) -> Missed:
    """Run a trace through a buffer of ours, and through one that knows exact LRU."""
    queries = max(len(step) for step in steps)
    k = max(len(row) for step in steps for row in step)
    tables, step = HotTables(1, slots, POSITIONS_MAX), HotStep(queries, k)
    exact = baselines.lru(slots, POSITIONS_MAX)
    ours = theirs = positions = 0
    for number, selections in enumerate(steps):
        tables.begin_step(0)
        for query, selection in enumerate(selections):
            np.asarray(step.selection)[query, : len(selection)] = selection
            step.counts[query] = len(selection)
        step.select(tables, 0, len(selections))
        missed = exact.misses(np.unique(np.concatenate(selections)))
        if number >= len(steps) // 4:  # the buffers have filled by then
            sizes = figures_of(step)
            ours += sizes.loads + sizes.scratch
            theirs += missed
            positions += sizes.positions
    return Missed(PERCENT * ours / positions, PERCENT * theirs / positions)
