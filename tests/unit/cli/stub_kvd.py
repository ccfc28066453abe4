"""Something that listens where kvd would, and answers what a test tells it to."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

Respond = Callable[[str], bytes]
"""From a request's target to the bytes of its answer; b"" hangs up instead."""


def answer(
    body: object, status: int = 200, kind: str = "application/json", version: str = "0.1.0"
) -> bytes:
    """The bytes of an HTTP answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n"
        f"X-Kvd-Version: {version}\r\n\r\n"
    )
    return head.encode() + data


def problem(code: str, status: int) -> bytes:
    """The bytes of a refusal."""
    body = {
        "type": f"urn:kvd:error:{code}",
        "title": code,
        "status": status,
        "detail": f"it is {code} {{really}}.",
        "code": code,
        "remedy": "Do something.",
    }
    return answer(body, status, "application/problem+json")


class StubKvd:
    """Listens on a path until the test leaves it; counts connections and keeps requests."""

    def __init__(self, path: Path, respond: Respond, *, requests_per_connection: int = 100) -> None:
        self.path = path
        self.targets: list[str] = []
        self.headers: list[str] = []
        self.connections = 0
        self._respond = respond
        self._per_connection = requests_per_connection
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> StubKvd:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for connection in tuple(self._open):
            with suppress(OSError):  # the other thread may have closed it in the meantime
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            with connection, connection.makefile("rb") as lines:
                for _ in range(self._per_connection):
                    if not self._one(connection, lines.readline, lines.readline):
                        break
            self._open.remove(connection)

    def _one(
        self,
        connection: socket.socket,
        first: Callable[[], bytes],
        following: Callable[[], bytes],
    ) -> bool:
        try:
            request = first()
            while (header := following().strip()) != b"":
                self.headers.append(header.decode())
        except OSError:
            return False
        if not request:
            return False
        self.targets.append(request.split()[1].decode())
        data = self._respond(self.targets[-1])
        if not data:
            return False
        connection.sendall(data)
        return True
