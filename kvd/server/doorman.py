"""Answers probes on a socket whose real server is still being loaded.

Loading the HTTP library takes longer than everything that kvd needs before its loop runs, and a
probe must learn at once that kvd is alive. Until the server is there, whoever connects is looked at
without taking a byte (MSG_PEEK): a plain /livez is answered and closed, so is a /readyz while kvd
is starting (503, with the percentage); everybody else is kept and handed over with all that was
sent.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kvd.server.version_header import VERSION_HEADER

KEPT_MAX: Final = 128
"""Connections that wait for the server; one more is closed at once."""

LIVE_BODY: Final = b'{"alive":true}'

_LIVEZ: Final = b"GET /livez HTTP/1."
_READYZ: Final = b"GET /readyz HTTP/1."
_HEAD_BYTES_MAX: Final = 8192


class Doorman:
    """Stands at a listening socket until it is relieved."""

    def __init__(
        self,
        listener: socket.socket,
        version: str,
        starting: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Begin to answer; the loop must be running.

        Args:
            listener: listening, not blocking; stays the caller's.
            version: told in the answer.
            starting: percent of the memory populated while kvd starts, None otherwise.
        """
        self._starting = starting
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._looking: dict[int, socket.socket] = {}
        self._kept: list[socket.socket] = []
        self._version = version
        self._loop.add_reader(listener.fileno(), self._accept)

    def relieve(self) -> list[socket.socket]:
        """Stop; returns the connections that somebody else must answer."""
        self._loop.remove_reader(self._listener.fileno())
        for fd in self._looking:
            self._loop.remove_reader(fd)
        kept = [*self._kept, *self._looking.values()]
        self._kept.clear()
        self._looking.clear()
        return kept

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it was given up meanwhile, or descriptors are short: the next one may work
        if len(self._looking) + len(self._kept) >= KEPT_MAX:
            connection.close()
            return
        connection.setblocking(False)
        self._looking[connection.fileno()] = connection
        self._loop.add_reader(connection.fileno(), self._look, connection)

    def _look(self, connection: socket.socket) -> None:
        """Something was sent, or the other side has closed."""
        self._loop.remove_reader(connection.fileno())
        del self._looking[connection.fileno()]
        try:
            head = connection.recv(_HEAD_BYTES_MAX, socket.MSG_PEEK)
        except OSError:
            head = b""
        if not head:
            connection.close()
            return
        answer = self._answer_to(head) if head.endswith(b"\r\n\r\n") else None
        if answer is None:
            self._kept.append(connection)
            return
        with connection, suppress(OSError):
            connection.recv(len(head))
            connection.send(answer)

    def _answer_to(self, head: bytes) -> bytes | None:
        """The whole answer to a request that can be answered here."""
        if head.startswith(_LIVEZ):
            return self._response("200 OK", LIVE_BODY)
        percent = self._starting() if head.startswith(_READYZ) else None
        if percent is None:
            return None
        return self._response("503 Service Unavailable", _starting_body(percent))

    def _response(self, status: str, body: bytes) -> bytes:
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: application/json; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\n{VERSION_HEADER}: {self._version}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + body


def _starting_body(percent: int) -> bytes:
    """As `models.Readiness` would say it; a test compares."""
    what = f"kvd is starting: {percent}% of its memory is populated."
    remedy = "Wait until /readyz answers 200."
    reason = {"code": "starting", "what": what, "remedy": remedy}
    detail = "populates the pool" if percent else "loads its parts"
    document = {
        "ready": False,
        "phase": "starting",
        "percent": percent,
        "detail": detail,
        "reasons": [reason],
    }
    return json.dumps(document, separators=(",", ":")).encode()
