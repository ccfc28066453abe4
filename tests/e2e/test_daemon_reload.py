"""SIGHUP: kvd loads its configuration again, at any moment of its life, and goes on."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.integration.held_kvd import HeldKvd
from tests.integration.live_kvd import LiveKvd, until
from tests.integration.raw_frames import LAYOUT, RawMember, refusal

LOCK = "kvd.lock"


class FileKvd(LiveKvd):
    """A kvd with a configuration file of its own."""

    def __init__(self, file: Path, *settings: str) -> None:
        super().__init__("pool.owner=none", *settings)
        self._command += ["--config", str(file)]

    def hang_up(self) -> None:
        """Send SIGHUP."""
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Its log events of this name."""
        lines = [line for line in self.log_path.read_text().splitlines() if f'"{event}"' in line]
        return [json.loads(line) for line in lines]

    def row(self, key: str) -> tuple[str, str]:
        """Value and origin of a key, as `kvctl config` shows them."""
        (found,) = [row for row in self.get("/v1/config")[1]["items"] if row["key"] == key]
        return found["value"], found["origin"]


@pytest.fixture
def file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvd-") as name:
        path = Path(name) / "kvd.toml"
        path.write_text('[server]\nlog_level = "info"\n')
        yield path


def test_a_changed_file_takes_effect(file: Path) -> None:
    with FileKvd(file) as kvd:
        file.write_text(
            '[server]\nlog_level = "debug"\ngrace_period = "3s"\n[limits]\nwaiters = 7\n'
        )
        kvd.hang_up()
        until(lambda: kvd.logged("config_reloaded"), "it is loaded")
        (told,) = kvd.logged("config_reloaded")
        assert told["changed"] == {
            "server.log_level": "info -> debug",
            "server.grace_period": "5s -> 3s",
        }
        assert told["needs_restart"] == {"limits.waiters": "1024 -> 7"}
        assert kvd.row("server.log_level") == ("debug", f"file {file}:2")
        assert kvd.row("server.grace_period") == ("3s", f"file {file}:3")
        assert kvd.row("limits.waiters") == ("1024", "default")
        assert kvd.stop() == 0
        assert [path.name for path in kvd.runtime_dir.iterdir()] == [LOCK]


def test_a_bad_file_changes_nothing(file: Path) -> None:
    with FileKvd(file) as kvd:
        file.write_text('[server]\ngrace_period = 3\nlog_level = "loud"\n')
        kvd.hang_up()
        until(lambda: kvd.logged("config_refused"), "it is refused")
        (told,) = kvd.logged("config_refused")
        assert len(told["problems"]) == 2
        assert kvd.row("server.grace_period") == ("5s", "default")
        file.unlink()
        kvd.hang_up()
        until(lambda: len(kvd.logged("config_refused")) == 2, "it is refused again")
        assert kvd.get("/readyz")[0] == 200


def test_an_engine_may_ask_for_a_store_as_soon_as_it_has_a_name(file: Path) -> None:
    with FileKvd(file) as kvd, RawMember(kvd.runtime_dir, "e0") as early:
        early.hello(LAYOUT, store="local")
        with RawMember(kvd.runtime_dir, "e1") as late:
            assert refusal(lambda: late.hello(LAYOUT, store="fast")).code == "store_unknown"
            file.write_text('[store]\nnames = ["fast"]\ndefault = "fast"\n')
            kvd.hang_up()
            until(lambda: kvd.logged("config_reloaded"), "it is loaded")
            assert kvd.row("store.names") == ("fast", f"file {file}:2")
            late.hello(LAYOUT, store="fast")
        shown = kvd.get("/v1/engines")[1]["items"]
        assert [engine["store"] for engine in shown] == ["local"]  # it stays where it is


def test_it_may_come_before_kvd_is_ready(file: Path) -> None:
    kvd = FileKvd(file, "pool.populate_step=2MiB", "pool.size=256MiB")
    with closing(kvd):
        kvd.start(wait=False)
        until(lambda: (kvd.runtime_dir / LOCK).exists(), "it has begun")
        file.write_text('[server]\ngrace_period = "3s"\n')
        kvd.hang_up()
        kvd.wait_ready()
        until(lambda: kvd.logged("config_reloaded"), "it is loaded")
        assert kvd.row("server.grace_period")[0] == "3s"


def test_the_holder_does_not_end_by_it() -> None:
    with HeldKvd() as kvd:
        pid = kvd.holder_pid()

        os.kill(pid, signal.SIGHUP)
        kvd.crash()
        kvd.start()
        assert kvd.holder_pid() == pid
