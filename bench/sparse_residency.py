"""Cases of bench.sparse: selection and residency.

Cold means the tables of 16 requests and 21 layers in turn, as a decode step visits them; warm means
one table again and again. Baselines see the same selections, one call after the other.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from bench.report import Better, Row, compare, measure
from bench.sparse_baselines import Baselines, Floats, Ints, LruScan, TorchResidency, address_of
from bench.sparse_traces import DrawnTrace
from kvd_kernels.residency import QUERIES_MAX, HotStep, HotTables, figures_of

K: Final = 2048
COLD: Final = 16 * 21
CONTEXT: Final = 131_072
MILLION: Final = 1 << 20
SETTLING: Final = 2  # steps of the trace before the first that counts
OVERLAPS: Final = (0.6, 0.8, 0.95)
SCORES_BYTES: Final = 96 << 20  # more than any L2
SEARCHES: Final = ((32_768, None), (CONTEXT, 3.3), (MILLION, 1.8))
"""Context, and how many reads of the scores `lim` may cost."""


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of tables and selections."""

    slots: int
    context: int = CONTEXT
    overlap: float = 0.8
    queries: int = 1
    layout: str = "auto"
    tables: int = COLD
    rounds: int = 3

    @property
    def name(self) -> str:
        """What is measured."""
        how = "cold" if self.tables > 1 else "warm"
        queries = "" if self.queries == 1 else f" {self.queries} queries"
        layout = "" if self.layout == "auto" else f" by {self.layout}"
        shape = f"{self.context // 1024}k/{self.slots}"
        return f"{how} {shape} overlap {self.overlap}{queries}{layout}"


@dataclass(frozen=True, slots=True)
class Samples:
    """Microseconds of each step: ours, and those of a scan for each query; shares missed."""

    ours: list[float]
    scan: list[float]
    missed: float


def micros(call: Callable[[], object]) -> float:
    """Return the microseconds that a call takes."""
    began = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began) / 1000


def absolute(case: str, samples: Sequence[float], target_us: float) -> Row:
    """Return a figure with its target, which nothing judges: it depends on the machine."""
    return replace(measure(case, "time", samples, unit="us"), target=target_us)


class Runner:
    """Tables of one case, ours and the baseline's, filled as they are after a long time."""

    def __init__(self, case: Case, baselines: Baselines) -> None:
        self._tables = HotTables(case.tables, case.slots, case.context, layout=case.layout)
        self._step = HotStep(case.queries, K)
        self._selection = np.asarray(self._step.selection)
        self._places = np.empty(K, np.int32)
        marks = baselines.marks(case.context)
        self._scans = [
            [baselines.scan(case.slots, marks) for _ in range(case.queries)]
            for _ in range(case.tables)
        ]
        seeds = range(case.tables)
        traces = [DrawnTrace(case.context, K, case.overlap, seed) for seed in seeds]
        for table, trace in enumerate(traces):
            for some in trace.settled(case.slots):
                self._ours(table, [some])
                self._scan(self._scans[table], [some] * case.queries)
        steps = SETTLING + case.rounds
        self._drawn = [[trace.step(case.queries) for _ in range(steps)] for trace in traces]
        self._spent: list[tuple[float, float]] = []
        self._loads = self._given = 0

    def step(self, number: int, table: int) -> None:
        """Run a step of the trace through a table; those before `SETTLING` do not count."""
        selections = self._drawn[table][number]
        spent = self._ours(table, selections), self._scan(self._scans[table], selections)
        if number < SETTLING:
            return
        self._spent.append(spent)
        sizes = figures_of(self._step)
        self._loads += sizes.loads + sizes.scratch
        self._given += sizes.positions

    def samples(self) -> Samples:
        """What the steps took."""
        assert self._tables.check(0) == []
        ours, scan = zip(*self._spent, strict=True)
        return Samples(list(ours), list(scan), self._loads / self._given)

    def _ours(self, table: int, selections: Sequence[Ints]) -> float:
        for query, selection in enumerate(selections):
            self._selection[query, : len(selection)] = selection
            self._step.counts[query] = len(selection)
        tables, step, queries = self._tables, self._step, len(selections)

        def select() -> None:
            tables.begin_step(table)
            step.select(tables, table, queries)

        return micros(select)

    def _scan(self, scans: Sequence[LruScan], selections: Sequence[Ints]) -> float:
        places = address_of(self._places)
        given = [(address_of(selection), len(selection)) for selection in selections]

        def walk() -> None:
            for scan, (selected, count) in zip(scans, given, strict=True):
                scan.step(selected, count, places)

        return micros(walk)


def run(baselines: Baselines, *cases: Case) -> list[Samples]:
    """Run cases together, all of as many tables and rounds: a table of each in turn.

    The machine drifts, so cases that are compared take turns.
    """
    runners = [Runner(case, baselines) for case in cases]
    for number in range(SETTLING + cases[0].rounds):
        for table in range(cases[0].tables):
            for runner in runners:
                runner.step(number, table)
    return [runner.samples() for runner in runners]


def add_options(_parser: argparse.ArgumentParser) -> None:
    """Add nothing: this part needs to be told nothing."""


def cases(_arguments: argparse.Namespace) -> list[Row]:
    """Measure everything of this part."""
    with tempfile.TemporaryDirectory() as folder:
        baselines = Baselines(Path(folder))
        rows = [call_overhead(), *table_bytes()]
        rows += by_slots(baselines)
        rows += by_overlap(baselines)
        rows += merged_queries(baselines)
        rows += [search(baselines, context, most) for context, most in SEARCHES]
    return [*rows, beside_torch()]


def lower(case: str, ours: Sequence[float], base: Sequence[float], most: float | None) -> Row:
    """Return a time beside its baseline; the ratio is to be `most` at most."""
    return compare(case, "time", ours, base, unit="us", target=most, better=Better.LOWER)


def call_overhead() -> Row:
    """What a call costs that has nothing to do."""
    tables, step = HotTables(1, 4096, CONTEXT), HotStep(1, K)
    calls = 2000
    samples = []
    for _ in range(50):
        began = time.perf_counter_ns()
        for _ in range(calls):
            step.select(tables, 0, 1)
        samples.append((time.perf_counter_ns() - began) / 1000 / calls)
    return absolute("native call on registered arrays", samples, 0.2)


def table_bytes() -> list[Row]:
    """What a table takes for each position, beside what it takes for each slot."""
    rows = []
    for layout in ("map", "auto"):
        small, large = (
            HotTables(1, 4096, context, layout=layout).table_bytes for context in (CONTEXT, MILLION)
        )
        share = (large - small) / (MILLION - CONTEXT)
        name, better = f"table by {layout}", Better.LOWER
        rows.append(measure(name, "bytes per position", [share], unit="B", target=4, better=better))
    return rows


def by_slots(baselines: Baselines) -> list[Row]:
    """The same selections in hot buffers of several sizes, and in a longer context.

    The time of a map follows neither, which is judged. All of these sizes have an index, which is
    faster, and the more so the smaller it is: of two of them the ratio is told.
    """
    cases = [Case(slots) for slots in (4096, 8192, 16_384, 32_768)]
    *samples, index_1m = run(baselines, *cases, Case(4096, MILLION))
    large = Case(32_768, layout="map")
    by_map, map_1m, large_map = run(
        baselines, Case(4096, layout="map"), Case(4096, MILLION, layout="map"), large
    )
    rows = list[Row]()
    for case, sample in zip(cases, samples, strict=True):
        rows.append(absolute(case.name, sample.ours, 16 if case.slots <= 8192 else 25))
        bound = 1 / 3.5 if case.slots == 32_768 else None
        rows.append(lower(f"{case.name} / LRU-list scan", sample.ours, sample.scan, bound))
    rows.append(absolute(Case(4096, MILLION).name, index_1m.ours, 25))
    rows.append(lower("cold 32768 / 4096 slots by map", large_map.ours, by_map.ours, 1.15))
    told = "cold 32768 / 4096 slots by index, not judged: both beat a map, the small one by more"
    rows.append(lower(told, samples[-1].ours, samples[0].ours, None))
    rows.append(absolute(large.name, large_map.ours, 25))
    rows.append(lower("cold 1M / 128k context by map", map_1m.ours, by_map.ours, 1.3))
    rows.append(lower("cold 1M / 128k context by index", index_1m.ours, samples[0].ours, 1.15))
    warm = Case(4096, tables=1, rounds=400)
    rows.append(absolute(warm.name, run(baselines, warm)[0].ours, 9))
    return rows


def by_overlap(baselines: Baselines) -> list[Row]:
    """Selections that change more or less from step to step."""
    rows = []
    for overlap in OVERLAPS:
        case = Case(4096, overlap=overlap)
        [samples] = run(baselines, case)
        rows.append(lower(f"{case.name} / LRU-list scan", samples.ours, samples.scan, None))
        rows.append(measure(case.name, "missed", [100 * samples.missed], unit="%"))
    return rows


def merged_queries(baselines: Baselines) -> list[Row]:
    """Four speculative positions: merged into one step, against a scan for each."""
    rows = []
    for slots, bound in ((4096, 1 / 2.5), (16_384, 1 / 4)):
        case = Case(slots, queries=4)
        [samples] = run(baselines, case)
        name = f"{case.name} / LRU-list scan of each"
        rows.append(lower(name, samples.ours, samples.scan, bound))
    return rows


def drawn_scores(context: int) -> Floats:
    """Return [P, queries, context] scores, more of them than a cache holds."""
    rows = max(2, SCORES_BYTES // (4 * context * QUERIES_MAX))
    draw = np.random.default_rng(9)
    return draw.standard_normal((rows, QUERIES_MAX, context), dtype=np.float32)


def search(baselines: Baselines, context: int, most: float | None) -> Row:
    """Scores to winner codes, against one pass over as many scores; neither is in a cache."""
    scores = drawn_scores(context)
    steps = [HotStep(QUERIES_MAX, K, scores=rows) for rows in scores]
    tables = HotTables(len(steps), 4096, context)
    ours, reads = list[float](), list[float]()
    for turn in range(3):
        for table, step in enumerate(steps):
            tables.begin_step(table)
            for query in range(QUERIES_MAX):
                lim = partial(step.lim, tables, table, query, context, K)
                other = scores[table - len(steps) // 2, query]
                spent = micros(lim), micros(partial(baselines.read, other))
                if turn > 0:  # the first has no threshold to carry
                    ours.append(spent[0])
                    reads.append(spent[1])
    return lower(f"lim {context // 1024}k / reading the scores", ours, reads, most)


def beside_torch() -> Row:
    """Scores to places: ours, and the same from torch operations."""
    torch.set_num_threads(1)
    scores, slots = drawn_scores(CONTEXT), 4096
    steps = [HotStep(QUERIES_MAX, K, scores=rows) for rows in scores]
    tables = HotTables(len(steps) * QUERIES_MAX, slots, CONTEXT)
    books = [TorchResidency(slots, CONTEXT) for _ in range(tables.num_tables)]
    ours, theirs = list[float](), list[float]()

    def native(step: HotStep, table: int) -> None:
        tables.begin_step(table)
        step.top_k(0, CONTEXT, K)
        step.select(tables, table, 1)

    def in_torch(row: Floats, table: int) -> None:
        best = torch.topk(torch.from_numpy(row), K, sorted=False).indices
        books[table].step(best)

    for turn in range(3):
        for table, step in enumerate(steps):
            spent = (
                micros(partial(native, step, table)),
                micros(partial(in_torch, scores[table, 0], table)),
            )
            if turn > 0:
                ours.append(spent[0])
                theirs.append(spent[1])
    return lower("top_k and select 128k / torch", ours, theirs, 1 / 8)
