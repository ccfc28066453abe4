"""Rows, verdicts and exit status of the benches, and one short run of a real bench."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIELDS = ["case", "metric", "value", "unit", "baseline", "ratio", "target", "ok", "n", "p10", "p90"]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    import bench.report

    return bench.report


def test_no_samples_are_refused(report: ModuleType) -> None:
    with pytest.raises(ValueError, match="samples is empty"):
        report.measure("a", "b", [], unit="s")
    with pytest.raises(ValueError, match="samples is empty"):
        report.compare("a", "b", [1.0], [], unit="s")


def test_a_baseline_of_zero_is_refused(report: ModuleType) -> None:
    with pytest.raises(ValueError, match="baseline of a b is 0"):
        report.compare("a", "b", [1.0], [0.0], unit="s")


def test_percentiles_are_samples(report: ModuleType) -> None:
    samples = [float(n) for n in range(1, 11)]
    assert [report.percentile(samples, p) for p in (0, 10, 11, 50, 90, 100)] == [1, 1, 2, 5, 9, 10]


@pytest.mark.parametrize(
    ("better", "target", "ok"),
    [("HIGHER", 2.0, True), ("HIGHER", 2.1, False), ("LOWER", 2.0, True), ("LOWER", 1.9, False)],
)
def test_a_target_is_a_bound_on_the_ratio(
    report: ModuleType, better: str, target: float, ok: bool
) -> None:
    direction = report.Better[better]
    row = report.compare("a", "b", [3, 4, 9], [2, 2, 1], unit="s", target=target, better=direction)
    assert (row.value, row.baseline, row.ratio, row.ok, row.n) == (4, 2, 2, ok, 3)
    alone = report.measure("a", "b", [2.0], unit="s", target=target, better=direction)
    assert alone.ok is ok
    assert alone.ratio is None
    assert report.measure("a", "b", [2.0], unit="s").ok is None


def test_only_the_gate_turns_a_miss_into_status_1(
    report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missed = report.measure("slow case", "speed", [1.0], unit="GB/s", target=2.0)
    good = report.measure("good case", "speed", [3.0], unit="GB/s", target=2.0)
    parser = report.argument_parser("test")
    path = tmp_path / "rows.json"
    assert report.finish("t", [missed, good], parser.parse_args([])) == 0
    assert report.finish("t", [missed], parser.parse_args(["--gate", "--json", str(path)])) == 1
    assert report.finish("t", [good], parser.parse_args(["--gate"])) == 0
    assert "missed: slow case speed: 1, target 2" in capsys.readouterr().out
    (row,) = json.loads(path.read_text())
    assert list(row) == FIELDS
    assert (row["case"], row["ok"], row["target"]) == ("slow case", False, 2.0)


@pytest.mark.slow
def test_the_copy_bench_writes_a_row_per_case_and_kernel(tmp_path: Path) -> None:
    path = tmp_path / "copy.json"
    command = [sys.executable, "-m", "bench.kernels_copy", "--pool-mib", "16", "--repetitions", "1"]
    done = subprocess.run(
        [*command, "--json", str(path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    rows = json.loads(path.read_text())
    assert [list(row) for row in rows] == [FIELDS] * len(rows)
    assert {row["target"] for row in rows} == {None, 1.35, 1.5}
    assert all(row["case"] in done.stdout for row in rows)
