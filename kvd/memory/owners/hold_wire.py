"""What the daemon and its holder say to each other on hold.sock (UNIX SEQPACKET).

One message is one letter and a name; at most one descriptor comes with it::

    daemon   K name + fd   keep it; no answer, unless it is refused
             D name        give it up; no answer
             L seconds     list: one F for each, then E; a holder of one daemon keeps things
                           that long from now on when the daemon is gone
             S             answer S once everything before it is done
             R             stopped as asked: a holder of one daemon gives everything up and ends
    holder   F name + fd   one that is kept
             E once|stays  end of the list; whether it ends with the daemon's stop
             S             done
             X text        refused; the connection ends

A holder knows no more than that, so that an old one serves every later daemon.
"""

from __future__ import annotations

import array
import socket
from typing import Final

MESSAGE_BYTES_MAX: Final = 512

KEEP, DROP, LIST, SYNC, RELEASE = b"K", b"D", b"L", b"S", b"R"
FOUND, END, REFUSED = b"F", b"E", b"X"
ONCE, STAYS = "once", "stays"

_INT: Final = array.array("i").itemsize


def send(sock: socket.socket, kind: bytes, text: str = "", fd: int = -1) -> None:
    """Send one message, with a descriptor if one is given.

    Raises: OSError.
    """
    rights = [] if fd < 0 else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    sock.sendmsg([kind + text.encode()], rights)


def receive(sock: socket.socket) -> tuple[bytes, str, list[int]]:
    """Receive one message: kind, text and descriptors, which the caller closes; b"" is the end.

    Raises: OSError, ValueError: it was cut off or is no text; its descriptors are closed.
    """
    data, ancillary, flags, _ = sock.recvmsg(
        MESSAGE_BYTES_MAX + 1, socket.CMSG_SPACE(4 * _INT), socket.MSG_CMSG_CLOEXEC
    )
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.extend(array.array("i", payload[: len(payload) - len(payload) % _INT]))
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(data) > MESSAGE_BYTES_MAX:
        close_fds(fds)
        raise ValueError("a message was cut off")
    try:
        return data[:1], data[1:].decode(), fds
    except UnicodeDecodeError as error:
        close_fds(fds)
        raise ValueError("a message is no text") from error


def close_fds(fds: list[int]) -> None:
    """Close descriptors and forget their numbers."""
    while fds:
        socket.close(fds.pop())
