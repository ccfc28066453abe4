"""The ports on which producers' kvds reach this one: one ROUTER for each, bound while ranks use it.

A port that no rank uses any more stays bound for a moment: the next life of the rank will ask for
it, and a socket that was just closed can keep its port from being bound again.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import zmq

from kvd.core.errors import LocalError
from kvd.core.ids import MemberRef
from kvd.server.node import Node
from kvd.server.sessions import MemberSession
from kvd.server.zmq_pump import ZmqPump
from kvd.wire.protocol import FRAME_BYTES_MAX

UNUSED_SECONDS: Final = 10.0
"""How long a port stays bound that no rank uses."""

QUEUED_FRAMES_MAX: Final = 256
"""Frames of one producer that wait to be looked at, or to be taken by it."""


@dataclass(slots=True)
class _Port:
    pump: ZmqPump
    users: set[MemberRef] = field(default_factory=set)
    closing: asyncio.TimerHandle | None = None


class PeerPorts:
    """Binds ports as ranks ask for them."""

    def __init__(
        self,
        node: Node,
        context: zmq.Context[zmq.Socket[bytes]],
        handler: Callable[[ZmqPump, list[bytes]], None],
    ) -> None:
        """No port is bound yet; `handler` gets every message, and the pump that it came by."""
        self._node = node
        self._context = context
        self._handler = handler
        self._ports: dict[int, _Port] = {}
        self._port_of: dict[MemberRef, int] = {}
        node.on_forgotten.append(self._forgotten)

    @property
    def bound(self) -> list[int]:
        """Ports that are bound."""
        return sorted(self._ports)

    def take(self, ref: MemberRef, number: int) -> int:
        """Listen on a port for a member, instead of on the one that it had.

        Args: number: the port, 0 for none.
        Returns: the port that it had, 0 for none; taking that one again cannot fail now.
        Raises: LocalError(port_taken) when something else listens there; nothing has changed.
        """
        before = self._port_of.get(ref, 0)
        if number == before:
            return before
        if number:
            port = self._ports.get(number) or self._bind(number)
            if port.closing is not None:
                port.closing.cancel()
                port.closing = None
            port.users.add(ref)
            self._port_of[ref] = number
        else:
            del self._port_of[ref]
        if before:
            self._leave(ref, before)
        return before

    def close(self) -> None:
        """Listen no more."""
        for port in self._ports.values():
            if port.closing is not None:
                port.closing.cancel()
            port.pump.close()
        self._ports.clear()
        self._port_of.clear()

    def _forgotten(self, session: MemberSession) -> None:
        # The member may have attached again, in which case the port is its next session's.
        if self._node.sessions.members.get(session.ref) is session:
            number = self._port_of.pop(session.ref, 0)
            if number:
                self._leave(session.ref, number)

    def _leave(self, ref: MemberRef, number: int) -> None:
        port = self._ports[number]
        port.users.discard(ref)
        if not port.users:
            loop = asyncio.get_running_loop()
            port.closing = loop.call_later(UNUSED_SECONDS, self._close_unused, number)

    def _close_unused(self, number: int) -> None:
        self._ports.pop(number).pump.close()

    def _bind(self, number: int) -> _Port:
        limit = self._node.config.limits.sessions
        if len(self._ports) >= limit:
            raise LocalError("busy", what="ports", limit=limit)
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Nothing over the limit is answered, so that its connection is cut before it takes memory.
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        socket.setsockopt(zmq.RCVHWM, QUEUED_FRAMES_MAX)
        socket.setsockopt(zmq.SNDHWM, QUEUED_FRAMES_MAX)
        host = self._node.config.peers.listen_host
        if ":" in host:
            socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        try:
            socket.bind(f"tcp://{host}:{number}")
        except zmq.ZMQError as error:
            socket.close(linger=0)
            detail = os.strerror(error.errno or errno.EADDRINUSE)
            raise LocalError("port_taken", port=number, detail=detail) from error
        pumps: list[ZmqPump] = []
        pump = ZmqPump(socket, lambda parts: self._handler(pumps[0], parts), self._node.meter)
        pumps.append(pump)
        port = self._ports[number] = _Port(pump)
        pump.start()
        return port
