"""A server's guard: nothing of the server outlives the demo, whatever that died of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytestmark = pytest.mark.slow

SECONDS = 30
FAMILY = """
import os, signal, sys
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pause()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(os.getpid(), child, flush=True)
signal.pause()
"""
"""A server whose child outlives it."""


@contextmanager
def guarded(program: str) -> Iterator[subprocess.Popen[str]]:
    """A guard over a Python program."""
    command = [sys.executable, "-m", "engine_shim.vllm.demo.guard", sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()  # the guard of a test that failed ends its server, too


def family(process: subprocess.Popen[str]) -> list[int]:
    """The processes of the server, once they are there."""
    assert process.stdout is not None
    return [int(number) for number in process.stdout.readline().split()]


def is_there(pid: int) -> bool:
    """Whether a process runs or waits to be collected."""
    return os.path.exists(f"/proc/{pid}")


def test_end_of_the_input_kills_all_of_the_server() -> None:
    with guarded(FAMILY) as process:
        pids = family(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(SECONDS) == 128 + signal.SIGKILL
        assert [pid for pid in pids if is_there(pid)] == []


def test_signal_is_for_the_first_process_and_what_stays_is_killed() -> None:
    with guarded(FAMILY) as process:
        pids = family(process)
        assert process.stdin is not None
        process.stdin.write(f"{signal.SIGTERM.value}\n")
        process.stdin.flush()
        assert process.wait(SECONDS) == 7
        assert [pid for pid in pids if is_there(pid)] == []


def test_ctrl_c_of_a_terminal_does_not_reach_the_server() -> None:
    with guarded(FAMILY) as process:
        first, child = family(process)
        assert os.getpgid(first) == os.getpgid(child) != os.getpgid(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.stdin is not None
        process.stdin.write(f"{signal.SIGTERM.value}\n")
        process.stdin.flush()
        assert process.wait(SECONDS) == 7


def test_server_has_the_signals_that_every_program_has() -> None:
    program = "import signal; print(signal.getsignal(15) == signal.SIG_DFL, flush=True)"
    with guarded(program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"


def test_server_that_ends_by_itself_gives_the_guard_its_status() -> None:
    with guarded("raise SystemExit(3)") as process:
        assert process.wait(SECONDS) == 3
