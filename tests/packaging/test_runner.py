"""`python -m tests`, as a script runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

STARTS_A_CHILD = """
import subprocess, sys
from tests.__main__ import hear_interrupts

hear_interrupts()
child = "import signal; print(signal.getsignal(signal.SIGINT).__name__)"
subprocess.run([sys.executable, "-c", child], check=True)
"""


def test_programs_that_are_tested_can_be_interrupted_in_the_background() -> None:
    """Without a terminal's job control, a shell has background programs ignore SIGINT."""
    done = subprocess.run(
        ["sh", "-c", '"$0" -c "$1" & wait "$!"', sys.executable, STARTS_A_CHILD],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "default_int_handler\n", done.stderr
