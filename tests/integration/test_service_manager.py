"""What a real kvd tells its service manager, from its start to its end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_shim.reference.demo.processes import clean_environment


class Manager:
    """The socket of a service manager, and the kvd that it started."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(directory / "notify"))
        self._socket.settimeout(20)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *settings: str) -> None:
        command = [sys.executable, "-m", "kvd", "--runtime-dir", str(self._directory / "run")]
        for setting in ("pool.huge_pages=off", "pool.headroom=0B", *settings):
            command += ["--set", setting]
        env = {
            **clean_environment(),
            "NOTIFY_SOCKET": str(self._directory / "notify"),
            "WATCHDOG_USEC": "800000",
        }
        self.process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)

    def hear_until(self, start: str) -> list[str]:
        """All that comes until a line begins so."""
        heard: list[str] = []
        while not heard or not heard[-1].startswith(start):
            heard += self._socket.recv(65536).decode().splitlines()[::-1]
        return heard

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path)
    yield made
    made.close()


def test_refused_start_says_why(manager: Manager) -> None:
    manager.start("pool.size=64TiB")
    heard = manager.hear_until("STATUS=refused")
    assert heard[-1].startswith("STATUS=refused to start: memory_short: pool needs 64TiB")
    assert not [line for line in heard if "READY" in line]
    assert manager.process is not None
    assert manager.process.wait(20) == 1


def test_from_the_first_page_to_the_end(manager: Manager) -> None:
    manager.start("pool.size=256MiB", "pool.populate_step=2MiB")
    heard = manager.hear_until("READY=1")
    assert heard[-2] == "STATUS=ready: pool of 256MiB, 0 engines, 0 members"
    percents = [
        int(line.removeprefix("STATUS=starting: ").partition("%")[0])
        for line in heard
        if line.startswith("STATUS=starting: ")
    ]
    assert percents == sorted(percents)
    assert percents
    assert "EXTEND_TIMEOUT_USEC=60000000" in heard
    for _ in range(3):
        assert manager.hear_until("WATCHDOG=1")
    assert manager.process is not None
    manager.process.send_signal(signal.SIGTERM)
    assert manager.hear_until("STOPPING=1")
    assert manager.process.wait(20) == 0
