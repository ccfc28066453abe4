"""Connections of users that may not attach: told so once they have spoken, then closed.

Closing at once would break the pipe under the client's first message, and it would never read why.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kvd.server import seqpacket

KEPT_MAX: Final = 16
"""The oldest gives way to a new one, so that strangers take no descriptors from others."""


class TurnedAway:
    """Such connections, until they have spoken or are gone."""

    def __init__(self, refuse: Callable[[socket.socket, int], None]) -> None:
        """refuse: tells a connection that its user (a uid) may not attach."""
        self._refuse = refuse
        self._kept: dict[int, socket.socket] = {}

    def add(self, connection: socket.socket, uid: int) -> None:
        """Wait for what it says, whatever that is; the connection is owned from now on."""
        if len(self._kept) >= KEPT_MAX:
            self._drop(next(iter(self._kept)))
        fd = connection.fileno()
        self._kept[fd] = connection
        asyncio.get_running_loop().add_reader(fd, self._spoke, fd, uid)

    def close(self) -> None:
        """Drop all of them."""
        for fd in list(self._kept):
            self._drop(fd)

    def _spoke(self, fd: int, uid: int) -> None:
        connection = self._kept[fd]
        with suppress(OSError, seqpacket.FdOverflow):
            # Closing over what was not read would reset the connection, and void the answer.
            _, fds, _ = seqpacket.receive(connection)
            seqpacket.close_all(fds)
        self._refuse(connection, uid)
        self._drop(fd)

    def _drop(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        self._kept.pop(fd).close()
