"""Who is at the other end of a UNIX socket, and a handle on its life.

The kernel's pidfd of the peer (SO_PEERPIDFD, Linux 6.5) is taken when there is one; otherwise the
peer passes its own, which is believed only if it names the process of the peer credentials. A pid
that a message claims is never trusted.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Final, NamedTuple

from kvd.core.errors import LocalError

SO_PEERPIDFD: Final = 77
_UCRED: Final = struct.Struct("=iII")


class Credentials(NamedTuple):
    """Of the process that connected; pid as seen in kvd's pid namespace, 0 if invisible."""

    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> Credentials:
    """Credentials of the process at the other end, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Credentials(*_UCRED.unpack(raw))


def kernel_pidfd(connection: socket.socket) -> int | None:
    """The kernel's pidfd of the process at the other end, None where it has none to give."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        return None


def pidfd_process(pidfd: int) -> int:
    """The pid that a pidfd names, in our pid namespace; -1 when it is not a pidfd, or ended."""
    try:
        with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as info:
            for line in info:
                if line.startswith("Pid:"):
                    return int(line.split()[1])
    except OSError:
        return -1
    return -1


def take_pidfd(
    connection: socket.socket, passed: int | None, *, use_kernel: bool = True
) -> tuple[int, int | None]:
    """Choose the pidfd of the process at the other end.

    Args:
        connection: the attach connection.
        passed: the pidfd that the peer passed, None if it passed none.
        use_kernel: ask the kernel first; off in tests of the older way.

    Returns: (pidfd that the caller owns now, fd that is left over and must be closed or None).
    Raises: LocalError(frame_malformed) when neither way gives a believable pidfd.
    """
    own = kernel_pidfd(connection) if use_kernel else None
    if own is not None:
        os.set_inheritable(own, False)
        return own, passed
    if passed is None:
        raise LocalError("frame_malformed", detail="a member must pass its pidfd")
    pid = peer_credentials(connection).pid
    if pid <= 0:
        # Every process that we cannot see has the pid 0, so that any pidfd would fit.
        detail = "before Linux 6.5 a member must be visible in the pid namespace of kvd"
        raise LocalError("frame_malformed", detail=detail)
    if pidfd_process(passed) != pid:
        raise LocalError("frame_malformed", detail="the passed pidfd is of another process")
    return passed, None
