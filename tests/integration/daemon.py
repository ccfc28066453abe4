"""A real kvd in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]


class Daemon:
    """Lives of kvd in one runtime directory, one after the other."""

    def __init__(self, directory: Path, **settings: str) -> None:
        """settings: keys of the configuration with `__` for the dot."""
        self.directory = directory
        self._settings = {"pool.size": "4MiB", "pool.huge_pages": "off", "pool.headroom": "0B"}
        self._settings["pool.owner"] = "none"
        self._settings.update({key.replace("__", "."): value for key, value in settings.items()})
        self._log = directory.parent / f"{directory.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start; the sockets answer a moment later, then it logs that it is ready."""
        command = [sys.executable, "-m", "kvd", "--runtime-dir", str(self.directory)]
        for key, value in self._settings.items():
            command += ["--set", f"{key}={value}"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=env)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def log(self) -> str:
        """What it said so far, all lives together."""
        return self._log.read_text() if self._log.exists() else ""

    def close(self) -> None:
        """Kill it and remove what it left."""
        self.kill()
        self._log.unlink(missing_ok=True)
