"""The simulator's seeds: those that failed once, and a few hundred others."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvd.core import uses
from tests.sim import seeds
from tests.sim.run import run_seed

ROOT = Path(__file__).parents[2]
NUM_SEEDS = int(os.environ.get("KVD_SIM_SEEDS", "300"))
JOBS = 2


def simulate(*words: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.sim", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("text", ["x  a bug", "12", "12   ", "-1 a bug"])
def test_bad_line_of_past_seeds_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"line 2: .* is not a seed and the name of a bug"):
        seeds.read("# seeds\n" + text)


def test_past_seeds_are_read() -> None:
    assert seeds.read("# c\n\n12  a bug\n7 b\n") == [(12, "a bug"), (7, "b")]


@pytest.mark.parametrize("past", seeds.past(), ids=lambda past: f"{past.seed} {past.bug}")
def test_past_seed_keeps_every_rule(past: seeds.PastSeed) -> None:
    verdict = run_seed(past.seed)
    assert verdict.ok, f"python -m tests.sim {past.seed} --trace: {verdict.text}"


def test_unknown_mutant_is_refused() -> None:
    done = simulate("1", "--mutant", "nothing")
    assert done.returncode == 2
    assert "no such mutant; there are: " in done.stderr


def test_broken_rule_is_reported() -> None:
    done = simulate("0", "--seeds", "40", "--first", "--mutant", "a redirect does not pin the pool")
    assert done.returncode == 1
    assert "FAILS  cover: read " in done.stdout


def test_same_seed_gives_the_same_trace() -> None:
    one, other = (simulate("5", "--trace", hash_seed=hash_seed) for hash_seed in ("1", "2"))
    assert one.returncode == other.returncode == 0
    lines, again = one.stdout.splitlines()[:-1], other.stdout.splitlines()[:-1]
    assert lines[0] == "seed 5"
    assert len(lines) > 500
    assert lines == again


def test_runs_reach_what_they_are_for() -> None:
    """Some seeds complete transfers, check rows and come to a calm end before the bound."""
    verdicts = [run_seed(seed) for seed in range(12)]
    assert sum(verdict.transfers for verdict in verdicts) > 10
    assert sum(verdict.rows for verdict in verdicts) > 2000
    assert sum(verdict.copies for verdict in verdicts) > 500


def test_runs_meet_steps() -> None:
    """Blocks are kept for steps, copied before kvd is heard, and things go wrong meanwhile."""
    marks = sum((run_seed(seed).marks for seed in range(60)), Counter[str]())
    assert marks["step kept"] > 200
    assert marks["load before kvd was heard"] > 200
    assert marks["save before kvd was heard"] > 300
    refused = {name for name in marks if name.startswith("step refused: ")}
    assert len(refused) > 2
    assert any(name.startswith("copied, then refused: ") for name in marks)
    assert marks["abort under a step"]
    assert marks["death with an open step"]
    assert marks["kvd killed with open steps"]
    assert marks["told with what was not sent"] > 500


def test_whole_tenancies_at_once_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a member, a gate or a peer can see."""
    at_once, counts = uses.at_once, Counter[bool]()

    def counted(*args: Any) -> bool:
        done = at_once(*args)
        counts[done] += 1
        return done

    def traces() -> list[list[str]]:
        found: list[list[str]] = [[] for _ in range(40)]
        for seed, lines in enumerate(found):
            run_seed(seed, lines.append)
        # Columns of a pool have no text of their own but the address of the object.
        return [[re.sub(r" at 0x\w+", "", line) for line in lines] for lines in found]

    monkeypatch.setattr(uses, "at_once", counted)
    told = traces()
    monkeypatch.setattr(uses, "at_once", lambda *args: False)
    assert traces() == told
    assert counts[True] > 60
    assert counts[False] > 1000


@pytest.mark.slow
@pytest.mark.timeout(900 + NUM_SEEDS)
def test_seeds_keep_every_rule() -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(JOBS, mp_context=context) as pool:
        verdicts = list(pool.map(run_seed, range(NUM_SEEDS), chunksize=10))
    broken = [f"{verdict.seed}: {verdict.text}" for verdict in verdicts if not verdict.ok]
    assert not broken, "seeds that broke a rule:\n" + "\n".join(broken[:20])
