"""Run the tests, tier by tier: `python -m tests [TIER ...] [-- PYTEST OPTIONS]`.

A tier is a directory here that holds tests. Each runs in a process of its own, so that none depends
on what another has imported, and each prints its seconds; a failed tier does not keep the others
from running. Without names all run, the quick ones first.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

HERE: Final = Path(__file__).resolve().parent

ORDER: Final = (
    "tidy",
    "unit",
    "golden",
    "kernels",
    "exhaustive",
    "contract",
    "docs",
    "integration",
    "packaging",
    "stateful",
    "sim",
    "e2e",
    "systemd",
    "triton",
    "vllm",
    "mutants",
)
"""Known tiers, what fails soonest first; one that is not named here runs after these."""

ENVIRONMENTS: Final[Mapping[str, str]] = MappingProxyType({"triton": "triton", "vllm": "vllm"})
"""Tiers that need packages which no other has, and the action of .ci/environment.py that makes them
an environment; all others run with the interpreter that runs this."""


OPTIONS: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {"vllm": ("--numprocesses=2", "--dist=loadfile")}
)
"""What pytest is told for a tier: engines of vLLM start on one core, so two files run at a time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a tier ended: its name, pytest's exit status, and seconds."""

    tier: str
    status: int
    seconds: float

    @property
    def text(self) -> str:
        """One line for people."""
        verdict = "ok" if self.status == 0 else f"FAILED ({self.status})"
        return f"{self.tier:<12} {verdict:<10} {self.seconds:7.1f} s"


def tiers() -> list[str]:
    """Return the names of all tiers that hold tests, in the order they run."""
    found = {path.relative_to(HERE).parts[0] for path in HERE.rglob("test_*.py")}
    return [name for name in ORDER if name in found] + sorted(found - set(ORDER))


def run_tier(name: str, options: Sequence[str]) -> Outcome:
    """Run one tier; its output goes where ours goes."""
    print(f"== tests/{name}", flush=True)
    began = time.monotonic()
    status, python = interpreter_of(name)
    if status == 0:
        status = _run_pytest(python, name, options)
    outcome = Outcome(name, status, time.monotonic() - began)
    print(f"== {outcome.text}", flush=True)
    return outcome


def interpreter_of(name: str) -> tuple[int, str]:
    """Return the interpreter of a tier, its environment made if need be.

    Returns: 0 and the interpreter's path, or the status of what should have made it, and ``""``.
    """
    if name not in ENVIRONMENTS:
        return 0, sys.executable
    script = HERE.parent / ".ci" / "environment.py"
    command = (sys.executable, str(script), ENVIRONMENTS[name])
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    made = Path(done.stdout.strip(), "bin", "python")
    return done.returncode, str(made) if done.returncode == 0 else ""


def _run_pytest(python: str, name: str, options: Sequence[str]) -> int:
    own = OPTIONS.get(name, ())
    command = (python, "-m", "pytest", f"tests/{name}", "-q", "-rs", *own, *options)
    # The checkout wins over what is installed, wherever a test's child process stands.
    paths = (str(HERE.parent), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # Not every environment has what the daemon needs: this one does.
    environment["KVD_TEST_PYTHON"] = sys.executable
    return subprocess.run(command, cwd=HERE.parent, env=environment, check=False).returncode


def hear_interrupts() -> None:
    """Let programs that are started from here be interrupted, as from a terminal.

    A shell without job control starts what it puts into the background with SIGINT ignored, and
    that is inherited: tests that interrupt a program would wait for an end that never comes.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main(arguments: Sequence[str]) -> int:
    """Run the tiers that were asked for; returns 1 when any of them failed."""
    mark = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__.splitlines()[0])
    parser.add_argument("tier", nargs="*", help=f"of: {', '.join(tiers())}; default: all")
    chosen = parser.parse_args(arguments[:mark]).tier or tiers()
    unknown = sorted(set(chosen) - set(tiers()))
    if unknown:
        parser.error(f"no such tier: {', '.join(unknown)}; there are {', '.join(tiers())}")
    hear_interrupts()
    outcomes = [run_tier(name, arguments[mark + 1 :]) for name in chosen]
    print("== seconds by tier")
    for outcome in outcomes:
        print(outcome.text)
    print(f"{'all':<12} {'':<10} {sum(outcome.seconds for outcome in outcomes):7.1f} s")
    return 1 if any(outcome.status for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
