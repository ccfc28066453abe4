"""The rows of `bench.vllm_decode`, and what it says without vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from bench.vllm_decode import MODES, ROUNDS, EngineFailed, rows_of, run_engine

FIGURES = {
    "hits": 60,
    "misses": 30,
    "scratch": 10,
    "timed": 4.0,
    "waited_us": 100.0,
    "copied_us": 400.0,
    "managed_us": 80.0,
}


def found(**changes: Any) -> dict[str, list[dict[str, Any]]]:
    """Three engines that say the same, but for the last round of the last one."""
    one = {"tokens": [[1, 2]], "steps": [0.2, 0.3], "figures": FIGURES}
    made = {mode: [dict(one) for _ in ROUNDS] for mode in MODES}
    made[MODES[-1]][-1] |= changes
    return made


def test_figures_are_of_one_step_of_one_request() -> None:
    rows = {(row.case, row.metric): row for row in rows_of(found())}
    alone = {metric: row.value for (case, metric), row in rows.items() if case.startswith("1 ")}
    assert alone["hit rate"] == 0.6
    assert alone["hidden share"] == 0.75
    assert (alone["copies, a step"], alone["waited, a step"], alone["books, a step"]) == (
        100,
        25,
        20,
    )
    assert rows["3 decode, ordered", "step"].ratio == 1.0
    assert [row.ok for row in rows.values() if row.metric == "tokens equal"] == [True] * 4


def test_a_token_that_differs_misses_its_target() -> None:
    missed = [row for row in rows_of(found(tokens=[[1, 3]])) if row.metric == "tokens equal"]
    assert [(row.case, row.ok) for row in missed if not row.ok] == [("3 decode, overlapped", False)]


def test_an_environment_without_vllm_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"bench.vllm_engine decode ended with 1; give --python"):
        run_engine(sys.executable, tmp_path, ["decode"], {"arguments": {}, "model": "m"})
