"""A kvd of its own for a bench or a test: started, waited for, stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

READY_SECONDS = 30.0


class UnixConnection(HTTPConnection):
    """HTTP over a UNIX socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=5)
        self._path = str(path)

    def connect(self) -> None:
        """Connect to the socket's path."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class OwnDaemon:
    """A daemon in a temporary runtime directory."""

    def __init__(self, *settings: str, args: Sequence[str] = ()) -> None:
        """settings: KEY=VALUE of the configuration."""
        self._directory = tempfile.TemporaryDirectory(prefix="kvd-")
        self.runtime_dir = Path(self._directory.name) / "run"
        self._command = [sys.executable, "-m", "kvd", "--runtime-dir", str(self.runtime_dir)]
        for setting in settings:
            self._command += ["--set", setting]
        self._command += ["--log-format", "json", *args]
        self.process: subprocess.Popen[bytes] | None = None
        self.log_path = Path(self._directory.name) / "log"

    def start(self) -> Self:
        """Start and wait until it is ready.

        Raises: RuntimeError with its output when it ends instead.
        """
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVD_")}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        self.wait_ready()
        return self

    def wait_ready(self, seconds: float = READY_SECONDS) -> None:
        """Wait for /readyz."""
        end = time.monotonic() + seconds
        assert self.process is not None
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"kvd ended: {self.log()}")
            try:
                if self.get("/readyz")[0] == 200:
                    return
            except (OSError, ValueError):
                pass
            if time.monotonic() > end:
                raise RuntimeError(f"kvd is not ready: {self.log()}")
            # What is waited for is another process: there is nothing to be woken by.
            select_pause(0.01)

    def get(self, path: str) -> tuple[int, Any]:
        """GET from the admin socket: status and document."""
        connection = UnixConnection(self.runtime_dir / "admin.sock")
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            text = body.decode()
            is_json = "json" in (response.getheader("Content-Type") or "")
            return response.status, json.loads(text) if is_json else text
        finally:
            connection.close()

    def log(self) -> str:
        """What it has logged."""
        return self.log_path.read_text(errors="replace")[-4000:]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(READY_SECONDS)

    def close(self) -> None:
        """Stop it, whatever state it is in, and remove its directory."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(READY_SECONDS)
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def select_pause(seconds: float) -> None:
    """Let another process get on."""
    import select

    select.select([], [], [], seconds)
