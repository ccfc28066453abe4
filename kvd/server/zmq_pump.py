"""A ZeroMQ socket on the event loop: its descriptor is watched, and it is drained without waiting.

ZeroMQ's descriptor is edge-triggered: after any call on the socket there may be messages without a
new edge. So the pump looks again after sending, and a drain that used up its budget continues in
the next turn of the loop, so that no callback runs long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import zmq

from kvd.server.loop_meter import LoopMeter

_IN: Final = int(zmq.POLLIN)
FRAMES_PER_TURN: Final = 64
NS_PER_TURN: Final = 1_500_000
"""A callback takes messages until it has taken so many, or so long; then others have their turn."""


class ZmqPump:
    """Feeds every message of one socket to a handler."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        handler: Callable[[list[bytes]], None],
        meter: LoopMeter,
    ) -> None:
        """The socket belongs to the pump from now on; `meter` learns what its callbacks cost."""
        fd = socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        self._fd = fd
        self._socket = socket
        self._handler = handler
        self._meter = meter
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        self._is_draining = False
        self.dropped = 0

    def start(self) -> None:
        """Begin to receive."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._drain)
        self._look_again()

    def _look_again(self) -> None:
        # A drain looks again by itself before it ends.
        if not (self._scheduled or self._is_draining) and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self._again)

    def _again(self) -> None:
        self._scheduled = False
        self._drain()

    def _drain(self) -> None:
        if self._loop is None:
            return
        before = time.thread_time_ns()
        self._is_draining = more = True
        try:
            more = self._take()
        finally:
            self._is_draining = False
            if more:
                self._look_again()
        self._meter.received_at = 0
        self._meter.add("frames", time.thread_time_ns() - before)

    def _take(self) -> bool:
        """Handle what is there; returns whether there may be more."""
        socket, handler = self._socket, self._handler
        now = time.monotonic_ns()
        end = now + NS_PER_TURN
        for _ in range(FRAMES_PER_TURN):
            # Asked for, since an exception for its absence costs as much as a frame.
            events = socket.getsockopt(zmq.EVENTS)
            if not (isinstance(events, int) and events & _IN):
                return False
            parts = socket.recv_multipart(zmq.NOBLOCK)
            self._meter.received_at = now
            handler(parts)
            if self._loop is None:
                return False
            now = time.monotonic_ns()
            if now > end:
                break
        return True

    def send(self, parts: list[bytes]) -> bool:
        """Send without waiting. Returns whether it could be sent; if not it is dropped, counted.

        The receiver is gone, or does not read and its queue is full: it will ask again.
        """
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError):
            self.dropped += 1
            return False
        finally:
            self._look_again()
        return True

    def close(self) -> None:
        """Stop receiving and close the socket; nothing that is queued is waited for."""
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None
        self._socket.close(linger=200)
