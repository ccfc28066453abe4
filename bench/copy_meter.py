"""Counts the bytes that copy kernels move and that sockets carry in this process."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any, Self
from unittest.mock import patch

import zmq

from kvd_kernels.host import CopyQueue


class CopyMeter:
    """While it is entered: bytes of every copy of the CPU device and every ZeroMQ message.

    kernel_bytes: moved by copy kernels.
    socket_bytes: of frames sent and received.
    """

    def __init__(self) -> None:
        """Nothing was counted."""
        self.kernel_bytes = 0
        self.socket_bytes = 0
        self._lock = threading.Lock()
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        """Begin to count."""
        for owner, name, counted in (
            (CopyQueue, "finish", self._finishing(CopyQueue.finish)),
            (zmq.Socket, "send", self._sending(zmq.Socket.send)),
            (zmq.Socket, "recv", self._receiving(zmq.Socket.recv)),
        ):
            self._undo.enter_context(patch.object(owner, name, counted))
        return self

    def __exit__(self, *_: object) -> None:
        """Count no more."""
        self._undo.close()

    def _finishing(self, finish: Any) -> Any:
        def counted(queue: CopyQueue, ticket: int) -> int:
            moved: int = finish(queue, ticket)
            with self._lock:
                self.kernel_bytes += moved
            return moved

        return counted

    def _sending(self, send: Any) -> Any:
        def counted(socket: object, data: Any, *rest: Any, **named: Any) -> Any:
            with self._lock:
                self.socket_bytes += memoryview(data).nbytes
            return send(socket, data, *rest, **named)

        return counted

    def _receiving(self, recv: Any) -> Any:
        def counted(socket: object, *rest: Any, **named: Any) -> Any:
            data = recv(socket, *rest, **named)
            with self._lock:
                self.socket_bytes += len(data)
            return data

        return counted
