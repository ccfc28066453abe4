"""The daemon's side of hold.sock."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvd.core.errors import LocalError
from kvd.memory.owners import hold_wire as wire
from kvd.memory.owners.base import DAEMON, ENGINE, STOP, check_name, close_all

ANSWER_SECONDS: Final = 5.0
START_SECONDS: Final = 20.0


class HolderOwner:
    """A connection to the holder; the holder keeps what it is sent, in order."""

    name = "holder"

    def __init__(self, sock: socket.socket, path: Path, ttl_s: float) -> None:
        """Take over a connection. ttl_s: how long things are to be kept without a daemon."""
        self._ttl = ttl_s
        sock.settimeout(ANSWER_SECONDS)
        self._sock = sock
        self._path = path
        self._once = True

    @classmethod
    def connect(cls, path: Path, ttl_s: float) -> HolderOwner | None:
        """Connect to a holder that runs; None when there is none.

        Args: ttl_s: how long a holder that ends with its daemon keeps things when that is gone; a
            holder that is a service of its own has been told by whoever started it.
        Raises: LocalError(owner_unavailable): it does not answer.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(ANSWER_SECONDS)
            sock.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            return None
        except OSError as error:
            sock.close()
            raise _unavailable(path, error.strerror or str(error)) from error
        return cls(sock, path, ttl_s)

    @classmethod
    def start(cls, path: Path, ttl_s: float) -> HolderOwner:
        """Start a holder for this daemon and connect to it.

        It is a process of a session of its own: what ends this process does not end it.
        Raises: LocalError(owner_unavailable).
        """
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            command = [sys.executable, "-m", "kvd", "--hold", "--runtime-dir", str(path.parent)]
            command += ["--hold-ttl", f"{ttl_s:g}s", "--hold-once", "--hold-ready-fd"]
            # It goes on in a child of its own, and ends at once.
            subprocess.run(
                [*command, str(write_end)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(write_end,),
                start_new_session=True,
                timeout=START_SECONDS,
                check=False,
            )
            os.close(write_end)
            write_end = -1
            ready, _, _ = select.select([read_end], [], [], START_SECONDS)
            if not ready or os.read(read_end, 1) != b"1":
                raise _unavailable(path, "the holder that was started does not listen")
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _unavailable(path, f"no holder can be started ({error})") from error
        finally:
            os.close(read_end)
            if write_end >= 0:
                os.close(write_end)
        made = cls.connect(path, ttl_s)
        if made is None:
            raise _unavailable(path, "the holder that was started is gone")
        return made

    @property
    def survives(self) -> tuple[str, ...]:
        """See `MemoryOwner`: the holder of a single daemon ends with its stop."""
        return (ENGINE, DAEMON) if self._once else (ENGINE, DAEMON, STOP)

    @property
    def connection_fd(self) -> int:
        """See `MemoryOwner`."""
        return self._sock.fileno()

    def take(self) -> dict[str, int]:
        """See `MemoryOwner`."""
        self._send(wire.LIST, f"{self._ttl:g}")
        found: dict[str, int] = {}
        end = time.monotonic() + ANSWER_SECONDS
        try:
            while True:
                kind, text, fds = self._receive(end)
                if kind == wire.END:
                    self._once = text != wire.STAYS
                    return found
                if kind != wire.FOUND or len(fds) != 1:
                    wire.close_fds(fds)
                    raise _unavailable(self._path, text or "it answers something else")
                found[text] = fds.pop()
        except LocalError:
            close_all(found)
            raise

    def keep(self, name: str, fd: int) -> None:
        """See `MemoryOwner`."""
        self._send(wire.KEEP, check_name(name), fd)

    def drop(self, name: str) -> None:
        """See `MemoryOwner`."""
        with suppress(LocalError):  # what it keeps too long goes with its hold_ttl
            self._send(wire.DROP, name)

    def confirm(self) -> None:
        """See `MemoryOwner`."""
        self._send(wire.SYNC)
        kind, text, fds = self._receive(time.monotonic() + ANSWER_SECONDS)
        wire.close_fds(fds)
        if kind != wire.SYNC:
            raise _unavailable(self._path, text or "it answers something else")

    def release(self) -> None:
        """See `MemoryOwner`: a holder that was started for this daemon gives everything up."""
        with suppress(LocalError):
            self._send(wire.RELEASE)

    def close(self) -> None:
        """See `MemoryOwner`."""
        self._sock.close()

    def _send(self, kind: bytes, text: str = "", fd: int = -1) -> None:
        try:
            wire.send(self._sock, kind, text, fd)
        except OSError as error:
            detail = self._last_words() or error.strerror or str(error)
            raise _unavailable(self._path, detail) from error

    def _last_words(self) -> str:
        """Why the holder broke off, if it said so."""
        with suppress(OSError, ValueError):
            self._sock.settimeout(0)
            kind, text, fds = wire.receive(self._sock)
            wire.close_fds(fds)
            return text if kind == wire.REFUSED else ""
        return ""

    def _receive(self, end: float) -> tuple[bytes, str, list[int]]:
        try:
            self._sock.settimeout(max(0.001, end - time.monotonic()))
            answer = wire.receive(self._sock)
        except (OSError, ValueError) as error:
            raise _unavailable(self._path, self._last_words() or str(error)) from error
        if not answer[0]:
            raise _unavailable(self._path, "it closed the connection")
        return answer


def _unavailable(path: Path, detail: str) -> LocalError:
    return LocalError("owner_unavailable", owner=f"the holder at {path}", detail=detail)
