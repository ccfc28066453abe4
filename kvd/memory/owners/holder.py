"""The holder: a tiny process that keeps a daemon's descriptors while there is no daemon.

It is started as a service of its own, or by a daemon that finds none. It never maps, reads or
changes what it keeps. Once its daemon is gone it waits `hold_ttl` for the next one, then gives
everything up, so that memory is not lost to a daemon that never comes back.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import struct
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from kvd.core.errors import LocalError
from kvd.memory.owners import hold_wire as wire
from kvd.memory.owners.base import NAMES_MAX, check_name
from kvd.memory.runtime import listener_pid
from kvd.memory.sd_notify import notify

_BACKLOG: Final = 8
_UCRED: Final = struct.Struct("=iII")


class Holder:
    """Serves one daemon at a time."""

    def __init__(self, listener: socket.socket, ttl_s: float, *, once: bool) -> None:
        """Take over a listening socket.

        Args:
            ttl_s: how long things are kept without a daemon, seconds.
            once: end when the daemon has stopped as asked, or after the first hold_ttl.
        """
        self._listener = listener
        self._ttl = ttl_s
        self._once = once
        self._kept: dict[str, int] = {}
        self._daemon: socket.socket | None = None
        self._has_spoken = False
        self._gone_at = time.monotonic()
        self._is_over = False

    def run(self, stop_fd: int) -> None:
        """Serve until `stop_fd` is readable, or it is over."""
        poll = select.poll()
        poll.register(stop_fd, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        while not self._is_over:
            ready = {fd for fd, _ in poll.poll(self._wait_ms())}
            if stop_fd in ready:
                return
            daemon = self._daemon
            if daemon is not None and daemon.fileno() in ready:
                number = daemon.fileno()
                if not self._serve(daemon):
                    poll.unregister(number)
                    self._lost(daemon)
            if self._listener.fileno() in ready:
                self._accept(poll)
            self._expire()

    def close(self) -> None:
        """Give everything up."""
        for end in (self._daemon, self._listener):
            if end is not None:
                end.close()
        self._give_up()

    def _wait_ms(self) -> int | None:
        if self._has_spoken or not (self._kept or self._once):
            return None
        return max(0, int((self._gone_at + self._ttl - time.monotonic()) * 1000) + 1)

    def _expire(self) -> None:
        if not self._has_spoken and time.monotonic() >= self._gone_at + self._ttl:
            self._give_up()
            self._is_over = self._once

    def _give_up(self) -> None:
        while self._kept:
            os.close(self._kept.popitem()[1])

    def _accept(self, poll: select.poll) -> None:
        """Let the next daemon in; whoever comes while one is served is refused.

        Who has said nothing is no daemon yet: it gives way, and does not stop the clock.
        """
        try:
            came, _ = self._listener.accept()
        except OSError:
            return
        _, uid, _ = _UCRED.unpack(came.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        why = ""
        if uid not in (0, os.geteuid()):
            why = f"uid {uid} may not have this memory"
        elif self._has_spoken:
            why = "another kvd is connected"
        if why:
            with came, suppress(OSError):
                came.setblocking(False)
                wire.send(came, wire.REFUSED, why)
            return
        if self._daemon is not None:
            poll.unregister(self._daemon)
            self._daemon.close()
        self._daemon = came
        poll.register(came, select.POLLIN)

    def _lost(self, daemon: socket.socket) -> None:
        daemon.close()
        self._daemon = None
        if self._has_spoken:
            self._has_spoken = False
            self._gone_at = time.monotonic()

    def _serve(self, daemon: socket.socket) -> bool:
        """One message of the daemon; returns whether its connection goes on."""
        fds: list[int] = []
        try:
            kind, text, fds = wire.receive(daemon)
            if not kind:
                return False
            self._has_spoken = True
            why = self._obey(daemon, kind, text, fds)
            if why:
                wire.send(daemon, wire.REFUSED, why)
        except (OSError, ValueError):
            return False
        finally:
            wire.close_fds(fds)
        return not why and not self._is_over

    def _obey(self, daemon: socket.socket, kind: bytes, text: str, fds: list[int]) -> str:
        """Do as told; returns why not, '' when it was done."""
        match kind:
            case wire.KEEP if len(fds) == 1:
                check_name(text)
                if text not in self._kept and len(self._kept) >= NAMES_MAX:
                    return f"{NAMES_MAX} names are kept already"
                self._drop(text)
                self._kept[text] = fds.pop()
            case wire.DROP:
                self._drop(text)
            case wire.LIST:
                if self._once and text:
                    self._ttl = float(text)
                for name, fd in self._kept.items():
                    wire.send(daemon, wire.FOUND, name, fd)
                wire.send(daemon, wire.END, wire.ONCE if self._once else wire.STAYS)
            case wire.SYNC:
                wire.send(daemon, wire.SYNC)
            case wire.RELEASE:
                self._is_over = self._once
            case _:
                return "not understood"
        return ""

    def _drop(self, name: str) -> None:
        fd = self._kept.pop(name, -1)
        if fd >= 0:
            os.close(fd)


def hold(path: Path, ttl_s: float, *, once: bool, ready_fd: int = -1) -> None:
    """Be the holder of a runtime directory until told to end, or until it is over.

    Args:
        path: of hold.sock; its directory exists.
        ready_fd: written to and closed once the socket listens.

    Raises: LocalError(already_running): another holder serves this directory.
    """
    with ExitStack() as undo:
        # The directory itself is the lock: nothing is left of it.
        lock = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        undo.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = listener_pid(path, socket.SOCK_SEQPACKET) or "unknown"
            raise LocalError("already_running", who="holder", pid=pid, path=path) from error
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        undo.callback(os.close, read_end)
        undo.callback(os.close, write_end)
        signal.set_wakeup_fd(write_end)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        # Its terminal may go, and there is no file that it could load again.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with suppress(FileNotFoundError):
            path.unlink()  # left by a holder that died; the lock says that none lives
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        holder = Holder(listener, ttl_s, once=once)
        undo.callback(holder.close)
        listener.bind(os.fspath(path))
        undo.callback(_unlink, path)
        listener.listen(_BACKLOG)
        notify("READY=1\nSTATUS=keeping memory for kvd")
        if ready_fd >= 0:
            os.write(ready_fd, b"1")
            os.close(ready_fd)
        holder.run(read_end)


def _unlink(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()
