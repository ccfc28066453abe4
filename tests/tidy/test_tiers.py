"""`python -m tests`: a failed tier is counted and keeps no other from running."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.sources import ROOT


def run(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the tiers of a checkout."""
    command = (sys.executable, "-m", "tests", *arguments)
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of its own: the tier `golden` fails, `unit` and `other` pass, `none` is empty."""
    for name, verdict in (("golden", "False"), ("unit", "True"), ("other", "True")):
        (tmp_path / "tests" / name).mkdir(parents=True)
        test = tmp_path / "tests" / name / f"test_{name}.py"
        test.write_text(f"def test_it():\n    assert {verdict}\n", encoding="utf-8")
    (tmp_path / "tests" / "none").mkdir()
    shutil.copy(ROOT / "tests" / "__main__.py", tmp_path / "tests" / "__main__.py")
    return tmp_path


def test_unknown_tier_is_refused_with_those_there_are(checkout: Path) -> None:
    done = run(checkout, "unit", "nonsense")
    assert done.returncode == 2
    assert "no such tier: nonsense; there are unit, golden, other" in done.stderr
    assert done.stdout == ""


def test_failed_tier_fails_the_run_and_the_others_run(checkout: Path) -> None:
    done = run(checkout)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    summary = [line.split()[:2] for line in lines[lines.index("== seconds by tier") + 1 :]]
    assert summary[:3] == [["unit", "ok"], ["golden", "FAILED"], ["other", "ok"]]


def test_tier_without_a_selected_test_fails(checkout: Path) -> None:
    """A misspelt -k must not look like a passed run."""
    done = run(checkout, "unit", "--", "-k", "misspelt")
    assert done.returncode == 1
    assert "FAILED (5)" in done.stdout


def test_options_go_to_pytest(checkout: Path) -> None:
    done = run(checkout, "golden", "--", "--deselect", "tests/golden/test_golden.py::test_it")
    assert "1 deselected" in done.stdout
