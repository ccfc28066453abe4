"""A configuration that is loaded again: what takes effect, what waits, what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.config.checks import _CHECKS
from kvd.config.keys import all_keys
from kvd.config.load import LoadedConfig, load_config
from kvd.core.errors import ConfigError
from kvd.server.live_view import LiveView
from kvd.server.logs import LogLevel, Logs
from kvd.server.node import Node
from kvd.server.reloading import Reloader, apply_reload

RELOADABLE = {
    "leases.lookup_lease",
    "peers.connect_timeout",
    "peers.transfer_deadline",
    "readiness.oldest_wait_max",
    "regions.size_max",
    "release.compute_deadline",
    "release.offer_deadline",
    "release.query_attempts",
    "release.query_interval",
    "release.read_attempts",
    "release.read_deadline",
    "release.save_deadline",
    "server.grace_period",
    "server.log_level",
    "store.default",
    "store.names",
}
"""Each is read by somebody at the moment it is needed, or told to who keeps it (`reconfigure`)."""


def load(**flags: str) -> LoadedConfig:
    named = {key.replace("__", "."): value for key, value in flags.items()}
    return load_config(None, {}, named, default_path=Path("/nonexistent"))


class Rig:
    """A node that runs with the defaults, and what it logged."""

    def __init__(self, path: Path, level: LogLevel = "info") -> None:
        self._file = path.open("w+")
        self.logs = Logs(level, "json", self._file)
        self.node = Node(load(server__log_level=level), self.logs)

    def logged(self) -> list[dict[str, object]]:
        assert self.logs.close(seconds=30)
        self._file.seek(0)
        lines = [json.loads(line) for line in self._file.read().splitlines()]
        self._file.close()
        return lines


def test_these_keys_are_reloadable() -> None:
    """One more needs somebody who makes it effective, and its line in `test_they_take_effect`."""
    assert {key.path for key in all_keys() if key.reloadable} == RELOADABLE


def test_no_check_compares_a_reloadable_key_with_another() -> None:
    """What goes on after a reload is a mixture of both configurations, and must be good, too."""
    for check in _CHECKS:
        assert len({key in RELOADABLE for key in check.keys}) == 1, check.name


def test_they_take_effect(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "log")
    node = rig.node
    fresh = load(
        leases__lookup_lease="7s",
        peers__connect_timeout="6s",
        peers__transfer_deadline="90s",
        readiness__oldest_wait_max="110s",
        regions__size_max="3MiB",
        release__compute_deadline="61s",
        release__save_deadline="21s",
        release__offer_deadline="11s",
        release__read_deadline="4s",
        release__query_interval="400ms",
        release__query_attempts="5",
        release__read_attempts="3",
        server__grace_period="8s",
        server__log_level="error",
        store__names="local,fast",
        store__default="fast",
    )
    second, state = 1_000_000_000, node.state
    apply_reload(node, fresh)
    assert state.settings.region_bytes == 3 << 20
    assert state.settings.lookup_lease == 7 * second
    assert state.settings.orphan_grace == 21 * second
    timing = state.rules.timing
    assert timing == state.settings.timing
    assert (timing.compute, timing.save, timing.offer) == (61 * second, 21 * second, 11 * second)
    assert (timing.read, timing.interval) == (4 * second, second * 2 // 5)
    assert (timing.query_attempts, timing.read_attempts) == (5, 3)
    assert rig.logs.level == "error"
    assert node.config.server.grace_period == 8 * second
    assert node.config.peers == fresh.config.peers
    assert node.config.store == fresh.config.store
    view = LiveView(node, node.meter)
    assert view.oldest_wait_limit() == 110 * second
    (line,) = rig.logged()
    assert line["event"] == "config_reloaded"
    assert set(line["changed"]) == RELOADABLE  # type: ignore[call-overload]
    assert line["needs_restart"] == {}


def test_the_rest_waits_for_a_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "log")
    view = LiveView(rig.node, rig.node.meter)
    apply_reload(rig.node, load(pool__size="2GiB", server__grace_period="1s"))
    shown = {row.key: (row.value, row.origin) for row in view.config_rows()}
    assert shown["pool.size"] == ("1GiB", "default")
    assert shown["server.grace_period"] == ("1s", "flag --set server.grace_period")
    (line,) = rig.logged()
    assert line["changed"] == {"server.grace_period": "5s -> 1s"}
    assert line["needs_restart"] == {"pool.size": "1GiB -> 2GiB"}


@pytest.mark.parametrize(("old", "new"), [("error", "info"), ("info", "error")])
def test_a_change_of_the_level_is_told(tmp_path: Path, old: LogLevel, new: LogLevel) -> None:
    rig = Rig(tmp_path / "log", old)
    apply_reload(rig.node, load(server__log_level=new))
    assert [line["event"] for line in rig.logged()] == ["config_reloaded"]


def reload_with(rig: Rig, read: Callable[[], LoadedConfig], early: bool = False) -> None:
    """Ask once, and wait until what follows is done."""

    async def main() -> None:
        reloader = Reloader(read)
        if early:
            reloader.ask()
        reloader.begin(rig.node)
        if not early:
            reloader.ask()
        # It waits for the reading thread, whose end was told to the loop before.
        await asyncio.get_running_loop().shutdown_default_executor()
        reloader.end()

    asyncio.run(main())


@pytest.mark.parametrize("early", [False, True])
def test_it_is_read_when_asked_also_before_the_node_runs(tmp_path: Path, early: bool) -> None:
    rig = Rig(tmp_path / "log")
    reload_with(rig, lambda: load(server__grace_period="1s"), early)
    assert rig.node.config.server.grace_period == 1_000_000_000
    assert [line["event"] for line in rig.logged()] == ["config_reloaded"]


def test_what_is_wrong_changes_nothing_and_is_told_in_one_warning(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "log")
    before = rig.node.loaded

    def read() -> LoadedConfig:
        return load(server__grace_period="1s", pool__sise="1GiB", limits__engines="0")

    with pytest.raises(ConfigError):
        read()
    reload_with(rig, read)
    assert rig.node.loaded is before
    (line,) = rig.logged()
    assert (line["event"], line["level"]) == ("config_refused", "warning")
    problems = line["problems"]
    assert isinstance(problems, list)
    assert [problem.partition(":")[0] for problem in problems] == ["pool.sise", "limits.engines"]


def test_what_cannot_be_read_at_all_changes_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "log")

    def read() -> LoadedConfig:
        raise PermissionError("not yours")

    reload_with(rig, read)
    (line,) = rig.logged()
    assert line["problems"] == ["PermissionError: not yours"]
