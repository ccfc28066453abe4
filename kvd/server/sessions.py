"""Attached processes: members of engines, and kvds that read for theirs.

A session begins on attach.sock with a peer-credential check and a pidfd, and lives as long as the
process may touch memory that kvd handed out: longer than its socket, if the process lives on.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvd.core.ids import MemberRef
from kvd.memory.gate_page import GatePage
from kvd.wire.hot_figures import LayerFigures, RequestFigures
from kvd.wire.layout import BlockLayoutSpec, DeviceLayout, ResidentPart
from kvd.wire.protocol import TOKEN_BYTES
from kvd_kernels.host import Mapping


@dataclass(slots=True)
class Session:
    """What both kinds of session have.

    token:   what every ZeroMQ frame of it must carry.
    pidfd:   readable once the process has ended; owned by the session.
    socket:  its attach connection, None once that has closed.
    """

    token: bytes
    pid: int
    uid: int
    pidfd: int
    socket: socket.socket | None
    attached_at: int
    last_heard: int

    def is_dead(self) -> bool:
        """Whether the process is proven to have ended."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close_fds(self) -> None:
        """Give back the descriptors of the connection and the process."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Unsaid(NamedTuple):
    """What is to be said about the events `since` .. next_no - 1; `number`: of their last frame."""

    number: int
    since: int
    next_no: int


@dataclass(slots=True)
class MemberSession(Session):
    """A member of an engine.

    device:    its slot memory as kvd maps it, None when it passed none; unmapped with the session.
    device_fd: the file of that memory, to be handed to readers.
    page:      its gate page, None when it has no slots.
    event_fd:  counts wake-ups for its sleepers, -1 without slots.
    said_hello: the machine knows it.
    identity:  its ZeroMQ routing id, b"" before its first frame.
    store:     name of the store that it uses, '' before its hello.
    about:     what it says of itself, printable.
    hot:       what decode does with its hot buffers, by layer and by request.
    unsaid:    the answer to quiet frames of slot events that was not sent yet.
    """

    ref: MemberRef = field(default_factory=lambda: MemberRef("", "", 0))
    device: Mapping | None = None
    device_fd: int = -1
    page: GatePage | None = None
    event_fd: int = -1
    said_hello: bool = False
    identity: bytes = b""
    num_slots: int = 0
    unsaid: Unsaid | None = field(default=None, kw_only=True)
    layout: BlockLayoutSpec | None = None
    device_layout: DeviceLayout | None = None
    resident: tuple[ResidentPart, ...] = ()
    kv_port: int = 0
    store: str = ""
    about: dict[str, str] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)
    hot: tuple[Sequence[LayerFigures], Sequence[RequestFigures]] = ((), ())

    @property
    def name(self) -> str:
        """Engine and member."""
        return f"{self.ref.engine}/{self.ref.member}"

    def wake(self) -> None:
        """Let the member look at its gate page."""
        if self.event_fd >= 0:
            os.eventfd_write(self.event_fd, 1)

    def close_memory(self) -> None:
        """Unmap and close everything of the member; waits for copies out of its slots."""
        if self.page is not None:
            self.page.close()
            self.page = None
        if self.event_fd >= 0:
            os.close(self.event_fd)
            self.event_fd = -1
        if self.device is not None:
            self.device.close()
            self.device = None
        if self.device_fd >= 0:
            os.close(self.device_fd)
            self.device_fd = -1


@dataclass(slots=True)
class ReaderSession(Session):
    """Another kvd that reads slots and blocks of this one; it may have several.

    executor:   name under which the core knows it.
    nonce:      which of our hellos it answers.
    send_token: what our frames to it must carry.
    """

    executor: str = ""
    nonce: bytes = b""
    send_token: bytes = b""


@dataclass(slots=True)
class SessionTable:
    """All sessions, found by token, by member and by executor."""

    by_token: dict[bytes, Session] = field(default_factory=dict)
    members: dict[MemberRef, MemberSession] = field(default_factory=dict)
    readers: dict[str, ReaderSession] = field(default_factory=dict)

    def add_member(self, session: MemberSession) -> MemberSession | None:
        """Register; returns the session of the same life that it replaces, if any."""
        self.by_token[session.token] = session
        old = self.members.get(session.ref)
        self.members[session.ref] = session
        if old is not None:
            self.by_token.pop(old.token, None)
        return old

    def add_reader(self, session: ReaderSession) -> None:
        """Register a reader."""
        self.by_token[session.token] = session
        self.readers[session.executor] = session

    def drop(self, session: Session) -> None:
        """Forget a session; its descriptors are the caller's to close."""
        self.by_token.pop(session.token, None)
        if isinstance(session, MemberSession):
            if self.members.get(session.ref) is session:
                del self.members[session.ref]
        elif isinstance(session, ReaderSession) and self.readers.get(session.executor) is session:
            del self.readers[session.executor]
            for other in self.by_token.values():
                if isinstance(other, ReaderSession) and other.executor == session.executor:
                    self.readers[other.executor] = other

    def member(self, token: bytes) -> MemberSession | None:
        """The member with this token."""
        found = self.by_token.get(token)
        return found if isinstance(found, MemberSession) else None

    def reader(self, token: bytes) -> ReaderSession | None:
        """The reader with this token."""
        found = self.by_token.get(token)
        return found if isinstance(found, ReaderSession) else None

    def __len__(self) -> int:
        return len(self.by_token)


def new_token() -> bytes:
    """A session token: random, never reused."""
    return secrets.token_bytes(TOKEN_BYTES)
