"""`kvctl` whose output cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_kvctl_watch import node_status
from tests.unit.cli.stub_kvd import StubKvd
from tests.unit.server.fake_node import FakeNode

ROOT = Path(__file__).parents[2]


def kvctl(out: int, *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of a kvctl that writes there."""
    command = [sys.executable, "-m", "kvd.cli.kvctl", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_full_disk_is_one_line(form: str, tmp_path: Path) -> None:
    body = node_status(FakeNode())
    with StubKvd(tmp_path / "s", lambda _: body) as stub, open("/dev/full", "wb") as full:
        at = ("--socket", str(stub.path))
        assert kvctl(full.fileno(), "status", "-o", form, *at) == (
            1,
            "kvctl: cannot write: No space left on device\n",
        )


@pytest.mark.parametrize("command", ["errors", "--help"])
def test_so_it_is_without_a_kvd(command: str) -> None:
    with open("/dev/full", "wb") as full:
        code, err = kvctl(full.fileno(), command)
    assert (code, err) == (1, "kvctl: cannot write: No space left on device\n")


def test_a_pipe_that_nobody_reads_is_silent() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    assert kvctl(write_end, "errors") == (1, "")
    os.close(write_end)
