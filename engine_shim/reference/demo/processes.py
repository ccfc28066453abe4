"""kvds and engines as child processes: started, waited for, talked to, always ended."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from engine_shim.reference import orders as od
from engine_shim.reference.demo.leash import popen

READY_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.01


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
    """A kvd in a temporary runtime directory; it ends when the thread that started it is gone."""

    def __init__(
        self,
        *settings: str,
        args: Sequence[str] = (),
        source: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        """Nothing is started before `start`.

        Args:
            settings: KEY=VALUE of the configuration; nothing outlives it unless they say so.
            source: directory with another version of the package `kvd` to run.
            python: interpreter whose environment has what the daemon needs.
        """
        self.source = source
        self._directory = tempfile.TemporaryDirectory(prefix="kvd-")
        self.runtime_dir = Path(self._directory.name) / "run"
        self.log_path = Path(self._directory.name) / "log"
        self._command = [python, "-m", "kvd", "--runtime-dir", str(self.runtime_dir)]
        for setting in ("pool.owner=none", *settings):
            self._command += ["--set", setting]
        self._command += ["--log-format", "json", *args]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> Self:
        """Start, and wait until it is ready.

        Raises: RuntimeError with its output when it ends instead.
        """
        with self.log_path.open("ab") as log:
            environment = clean_environment()
            if self.source is not None:
                environment["PYTHONPATH"] = str(self.source)
            self.process = popen(
                self._command, stdout=log, stderr=log, env=environment, cwd=self.source
            )
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self, seconds: float = READY_SECONDS) -> None:
        """Wait for /readyz.

        Raises: RuntimeError when it ends, or does not become ready in time.
        """
        end = time.monotonic() + seconds
        assert self.process is not None
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"kvd ended: {self.log()}")
            if self._is_ready():
                return
            if time.monotonic() > end:
                raise RuntimeError(f"kvd is not ready after {seconds} s: {self.log()}")
            pause(POLL_SECONDS)

    def _is_ready(self) -> bool:
        try:
            return self.get("/readyz")[0] == 200
        except (OSError, ValueError):
            return False

    def get(self, path: str) -> tuple[int, Any]:
        """GET from the admin socket: status and document.

        Raises: OSError when nothing listens.
        """
        connection = UnixConnection(self.runtime_dir / "admin.sock")
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            text = response.read().decode()
            is_json = "json" in (response.getheader("Content-Type") or "")
            return response.status, json.loads(text) if is_json else text
        finally:
            connection.close()

    def log(self) -> str:
        """The end of what it has logged."""
        return self.log_path.read_text(errors="replace")[-4000:]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(READY_SECONDS)

    def close(self) -> None:
        """End it, whatever state it is in, and remove its directory."""
        if self.process is not None:
            kill(self.process)
        self._directory.cleanup()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.callback(self.close)
            self.start()
            undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class EngineEnded(RuntimeError):
    """An engine process has ended; `log` is the end of what it wrote."""

    def __init__(self, name: str, code: int, log: str) -> None:
        super().__init__(f"engine {name} ended with code {code}: {log.strip()[-1500:]}")
        self.code = code
        self.log = log


class EngineProcess:
    """Rank 0 of a reference engine (and its other ranks), with orders and news.

    They end when the thread that started them is gone.
    """

    def __init__(
        self, role: str, name: str, *args: str, tp_size: int = 1, prefix: Sequence[str] = ()
    ) -> None:
        """Start the processes.

        Args:
            args: see `engine_shim.reference.serve`.
            prefix: a command to run it under, e.g. `unshare --net`.
        """
        self.name = name
        self._lines = od.Lines()
        self._directory = tempfile.TemporaryDirectory(prefix="kvd-engine-")
        self._log_path = Path(self._directory.name) / "log"
        command = [*prefix, sys.executable, "-m", "engine_shim.reference.serve", role]
        command += ["--engine", name, *args]
        if tp_size > 1:
            command += ["--tp-size", str(tp_size), "--group", self._directory.name]
        with self._log_path.open("ab") as log:
            self.process = popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=clean_environment(),
            )
            self.others = [self._other(command, rank, log.fileno()) for rank in range(1, tp_size)]
        self._news: queue.SimpleQueue[od.News | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"news-{name}", daemon=True)
        self._reader.start()

    def _other(self, command: list[str], rank: int, log: int) -> subprocess.Popen[bytes]:
        """Another rank; it joins once rank 0 listens for it."""
        return popen(
            [*command, "--rank", str(rank)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=clean_environment(),
        )

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._news.put(self._lines.news(line))
        self._news.put(None)

    def send(self, order: od.Order) -> None:
        """Give an order.

        Raises: EngineEnded.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(self._lines.write(order))
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def receive(self, seconds: float = READY_SECONDS) -> od.News:
        """The next news.

        Raises: EngineEnded; TimeoutError.
        """
        try:
            news = self._news.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"engine {self.name} said nothing for {seconds} s") from None
        if news is None:
            self._news.put(None)
            raise self._ended()
        return news

    def ask(
        self,
        order: od.Order,
        seconds: float = 300.0,
        progress: Callable[[od.Progress], None] | None = None,
    ) -> od.News:
        """Give an order and wait for its end; `progress` hears what comes before.

        Raises: EngineEnded; TimeoutError.
        """
        self.send(order)
        while True:
            news = self.receive(seconds)
            if not isinstance(news, od.Progress):
                return news
            if progress is not None:
                progress(news)

    def wait_ready(self, seconds: float = READY_SECONDS) -> od.Ready:
        """Wait until it is attached.

        Raises: EngineEnded; TimeoutError.
        """
        news = self.receive(seconds)
        assert isinstance(news, od.Ready)
        return news

    def log(self) -> str:
        """The end of what it has logged."""
        return self._log_path.read_text(errors="replace")[-4000:]

    def _ended(self) -> EngineEnded:
        return EngineEnded(self.name, self.process.wait(READY_SECONDS), self.log())

    def kill(self) -> None:
        """kill -9, and wait until it is dead."""
        for process in (self.process, *self.others):
            kill(process)

    def stop(self, seconds: float = READY_SECONDS) -> int:
        """Let it end by itself; returns the exit code."""
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.send(od.Stop())
        return self.process.wait(seconds)

    def close(self) -> None:
        """End it, whatever state it is in."""
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None and stream is not self.process.stdout:
                stream.close()
        self._reader.join(READY_SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._directory.cleanup()


def kill(process: subprocess.Popen[bytes]) -> None:
    """kill -9 a child and collect it."""
    if process.poll() is None:
        process.kill()
    process.wait(READY_SECONDS)


def clean_environment() -> dict[str, str]:
    """Our environment without settings that would reach into the children's kvd.

    Threads of a parallel region that wait must sleep: engines and kvds share few cores, and a
    spinning thread would keep the one from running that it waits for.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KVD_")}
    return kept | {"OMP_WAIT_POLICY": "PASSIVE"}


def pause(seconds: float) -> None:
    """Let other processes get on; there is nothing of theirs to be woken by."""
    select.select([], [], [], seconds)
