"""What a service manager is told: nothing when there is none, pings only while the loop turns."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvd.memory.sd_notify import notify
from kvd.server.heartbeat import EXTEND_SECONDS, STATUS_SECONDS, Heartbeat

HEARD = {"NOTIFY_SOCKET": "/run/systemd/notify"}


class Manager:
    """Hears what a heartbeat sends."""

    def __init__(self, env: Mapping[str, str] = HEARD) -> None:
        self.heard: list[str] = []
        self.asked = 0
        self.text = ""
        self.progress: int | None = None
        self.heart = Heartbeat(env, self.heard.append)

    def at(self, now: float) -> list[str]:
        """What is heard of a beat at that time."""
        self.heard.clear()
        self.heart.beat(now, self.status)
        return list(self.heard)

    def status(self) -> tuple[str, int | None]:
        self.asked += 1
        return self.text, self.progress


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket of a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield sock


def test_nobody_to_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", "@no-such-abstract-socket")
    assert not notify("READY=1")


def test_state_arrives_whole(listener: socket.socket) -> None:
    assert notify("READY=1\nSTATUS=ready")
    assert listener.recv(100) == b"READY=1\nSTATUS=ready"


def test_without_a_service_manager_nothing_is_even_looked_at() -> None:
    manager = Manager({"WATCHDOG_USEC": "1000000"})
    assert manager.at(0) == manager.at(100) == []
    assert manager.asked == 0


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "-5"},
        {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"},
    ],
)
def test_no_pings_unless_they_are_expected_of_this_process(env: dict[str, str]) -> None:
    manager = Manager({**HEARD, **env})
    assert [line for now in range(100) for line in manager.at(now) if "WATCHDOG" in line] == []


@pytest.mark.parametrize("pid", [{}, {"WATCHDOG_PID": str(os.getpid())}])
def test_four_pings_in_each_limit(pid: dict[str, str]) -> None:
    manager = Manager({**HEARD, "WATCHDOG_USEC": "4000000", **pid})
    pings = [now / 10 for now in range(100) if "WATCHDOG=1" in manager.at(now / 10)]
    assert pings == [float(second) for second in range(10)]


def test_status_is_told_when_it_changes_and_not_too_often() -> None:
    manager = Manager()
    manager.text = "a"
    assert manager.at(1.0) == ["STATUS=a"]
    manager.text = "b"
    assert manager.at(1.0 + STATUS_SECONDS / 2) == []
    assert manager.at(1.0 + STATUS_SECONDS) == ["STATUS=b"]
    assert manager.at(2.0) == []


def test_start_that_makes_progress_gets_more_time() -> None:
    more = f"EXTEND_TIMEOUT_USEC={EXTEND_SECONDS}000000"
    manager = Manager()
    manager.text, manager.progress = "starting", 0
    assert manager.at(1) == ["STATUS=starting", more]
    assert manager.at(2) == []  # stuck: nobody waits for it longer than the unit allows
    manager.progress = 5
    assert manager.at(3) == [more]
    manager.progress = None
    assert manager.at(4) == []


def test_ready_carries_its_status() -> None:
    manager = Manager()
    manager.heart.ready("ready: pool of 1GiB")
    assert manager.heard == ["READY=1\nSTATUS=ready: pool of 1GiB"]
    manager.text = "ready: pool of 1GiB"
    assert manager.at(1) == []
