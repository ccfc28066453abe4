"""A real kvd that is looked at from outside: its status, descriptors and memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from engine_shim.reference.demo.processes import OwnDaemon, clean_environment, pause

MIB: Final = 1 << 20
SMALL: Final = (
    "pool.size=4MiB",
    "pool.huge_pages=off",
    "regions.huge_pages=off",
    "pool.headroom=0B",
)
"""A pool that is there at once."""

BROKEN: Final = """
import sys
from kvd.core.errors import InvariantError
from kvd.server import node
def broken(self):
    if self.is_ready and self.state.members:
        raise {error}
node.Node.tick = broken
from kvd.cli.daemon import main
main(sys.argv[1:])
"""
"""A kvd that finds a fault in itself once a member has joined."""

WAIT_SECONDS: Final = 20.0
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class LiveKvd(OwnDaemon):
    """A kvd with a small pool; `settings` are KEY=VALUE of its configuration."""

    def __init__(self, *settings: str) -> None:
        super().__init__(*SMALL, *settings)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except RuntimeError:
            self.close()
            raise

    def start_broken(self, error: str) -> None:
        """Start one that raises `error` (Python) once a member has joined; waits until ready."""
        command = [sys.executable, "-c", BROKEN.format(error=error), *self.arguments]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=clean_environment()
            )
        self.wait_ready()

    @property
    def arguments(self) -> list[str]:
        """What it is started with, after the name of the program."""
        return self._command[3:]

    @property
    def pid(self) -> int:
        """Of the running daemon."""
        assert self.process is not None
        return self.process.pid

    def status(self) -> dict[str, Any]:
        """/v1/status."""
        code, document = self.get("/v1/status")
        assert code == 200
        assert isinstance(document, dict)
        return document

    def refused(self, name: str) -> int:
        """How often something was refused, as the status names it: `frames.unauthorized`."""
        return int(self.status()["refused"].get(name, 0))

    def counter(self, name: str) -> int:
        """A counter of the status that is no refusal."""
        return int(self.status()["counters"].get(name, 0))

    def sessions(self) -> dict[str, int]:
        """Attached processes by kind: member, reader."""
        _, text = self.get("/metrics")
        found = re.findall(r'^kvd_sessions\{kind="(\w+)"\} (\d+)', text, re.MULTILINE)
        assert found
        return {kind: int(count) for kind, count in found}

    def descriptors(self) -> list[str]:
        """What its descriptors are open on, sorted."""
        return sorted(link for link, _ in self._files())

    def memory_inodes(self) -> set[int]:
        """Inodes of the memory files that it has open."""
        return {inode for link, inode in self._files() if link.startswith("/memfd:kvd-")}

    def _files(self) -> Iterator[tuple[str, int]]:
        """Link and inode of each descriptor; it opens and closes some meanwhile."""
        directory = Path(f"/proc/{self.pid}/fd")
        for name in os.listdir(directory):
            with suppress(FileNotFoundError):
                yield os.readlink(directory / name), os.stat(directory / name).st_ino

    def num_fds(self) -> int:
        """How many descriptors it has open, but for what the first layout of a pool brings."""
        return sum(1 for link in self.descriptors() if "kvd-pool-sums" not in link)

    def rss_bytes(self) -> int:
        """Its resident memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE

    def pause(self) -> None:
        """Stop its process until `resume`, and wait until it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        until(lambda: self._state() == "T")

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def _state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def alive(self) -> bool:
        """Whether the process runs."""
        assert self.process is not None
        return self.process.poll() is None


def until(condition: Callable[[], object], what: str = "", seconds: float = WAIT_SECONDS) -> None:
    """Wait for what another process brings about; `what` says in a failure what was awaited."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"did not come about: {what or condition}"
        pause(0.005)
