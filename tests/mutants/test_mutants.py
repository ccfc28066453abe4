"""The test of the tests: every known-bad version of the core is caught, by each suite named.

Each mutant runs in a process of its own, two at a time; the code as it is runs the same suites
and passes them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.patches import SUITES, Mutant, PatchError, source_path

ROOT = Path(__file__).parents[2]
WORKERS = 2
SECONDS_MAX = 110
UNCHANGED = ""

Outcomes = dict[str, Future[dict[str, int]]]


def run_child(name: str, suites: tuple[str, ...]) -> dict[str, int]:
    """Run suites on a mutant; returns what pytest returned for each."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants.child", name, *suites],
        cwd=ROOT,
        env={**os.environ, "KVD_TEST_ONLY_WHETHER": "1", "KVD_TEST_DEPTH": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, f"{name}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    statuses = json.loads(done.stdout.splitlines()[-1])
    if any(status not in (0, 1) for status in statuses.values()):
        raise AssertionError(f"{name}: the suites did not run\n{done.stdout[-4000:]}")
    return {suite: int(status) for suite, status in statuses.items()}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[Outcomes]:
    """Runs of the code as it is, by suite, and of the selected mutants, by name; begun at once."""
    pool = ThreadPoolExecutor(WORKERS)
    names = {item.callspec.id for item in request.session.items if hasattr(item, "callspec")}
    chosen = [mutant for mutant in MUTANTS if mutant.name in names]
    begun = {suite: pool.submit(run_child, UNCHANGED, (suite,)) for suite in SUITES}
    for mutant in chosen:
        begun[mutant.name] = pool.submit(run_child, mutant.name, mutant.caught_by)
    yield begun
    pool.shutdown(wait=True, cancel_futures=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"fits {mutant.name}")
def test_mutant_fits_the_code(mutant: Mutant) -> None:
    source = source_path(mutant.module).read_text(encoding="utf-8")
    compile(mutant.apply(source), mutant.module, "exec")
    assert mutant.caught_by
    assert set(mutant.caught_by) <= set(SUITES)


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("gone = 1", "gone = 2", "its text occurs 0 times in m; bring it up to date"),
        ("a = 1", "a = 2", "its text occurs 2 times in m"),
        ("b = 1", "b = 1", "changes nothing"),
    ],
)
def test_mutant_that_does_not_fit_is_refused(old: str, new: str, what: str) -> None:
    with pytest.raises(PatchError) as caught:
        Mutant("bad", "m", old, new, ("laws",)).apply("a = 1\na = 1\nb = 1\n")
    assert what in str(caught.value)


def test_unknown_module_is_refused() -> None:
    with pytest.raises(PatchError, match=r"there is no module kvd\.nothing"):
        source_path("kvd.nothing")


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_code_as_it_is_passes_the_suite(suite: str, outcomes: Outcomes) -> None:
    assert outcomes[suite].result() == {suite: 0}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught_by_every_suite_named(mutant: Mutant, outcomes: Outcomes) -> None:
    statuses = outcomes[mutant.name].result()
    missed = [suite for suite, status in statuses.items() if status == 0]
    assert not missed, f"{mutant.name}: not caught by {missed}"
