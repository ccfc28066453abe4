"""A short run of the bench of the block index: every key is a hit, before and after kill -9."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ("--keys", "3000", "--rounds", "2", "--restarts", "1")


@pytest.mark.slow
def test_the_index_bench_finds_its_keys_and_writes_a_row_for_each_figure(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "bench.index", *SMALL, "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(path.read_text())
    figures = {(row["case"], row["metric"]) for row in rows}
    assert ("restart with 3,000 blocks", "scan of headers") in figures
    assert ("look-up + pin of 1024, one chain", "round trip") in figures
    assert ("kvd with 3,000 keys, after kill -9", "start to ready") in figures
    assert len(figures) == len(rows) == 12
