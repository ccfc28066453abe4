"""attach.sock, message by message: any bytes, any descriptors."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from kvd.server import seqpacket
from kvd.wire import attach
from kvd.wire.codec import attach_reply_codec, attach_request_codec
from kvd.wire.protocol import ATTACH_SOCKET, PROTOCOL, PROTOCOL_MIN

REPLY_SECONDS = 10.0


class RawAttach:
    """A connection to attach.sock that says anything."""

    def __init__(self, runtime_dir: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        # Without a timeout it waits while too many wait already.
        self.socket.connect(str(runtime_dir / ATTACH_SOCKET))
        self.socket.settimeout(REPLY_SECONDS)
        self.fds: list[int] = []

    def ask(self, message: bytes, fds: Sequence[int] = ()) -> attach.AttachReply:
        """Send bytes and descriptors, and get the answer; its descriptors go into `fds`."""
        seqpacket.send(self.socket, message, fds)
        data, received, _ = seqpacket.receive(self.socket)
        self.fds += received
        return attach_reply_codec().decode(data)

    def refusal(self, message: bytes, fds: Sequence[int] = ()) -> str:
        """Send what is refused; returns the code."""
        reply = self.ask(message, fds)
        assert isinstance(reply, attach.Refused), reply
        return reply.code

    def closed(self) -> bool:
        """Whether kvd has closed the connection; waits for it."""
        select.select([self.socket], [], [], REPLY_SECONDS)
        return self.socket.recv(1) == b""

    def close(self) -> None:
        """Hang up, and close what came."""
        self.socket.close()
        seqpacket.close_all(self.fds)
        self.fds = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def member_message(
    engine: str = "e", member: str = "w", *, incarnation: int = 7, num_slots: int = 0,
    device_bytes: int = 0,
) -> bytes:  # fmt: skip
    """A member's request to attach."""
    return attach_request_codec().encode(
        attach.AttachMember(
            PROTOCOL_MIN, PROTOCOL, engine, member, incarnation, num_slots, device_bytes
        )
    )


@contextmanager
def own_pidfd() -> Iterator[int]:
    """Our own pidfd."""
    pidfd = os.pidfd_open(os.getpid())
    try:
        yield pidfd
    finally:
        os.close(pidfd)


@contextmanager
def memfd(size: int, flags: int = os.MFD_ALLOW_SEALING) -> Iterator[int]:
    """A memfd of so many bytes."""
    made = os.memfd_create("test", os.MFD_CLOEXEC | flags)
    try:
        os.ftruncate(made, size)
        yield made
    finally:
        os.close(made)
