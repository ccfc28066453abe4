"""The demo, killed: it leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine_shim.reference.demo import leash
from engine_shim.reference.demo.processes import OwnDaemon, clean_environment
from tests.e2e.pair import until

pytestmark = [pytest.mark.slow, pytest.mark.engine]

DEMO = ("-m", "engine_shim.reference.demo", "--model", "tiny", "--tokens", "1024", "--new", "8")
SECONDS = 60
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo in a session of its own, its temporary files in `tmp_path`/tmp."""
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, *DEMO, "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment() | {"TMPDIR": str(tmp_path / "tmp")},
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=SECONDS)


def session(leader: int) -> list[int]:
    """The processes of a session that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, number = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(number) == leader and state not in "ZX":
            found.append(int(path.parent.name))
    return found


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    """Read until it says so."""
    assert process.stdout is not None
    assert any(text in line for line in process.stdout), "it ended"


@pytest.mark.parametrize("moment", ["a prefill and a decode engine", "first request"])
def test_nothing_survives_a_demo_that_was_killed(moment: str, tmp_path: Path) -> None:
    with running(tmp_path) as process:
        wait_for(process, moment)
        assert len(session(process.pid)) >= 3
        process.kill()
        process.wait(SECONDS)
        until(lambda: not session(process.pid), lambda: session(process.pid))


def test_a_program_whose_starter_has_gone_already_does_not_start() -> None:
    done = subprocess.run(
        [sys.executable, leash.__file__, str(os.getppid()), "1", "echo", "started"],
        stdout=subprocess.PIPE,
        timeout=SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_kvd_that_does_not_start_leaves_no_directory() -> None:
    kvd = OwnDaemon("pool.size=nonsense")
    with pytest.raises(RuntimeError, match="kvd ended"), kvd:
        pass
    assert not kvd.runtime_dir.parent.exists()
