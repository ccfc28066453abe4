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


def add_vllm(checkout: Path, made: str) -> None:
    """Add the tier `vllm`, and an environment script that does what `made` says."""
    (checkout / "tests" / "vllm").mkdir()
    test = "import sys\n\n\ndef test_it():\n    print(sys.executable)\n"
    (checkout / "tests" / "vllm" / "test_vllm.py").write_text(test, encoding="utf-8")
    (checkout / ".ci").mkdir()
    script = f"import sys\nassert sys.argv[1:] == ['vllm']\n{made}\n"
    (checkout / ".ci" / "environment.py").write_text(script, encoding="utf-8")


def test_tier_whose_environment_cannot_be_made_fails_and_the_others_run(checkout: Path) -> None:
    add_vllm(checkout, "sys.exit('environment: no space left')")
    done = run(checkout, "vllm", "unit")
    assert done.returncode == 1
    assert "environment: no space left" in done.stderr
    lines = done.stdout.splitlines()
    summary = [line.split()[:2] for line in lines[lines.index("== seconds by tier") + 1 :]]
    assert summary[:2] == [["vllm", "FAILED"], ["unit", "ok"]]


def test_tier_runs_with_the_interpreter_of_its_environment(checkout: Path) -> None:
    (checkout / "made" / "bin").mkdir(parents=True)
    python = checkout / "made" / "bin" / "python"
    python.write_text(f'#!/bin/sh\necho from made\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    add_vllm(checkout, f"print({str(checkout / 'made')!r})")
    done = run(checkout, "vllm", "unit")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("from made") == 1


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
