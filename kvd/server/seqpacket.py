"""One message and its file descriptors at a time over UNIX SEQPACKET."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence
from typing import Final

from kvd.wire.protocol import ATTACH_BYTES_MAX

FDS_MAX: Final = 8
_INT: Final = array.array("i").itemsize


class FdOverflow(ValueError):
    """More descriptors came than any message may carry; they have been closed."""


def receive(connection: socket.socket) -> tuple[bytes, list[int], bool]:
    """Receive one message.

    Returns: (message, descriptors that the caller owns now, whether it was cut off). An empty
        message is the end of the connection.
    Raises: BlockingIOError, ConnectionError; FdOverflow.
    """
    data, ancillary, flags, _ = connection.recvmsg(
        ATTACH_BYTES_MAX + 1,
        socket.CMSG_SPACE(FDS_MAX * _INT),
        socket.MSG_CMSG_CLOEXEC,
    )
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = payload[: len(payload) - len(payload) % _INT]
            fds.extend(array.array("i", whole))
    if flags & socket.MSG_CTRUNC:
        close_all(fds)
        raise FdOverflow(f"more than {FDS_MAX} descriptors in one message")
    return data, fds, bool(flags & socket.MSG_TRUNC)


def send(connection: socket.socket, message: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message with descriptors; the receiver gets its own copies.

    Raises: BlockingIOError, ConnectionError.
    """
    if fds:
        rights = array.array("i", fds)
        connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    else:
        connection.send(message)


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that nobody wants."""
    for fd in fds:
        os.close(fd)
