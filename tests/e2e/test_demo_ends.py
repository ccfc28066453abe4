"""The demo, interrupted and killed: it leaves no process, and after Ctrl-C nothing at all."""

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
from engine_shim.reference.demo.processes import OwnDaemon, clean_environment, pause
from tests.e2e.pair import until

pytestmark = [pytest.mark.slow, pytest.mark.engine]

DEMO = ("-m", "engine_shim.reference.demo", "--model", "tiny", "--tokens", "1024", "--new", "8")
SECONDS = 60
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def running(tmp_path: Path, *demo: str) -> Iterator[subprocess.Popen[str]]:
    """A demo in a session of its own, its temporary files in `tmp_path`/tmp."""
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, *(demo or DEMO), "--out", str(tmp_path / "out")],
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


def press_until_it_ends(process: subprocess.Popen[str]) -> None:
    """Ctrl-C again and again: a terminal tells all of the group."""

    def ended() -> bool:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            pause(0.03)
        return process.poll() is not None

    until(ended, lambda: session(process.pid), SECONDS)


def check_interrupted(process: subprocess.Popen[str], tmp_path: Path) -> None:
    """One line, exit code 130, nothing left."""
    assert process.stderr is not None
    assert process.stderr.read() == "demo: interrupted\n"
    assert process.wait() == 130
    assert session(process.pid) == []
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize(
    "moment",
    [
        "two kvds",
        "a prefill and a decode engine",
        "first request",
        "kill -9 of the prefill engine",
        "the first text on the resident model",
    ],
)
def test_ctrl_c_is_one_line_and_leaves_nothing(moment: str, tmp_path: Path) -> None:
    with running(tmp_path) as process:
        wait_for(process, moment)
        press_until_it_ends(process)
        check_interrupted(process, tmp_path)


def test_ctrl_c_while_libraries_are_loaded(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        until(lambda: "torch" in maps.read_text(), lambda: "no torch", SECONDS)
        press_until_it_ends(process)
        check_interrupted(process, tmp_path)


def test_ctrl_c_pressed_once_is_enough(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        wait_for(process, "first request")
        process.send_signal(signal.SIGINT)
        process.wait(SECONDS)
        check_interrupted(process, tmp_path)


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
