"""Rows of sparse decode: gather against what memory allows, and attention that hides the copies.

Gather takes random rows of a pool that no cache holds into random slots. Its limit is the same
rows, only read, with the four rows to come fetched ahead; beside it stands a read that fetches as
far ahead as gather does. The other baseline is a memcpy per row, which is the scalar kernel. All
take turns on rows drawn anew, in one run, on 2 MiB pages where the system gives them (transparent
huge pages; the table says how much of the pool has them).

Attention runs on a batch of requests whose selections are part hits and part misses. The share of
the copies that is hidden is 1 - (time attention waited) / (time of the copies alone); a case in
which attention and copies take about as long as each other shows what both cost each other:
(attention + copies - both) / (the shorter).
"""

from __future__ import annotations

import argparse
import mmap
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.report import Better, Row, argument_parser, compare, finish, measure
from kvd_kernels.rows import (
    AttentionTimes,
    BlockTables,
    IndexScorer,
    Part,
    RowCopier,
    RowList,
    SparseAttention,
    place_of_miss,
)

_GIB: Final = 1 << 30
_BLOCK_TOKENS: Final = 128
_HUGE: Final = 2 << 20
_HOT_SLOTS: Final = 16384
_LATENT, _ROPE = 512, 64
_SELECTED: Final = 2048
_BATCH: Final = 16


def memory(size: int) -> mmap.mmap:
    """Private memory of so many bytes, on 2 MiB pages if there are any, full of bf16 numbers.

    Arithmetic on what is no normal number takes many times as long.
    """
    made = mmap.mmap(-1, -(-size // _HUGE) * _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(made, np.uint16).reshape(-1, _HUGE // 2)
    pages[:] = np.random.default_rng(1).integers(0x3C00, 0x3FFF, _HUGE // 2, np.uint16)
    return made


def huge_share() -> float:
    """Share of this process's memory that is on transparent huge pages."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    sizes = {name: int(kb) for name, kb in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
    return sizes["AnonHugePages"] / sizes["Rss"]


def timed(call: Callable[[], object]) -> int:
    """Nanoseconds of a call."""
    begin = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin


@dataclass(frozen=True)
class RowShape:
    """Rows of some parts, and what is asked of the gather of many and of few of them."""

    name: str
    parts: tuple[int, ...]
    of_limit: tuple[float, float] | None
    of_memcpy: tuple[float, float] | None


_SHAPES: Final = (
    RowShape("1152 B", (1152,), (0.9, 0.75), (1.4, 1.25)),
    RowShape("656 B", (656,), None, None),
    RowShape("1024 + 128 B", (1024, 128), None, None),
)


class Pool:
    """One request over all of a region, with one hot buffer."""

    def __init__(self, region: mmap.mmap, shape: RowShape) -> None:
        """Cut the region into the parts of as many blocks as fit."""
        row = sum(shape.parts)
        blocks = len(region) // (row * _BLOCK_TOKENS)
        self.rows, self.row_bytes = blocks * _BLOCK_TOKENS, row
        marks = np.full((1, 1), self.rows, np.int64)
        table = np.random.default_rng(1).permutation(blocks).astype(np.int32).reshape(1, -1)
        self.tables = BlockTables(table, marks, block_tokens=_BLOCK_TOKENS, num_blocks=blocks)
        parts, at = [], 0
        for size in shape.parts:
            hot = memory(_HOT_SLOTS * size)
            block = _BLOCK_TOKENS * size
            parts.append(Part(region, at, 0, block, size, hot, 0, 0, 0, size))
            at += blocks * block
        self.copiers = {
            name: RowCopier(
                self.tables, parts, num_slots=_HOT_SLOTS, kernel=kernel, threads=threads
            )
            for name, kernel, threads in (
                ("gather", "auto", 1),
                ("memcpy", "scalar", 1),
                ("2 threads", "auto", 2),
            )
        }


def gather_rows(region: mmap.mmap, shape: RowShape, count: int, repetitions: int) -> list[Row]:
    """Measure gathers of `count` rows."""
    pool = Pool(region, shape)
    draw = np.random.default_rng(count)
    positions, slots = np.zeros(count, np.int32), np.zeros(count, np.int32)
    rows = RowList(positions, slots)
    copiers = pool.copiers
    methods: dict[str, Callable[[], int]] = {
        "read": lambda: copiers["gather"].read(rows, 0, 0, count, far=False),
        "far read": lambda: copiers["gather"].read(rows, 0, 0, count),
        **{
            name: lambda copier=copier: copier.gather(rows, 0, 0, count)  # type: ignore[misc]
            for name, copier in copiers.items()
        },
    }
    calls = max(1, 8192 // count)
    samples: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repetitions):
        for name, method in methods.items():
            spent = 0
            for _ in range(calls):
                positions[:] = draw.integers(0, pool.rows, count)
                slots[:] = draw.permutation(_HOT_SLOTS)[:count]
                spent += timed(method)
            samples[name].append(calls * count * pool.row_bytes / spent)
    few = int(count < _HOT_SLOTS)
    limit = shape.of_limit[few] if shape.of_limit else None
    memcpy = shape.of_memcpy[few] if shape.of_memcpy else None
    case = f"gather {count} rows of {shape.name}"

    def row(metric: str, name: str, base: str, target: float | None) -> Row:
        return compare(case, metric, samples[name], samples[base], unit="GB/s", target=target)

    return [
        row("of the read limit", "gather", "read", limit),
        row("of reads as far ahead", "gather", "far read", None),
        row("to memcpy per row", "gather", "memcpy", memcpy),
        row("2 threads to 1", "2 threads", "gather", None),
    ]


class Batch:
    """Requests whose selections are drawn anew for each call."""

    def __init__(self, region: mmap.mmap, heads: int, misses: int, slots: int = 4096) -> None:
        """Prepare `_BATCH` requests of `_SELECTED` rows each, `misses` of them missing."""
        row = (_LATENT + _ROPE) * 2
        blocks = len(region) // (row * _BLOCK_TOKENS)
        self.context = blocks // _BATCH * _BLOCK_TOKENS
        table = np.arange(blocks // _BATCH * _BATCH, dtype=np.int32).reshape(_BATCH, -1)
        marks = np.full((_BATCH, 1), self.context, np.int64)
        tables = BlockTables(table, marks, block_tokens=_BLOCK_TOKENS, num_blocks=blocks)
        hot = memory(_BATCH * slots * row)
        part = Part(region, 0, 0, _BLOCK_TOKENS * row, row, hot, 0, slots * row, 0, row)
        self.copier = RowCopier(tables, [part], num_slots=slots)
        self.draw = np.random.default_rng(heads * 10000 + misses)
        self.slots_max, self.misses = slots, misses
        queries = self.draw.standard_normal((_BATCH, 1, heads, _LATENT + _ROPE), np.float32)
        self.places = np.zeros((_BATCH, 1, _SELECTED), np.int32)
        self.items = np.array([[request, 1, misses] for request in range(_BATCH)], np.int32)
        self.positions = np.zeros((_BATCH, max(1, misses)), np.int32)
        self.slots = np.zeros((_BATCH, max(1, misses)), np.int32)
        self.lists = [
            RowList(positions, slots)
            for positions, slots in zip(self.positions, self.slots, strict=True)
        ]
        self.attention = SparseAttention(
            self.copier,
            queries=queries,
            places=self.places,
            items=self.items,
            positions=self.positions,
            slots=self.slots,
            output=np.zeros((_BATCH, 1, heads, _LATENT), np.float32),
            element="bfloat16",
            scale=(_LATENT + _ROPE) ** -0.5,
        )

    def select(self) -> None:
        """Draw a selection: misses of random positions at random places among the hits."""
        for request in range(_BATCH):
            slots = self.draw.permutation(self.slots_max)[:_SELECTED]
            places = slots.astype(np.int32)
            missing = self.draw.permutation(_SELECTED)[: self.misses]
            self.positions[request] = self.draw.integers(0, self.context, self.positions.shape[1])
            self.slots[request, : self.misses] = places[missing]
            places[missing] = [place_of_miss(number) for number in range(self.misses)]
            self.places[request, 0] = places

    def copies_alone(self) -> int:
        """Nanoseconds of copying all misses, by one thread."""
        return timed(
            lambda: [
                self.copier.gather(rows, request, 0, self.misses)
                for request, rows in enumerate(self.lists)
            ]
        )

    def attention_alone(self) -> int:
        """Nanoseconds of attention to the same rows, all of them resident."""
        places, items = self.places.copy(), self.items.copy()
        for request in range(_BATCH):
            line = self.places[request, 0]
            missing = line < 0
            line[missing] = self.slots[request, place_of_miss(0) - line[missing]]
        self.items[:, 2] = 0
        spent = timed(lambda: self.attention.attend(0, _BATCH))
        self.places[:], self.items[:] = places, items
        return spent

    def both(self) -> AttentionTimes:
        """Attend while misses are copied."""
        self.attention.attend(0, _BATCH)
        return self.attention.statistics()


def attention_rows(
    region: mmap.mmap, heads: int, misses: int, repetitions: int, targets: tuple[float, float]
) -> list[Row]:
    """Measure what of the copies is hidden; `targets` of 0 are none."""
    batch = Batch(region, heads, misses)
    alone, copies, totals, hidden, gained = [], [], [], [], []
    for _ in range(repetitions):
        batch.select()
        copies.append(batch.copies_alone() / 1e6)
        alone.append(batch.attention_alone() / 1e6)
        batch.select()
        times = batch.both()
        totals.append(times.total / 1e6)
        hidden.append(1 - times.wait / 1e6 / copies[-1])
        shorter = min(alone[-1], copies[-1])
        gained.append((alone[-1] + copies[-1] - totals[-1]) / shorter)
    share = 100 * (_SELECTED - misses) / _SELECTED
    case = f"copy_sfa batch {_BATCH}, {heads} heads, {share:.0f} % hits"
    wanted = [target or None for target in targets]
    return [
        measure(case, "hidden share", hidden, unit="of copies", target=wanted[0]),
        measure(case, "both at once", gained, unit="of shorter", target=wanted[1]),
        compare(case, "to attention alone", totals, alone, unit="ms", better=Better.LOWER),
        measure(case, "copies alone", copies, unit="ms"),
    ]


def even_case(region: mmap.mmap) -> tuple[int, int]:
    """Return heads and misses whose attention and copies take about equally long here.

    Attention to 4 heads where the processor is fast enough for that; to fewer where copies of all
    rows would not take as long.
    """
    for heads in (4, 2, 1):
        batch = Batch(region, heads, _SELECTED // 2)
        samples = []
        for _ in range(5):
            batch.select()
            samples.append((batch.copies_alone(), batch.attention_alone()))
        copies, attention = (sorted(it)[2] for it in zip(*samples, strict=True))
        misses = max(1, round(_SELECTED // 2 * attention / copies))
        if misses <= _SELECTED:
            return heads, misses
    return 1, _SELECTED


def score_rows(repetitions: int, context: int = 131072, heads: int = 64) -> list[Row]:
    """Measure scores of fp8 keys against numpy's product of keys that are floats already."""
    draw = np.random.default_rng(1)
    keys = draw.integers(0, 0x78, (context, 132), np.uint8)
    keys[:, 128:] = np.ones(1, np.float32).view(np.uint8)
    floats: NDArray[np.float32] = draw.standard_normal((context, 128), np.float32)
    queries = draw.standard_normal((1, heads, 128), np.float32)
    weights = draw.standard_normal((1, heads), np.float32)
    blocks = context // _BLOCK_TOKENS
    tables = BlockTables(
        np.arange(blocks, dtype=np.int32).reshape(1, -1),
        np.full((1, 1), context, np.int64),
        block_tokens=_BLOCK_TOKENS,
        num_blocks=blocks,
    )
    scorer = IndexScorer(
        tables,
        keys,
        queries=queries,
        weights=weights,
        scores=np.zeros((1, context), np.float32),
        layer_stride=0,
        block_stride=_BLOCK_TOKENS * 132,
        row_bytes=132,
        element="fp8",
    )
    ours, numpys = [], []
    for _ in range(repetitions):
        ours.append(timed(lambda: scorer.score(0, 0, 0, context)) / 1e6)
        numpys.append(
            timed(lambda: weights[0] @ np.maximum(queries[0] @ floats.T, np.float32(0))) / 1e6
        )
    case = f"scores of {context} fp8 keys, {heads} heads"
    return [compare(case, "to numpy on float32", ours, numpys, unit="ms", better=Better.LOWER)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what this bench can be told."""
    parser.add_argument("--pool-gib", type=int, default=4, help="memory that rows are taken from")
    parser.add_argument("--row-repetitions", type=int, default=25, help="samples of each method")


def cases(arguments: argparse.Namespace) -> list[Row]:
    """Measure everything."""
    region = memory(arguments.pool_gib * _GIB)
    repetitions = arguments.row_repetitions
    rows = [measure("memory", "on huge pages", [huge_share()], unit="share")]
    for shape in _SHAPES:
        for count in (_HOT_SLOTS, 2048):
            rows += gather_rows(region, shape, count, repetitions)
    rows += attention_rows(region, 16, round(0.1 * _SELECTED), repetitions, (0.8, 0.0))
    rows += attention_rows(region, *even_case(region), repetitions, (0.0, 0.8))
    rows += score_rows(max(3, repetitions // 5))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; return the exit status."""
    parser = argument_parser("rows of sparse decode: gather, attention, scores")
    add_options(parser)
    arguments = parser.parse_args(argv)
    if arguments.pool_gib < 1 or arguments.row_repetitions < 1:
        parser.error("--pool-gib and --row-repetitions must be at least 1")
    return finish("sparse rows", cases(arguments), arguments)


if __name__ == "__main__":
    sys.exit(main())
