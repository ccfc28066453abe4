"""`kvctl --watch` as a process: a document a line, one connection, and a good end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvd.server.sliced import run_now
from kvd.server.views import Watch, status
from tests.unit.cli.stub_kvd import StubKvd, answer
from tests.unit.server.fake_node import WALL, FakeNode

ROOT = Path(__file__).parents[2]


def node_status(node: FakeNode) -> bytes:
    return answer(run_now(status(node, Watch(), WALL)).model_dump_json().encode())


@contextmanager
def watching(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A running kvctl; it has ended, or is killed, when the test leaves."""
    command = [sys.executable, "-m", "kvd.cli.kvctl", "status", *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_each_document_is_one_line_and_the_connection_is_kept(tmp_path: Path) -> None:
    body = node_status(FakeNode())
    with (
        StubKvd(tmp_path / "s", lambda _: body) as stub,
        watching("-o", "json", "--watch", "0.05", "--socket", str(stub.path)) as process,
    ):
        assert process.stdout is not None
        seen = [json.loads(process.stdout.readline()) for _ in range(5)]
        assert {document["boot_id"] for document in seen} == {"b0" * 16}
        assert stub.connections == 1
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert err == ""
        assert all(json.loads(line) for line in rest.splitlines())


@pytest.mark.slow
def test_tables_follow_each_other(tmp_path: Path) -> None:
    body = node_status(FakeNode())
    with (
        StubKvd(tmp_path / "s", lambda _: body) as stub,
        watching("--watch", "0.05", "--socket", str(stub.path)) as process,
    ):
        assert process.stdout is not None
        headlines = 0
        while headlines < 3:
            line = process.stdout.readline()
            assert line
            assert "\x1b" not in line
            headlines += line.startswith("kvd 0.1.0")


@pytest.mark.slow
def test_a_kvd_that_goes_away_ends_the_watch_as_unreachable(tmp_path: Path) -> None:
    body = node_status(FakeNode())
    with ExitStack() as stack:
        stub = stack.enter_context(StubKvd(tmp_path / "s", lambda _: body))
        with watching("-o", "json", "--watch", "0.05", "--socket", str(stub.path)) as process:
            assert process.stdout is not None
            assert process.stdout.readline()
            stack.close()
            _, err = process.communicate(timeout=30)
            assert process.returncode == 3
            assert err.startswith("kvctl: unreachable:")
