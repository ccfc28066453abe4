"""Every command of the texts for people is run as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_shim.reference.demo.processes import OwnDaemon
from tests.docs.fenced import ROOT, TEXTS, Command, blocks, commands

SECONDS = 60
SIZES = re.compile(r"=\d+GiB\b")
ALL = commands()


def environment(daemon: OwnDaemon) -> dict[str, str]:
    """As a reader has it: the scripts on the path, and one runtime directory for everything."""
    scripts = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{scripts}:{os.environ.get('PATH', '')}",
        "KVD_RUNTIME_DIR": str(daemon.runtime_dir),
    }


def run(line: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run one line to its end."""
    return subprocess.run(
        shlex.split(line), cwd=ROOT, env=env, timeout=SECONDS, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def daemon() -> Iterator[OwnDaemon]:
    """A kvd that has seen what docs/attach.md lets an engine do."""
    with OwnDaemon("pool.size=64MiB", "regions.size_max=64MiB") as kvd:
        for path in TEXTS:
            for language, body in blocks(path):
                if language == "python":
                    command = (sys.executable, "-c", body)
                    subprocess.run(command, env=environment(kvd), timeout=SECONDS, check=True)
        yield kvd


def of(*programs: str) -> list[Command]:
    """The commands that start with one of these words."""
    return [command for command in ALL if command.line.split()[0] in programs]


@pytest.mark.slow
@pytest.mark.parametrize("command", of("kvctl"), ids=str)
def test_kvctl(command: Command, daemon: OwnDaemon) -> None:
    # The names in capitals stand for something that the reader has.
    line = command.line.replace("SLOT_OR_REQUEST", "request-1").replace("CODE", "busy")
    done = run(line, environment(daemon))
    # 4: this machine may lack the huge pages that a node should have, and the answer says so.
    assert done.returncode in (0, 4), done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("command", of("kvd"), ids=str)
def test_kvd(command: Command, daemon: OwnDaemon, tmp_path: Path) -> None:
    line = SIZES.sub("=64MiB", command.line).removesuffix("&")
    env = environment(daemon) | {"KVD_RUNTIME_DIR": str(tmp_path / "run")}
    if "--check-config" in line:
        done = run(line, env)
        assert done.returncode == 0, done.stderr
        return
    process = subprocess.Popen(shlex.split(line), env=env, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        # The end of its log would mean that it has ended, and fails the test.
        assert any("ready" in event for event in process.stderr)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("command", of("python"), ids=str)
def test_python(command: Command, daemon: OwnDaemon) -> None:
    line = command.line.replace("/run/kvd", str(daemon.runtime_dir))
    # Its input has ended: an engine then ends too, once it is there.
    done = run(line.replace("python", sys.executable, 1), environment(daemon))
    assert done.returncode == 0, done.stderr
    # The texts speak of a ring of layer buffers.
    assert "every layer has a buffer of its own" not in done.stdout


@pytest.mark.parametrize("command", of("make"), ids=str)
def test_make(command: Command) -> None:
    """Make is asked what it would do: the gate itself runs the targets."""
    done = run(f"{command.line} --dry-run", dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_readme_says_where_the_programs_come_from_before_it_uses_them() -> None:
    lines = [line for language, body in blocks(ROOT / "README.md") if not language
             for line in body.splitlines()]  # fmt: skip
    path = next(n for n, line in enumerate(lines) if line.startswith("export PATH="))
    assert "$PWD/.venv/bin:" in lines[path]
    assert "make env" in lines[:path]
    assert not [line for line in lines[:path] if line.split()[:1] != ["make"]]
    assert {line.split()[0] for line in lines[path + 1 :]} == {"kvd", "kvctl", "python"}


def test_every_command_is_run_by_a_test() -> None:
    """Those for a service manager are run under a real one, in tests/systemd."""
    run_here = of("kvctl", "kvd", "python", "make")
    run_there = [command for command in of("systemctl") if command.text == "service.md"]
    assert [command for command in ALL if command not in run_here + run_there] == []
    assert {command.text for command in run_here} >= {"README.md", "attach.md"}
