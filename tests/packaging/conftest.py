"""The wheel, and a venv with it and the daemon's locked packages: what a node has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., subprocess.CompletedProcess[str]]


def environment(what: str) -> Path:
    """Have `.ci/environment.py` make something, unless it is there; returns where."""
    command = (sys.executable, str(ROOT / ".ci" / "environment.py"), what)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=900)
    return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def wheel() -> Path:
    """Build this checkout's wheel; gives the file."""
    return environment("wheel")


@pytest.fixture(scope="session")
def node() -> Path:
    """Make a venv of the wheel and requirements/base.lock; gives its directory."""
    return environment("bare")


@pytest.fixture
def run(node: Path, tmp_path: Path) -> Run:
    """Run a program of the node's venv, away from the checkout and its variables."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVD_", "PYTHON"))}
    kept["XDG_RUNTIME_DIR"] = kept["RUNTIME_DIRECTORY"] = str(tmp_path)

    def ran(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (str(node / "bin" / program), *arguments),
            cwd=tmp_path,
            env=kept,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return ran
