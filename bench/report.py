"""Rows, table and JSON that every bench shares.

A bench measures its subject and its baseline in the same run, interleaved, because absolute numbers
drift from run to run while their ratio holds. It makes a `Row` per figure and ends with `finish`::

    parser = argument_parser("what is measured")
    arguments = parser.parse_args(argv)
    rows = [compare("save 144 KB", "throughput", ours, theirs, unit="GB/s", target=1.5)]
    return finish("kernels_copy", rows, arguments)

The JSON file is an array of rows, each with the fields of `Row`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

_PLAIN_WIDTH: Final = 160


class Better(Enum):
    """Which way a figure improves."""

    HIGHER = "higher"
    LOWER = "lower"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of a bench.

    case:     what was measured, e.g. "copy 144 KB".
    metric:   which quantity of it, e.g. "throughput".
    value:    median of the samples, in `unit`.
    baseline: median of what it is compared with, in `unit`; None without one.
    ratio:    value / baseline; None without a baseline.
    target:   the ratio to reach, or the value where there is no baseline; None for information.
    ok:       whether the target was reached; None without one.
    n:        number of samples behind `value`.
    p10, p90: percentiles of the samples, in `unit`.
    """

    case: str
    metric: str
    value: float
    unit: str
    baseline: float | None
    ratio: float | None
    target: float | None
    ok: bool | None
    n: int
    p10: float
    p90: float


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile. Raises ValueError when there are no samples."""
    if not samples:
        raise ValueError("samples is empty: measure at least once")
    rank = math.ceil(percent / 100 * len(samples))
    return sorted(samples)[max(rank, 1) - 1]


def _reached(figure: float, target: float | None, better: Better) -> bool | None:
    if target is None:
        return None
    return figure >= target if better is Better.HIGHER else figure <= target


def measure(
    case: str,
    metric: str,
    samples: Sequence[float],
    *,
    unit: str,
    target: float | None = None,
    better: Better = Better.HIGHER,
) -> Row:
    """Return the row of a figure that stands alone; `target` is a bound on the median."""
    p10, p90 = percentile(samples, 10), percentile(samples, 90)
    value = statistics.median(samples)
    ok = _reached(value, target, better)
    return Row(case, metric, value, unit, None, None, target, ok, len(samples), p10, p90)


def compare(
    case: str,
    metric: str,
    samples: Sequence[float],
    baseline: Sequence[float],
    *,
    unit: str,
    target: float | None = None,
    better: Better = Better.HIGHER,
) -> Row:
    """Return the row of a figure beside its baseline; `target` is a bound on their ratio.

    The ratio is that of the medians. Raises ValueError when either has no samples or the baseline's
    median is 0.
    """
    p10, p90 = percentile(samples, 10), percentile(samples, 90)
    percentile(baseline, 50)
    value, base = statistics.median(samples), statistics.median(baseline)
    if base == 0:
        raise ValueError(f"baseline of {case} {metric} is 0: measure something that takes time")
    ratio = value / base
    ok = _reached(ratio, target, better)
    return Row(case, metric, value, unit, base, ratio, target, ok, len(samples), p10, p90)


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every bench has: --json FILE and --gate."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--gate", action="store_true", help="exit 1 when a target is missed")
    return parser


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def table_of(title: str, rows: Sequence[Row]) -> Table:
    """Return the rows as a table for people."""
    table = Table(title=title)
    texts = ("case", "metric", "unit", "ok")
    numbered = ("value", "unit", "p10", "p90", "baseline", "ratio", "target", "n", "ok")
    for heading in ("case", "metric", *numbered):
        is_text = heading in texts
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows:
        verdict = {None: "", True: "yes", False: "NO"}[row.ok]
        numbers = (row.p10, row.p90, row.baseline, row.ratio, row.target)
        shown = (_number(row.value), row.unit, *map(_number, numbers), str(row.n), verdict)
        table.add_row(row.case, row.metric, *shown)
    return table


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows as a JSON array, replacing the file."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def finish(title: str, rows: Sequence[Row], arguments: argparse.Namespace) -> int:
    """Print the table, write the JSON file if one was asked for, and return the exit status.

    The status is 1 only with --gate and a missed target.
    """
    # Into a file or a pipe there is no width to fit, and a cut-off figure would be lost.
    Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH).print(table_of(title, rows))
    if arguments.json is not None:
        write_json(arguments.json, rows)
    missed = [row for row in rows if row.ok is False]
    for row in missed:
        figure = row.value if row.ratio is None else row.ratio
        print(f"missed: {row.case} {row.metric}: {figure:.3g}, target {row.target:.3g}")
    return 1 if missed and arguments.gate else 0
