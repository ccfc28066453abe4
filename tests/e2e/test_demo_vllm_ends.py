"""The demo in vLLM, interrupted and killed, over servers that never serve: nothing is left."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.pair import until
from tests.e2e.test_demo_ends import (
    SECONDS,
    check_interrupted,
    press_until_it_ends,
    running,
    session,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.engine]

SERVER = """#!/bin/sh
case "$*" in
*engine_shim.vllm.demo.model*) exit 0 ;;
esac
trap '' TERM
sh -c 'sleep 300; true' &
echo $! > "$0.pid"
wait
"""
"""In place of an interpreter that has vLLM: a server with a child, and both mind no SIGTERM."""


@contextmanager
def serving(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo that waits for its first server, whose child is there."""
    python = tmp_path / "python"
    python.write_text(SERVER, encoding="utf-8")
    python.chmod(0o755)
    started = Path(f"{python}.pid")
    demo = ("-m", "engine_shim.vllm.demo", "--tokens", "1024", "--python", str(python))
    with running(tmp_path, *demo) as process:
        wait_for(process, "first vLLM server")
        until(lambda: started.exists() and bool(started.read_text()), lambda: session(process.pid))
        assert int(started.read_text()) in session(process.pid)
        yield process


def test_ctrl_c_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as process:
        press_until_it_ends(process)
        check_interrupted(process, tmp_path)


def test_nothing_survives_a_demo_that_was_killed(tmp_path: Path) -> None:
    with serving(tmp_path) as process:
        process.kill()
        process.wait(SECONDS)
        until(lambda: not session(process.pid), lambda: session(process.pid))
