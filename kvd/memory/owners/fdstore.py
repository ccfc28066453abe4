"""systemd's file descriptor store as the owner of memory.

Needs `FileDescriptorStoreMax=` in the unit. The store survives a crash, a watchdog's kill and a
restart of the service; a stop and start only from systemd 254 on, with
`FileDescriptorStorePreserve=yes`.
"""

from __future__ import annotations

import array
import os
import select
import socket
from collections.abc import Mapping, MutableMapping
from typing import Final

from kvd.core.errors import LocalError
from kvd.memory.owners.base import DAEMON, ENGINE, STOP, check_name

LISTEN_FDS_START: Final = 3
BARRIER_SECONDS: Final = 5.0


class FdStore:
    """Speaks with the service manager; what it keeps comes back as LISTEN_FDS."""

    name = "fdstore"
    connection_fd = -1

    def __init__(self, env: MutableMapping[str, str], pid: int) -> None:
        """Remember where the service manager listens, and what it passed.

        Args: env: changed: what says which descriptors came is removed, as it is true once only.
        Raises: LocalError(owner_unavailable): this is no service with a store.
        """
        self._address = address_of(env)
        self._came = _passed(env, pid)
        # Set from systemd 254 on: how many descriptors it keeps for us.
        self._outlives_stop = "FDSTORE" in env
        for name in ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"):
            env.pop(name, None)

    @property
    def survives(self) -> tuple[str, ...]:
        """See `MemoryOwner`."""
        return (ENGINE, DAEMON, STOP) if self._outlives_stop else (ENGINE, DAEMON)

    def take(self) -> dict[str, int]:
        """See `MemoryOwner`."""
        came, self._came = self._came, {}
        for fd in came.values():
            os.set_inheritable(fd, False)
        return came

    def keep(self, name: str, fd: int) -> None:
        """See `MemoryOwner`. A pidfd stays although its process ends: that is when it counts."""
        self.drop(name)
        self._tell(f"FDSTORE=1\nFDNAME={check_name(name)}\nFDPOLL=0", fd)

    def drop(self, name: str) -> None:
        """See `MemoryOwner`."""
        self._tell(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def confirm(self) -> None:
        """See `MemoryOwner`: systemd closes the pipe once it has read everything before it."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                self._tell("BARRIER=1", write_end)
            finally:
                os.close(write_end)
            poll = select.poll()
            poll.register(read_end, select.POLLHUP)
            if not poll.poll(BARRIER_SECONDS * 1000):
                raise _unavailable("it did not confirm in time")
        finally:
            os.close(read_end)

    def release(self) -> None:
        """See `MemoryOwner`: what the unit says about a stop is the administrator's decision."""

    def close(self) -> None:
        """See `MemoryOwner`."""

    def _tell(self, text: str, fd: int = -1) -> None:
        rights = [] if fd < 0 else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(BARRIER_SECONDS)
            try:
                sock.sendmsg([text.encode()], rights, 0, self._address)
            except OSError as error:
                raise _unavailable(error.strerror or str(error)) from error


def address_of(env: Mapping[str, str]) -> str:
    """Where the service manager listens.

    Raises: LocalError(owner_unavailable).
    """
    path = env.get("NOTIFY_SOCKET", "")
    if not path:
        raise _unavailable("kvd was not started by systemd with Type=notify (no NOTIFY_SOCKET)")
    return "\0" + path[1:] if path.startswith("@") else path


def _passed(env: Mapping[str, str], pid: int) -> dict[str, int]:
    """Descriptors that came with the start, by name; of one name the last."""
    if env.get("LISTEN_PID") != str(pid):
        return {}
    count = int(env.get("LISTEN_FDS", "0"))
    names = env.get("LISTEN_FDNAMES", "").split(":")
    return {
        names[at] if at < len(names) else f"unnamed-{at}": LISTEN_FDS_START + at
        for at in range(count)
    }


def _unavailable(detail: str) -> LocalError:
    return LocalError("owner_unavailable", owner="systemd's descriptor store", detail=detail)
