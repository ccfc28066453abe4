"""attach.sock: where processes prove who they are and get the memory that they may use.

One message in, one message out, with descriptors; the connection then stays open. Its end, or the
readability of the process's pidfd, is how kvd learns of a death, at once and without a heartbeat.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvd.core import events as ev
from kvd.core.errors import KvdError, LocalError
from kvd.core.ids import MemberRef, kvd_executor
from kvd.server import seqpacket
from kvd.server.handshake import agreed
from kvd.server.member_attach import answer, check_member, check_process, make_session, mapped
from kvd.server.node import Node
from kvd.server.peer_credentials import Credentials, peer_credentials, take_pidfd
from kvd.server.sessions import MemberSession, ReaderSession, Session, new_token
from kvd.server.turned_away import TurnedAway
from kvd.wire import attach
from kvd.wire.codec import FrameError, attach_reply_codec, attach_request_codec

BACKLOG: Final = 128
PENDING_MAX: Final = 64
"""Connections that have said nothing yet; the oldest gives way to a new one."""

ACCEPT_PAUSE: Final = 0.1
"""Pause before the next accept when descriptors are short, seconds."""

_SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class AttachSocket:
    """Accepts attach connections on the event loop."""

    def __init__(self, node: Node, path: Path, *, use_kernel_pidfd: bool = True) -> None:
        """Bind and listen; nothing is accepted before `start`.

        Args:
            use_kernel_pidfd: ask the kernel for pidfds; off in tests of older kernels' way.
        """
        self._node = node
        self._use_kernel_pidfd = use_kernel_pidfd
        self._decode = attach_request_codec().decode
        self._encode = attach_reply_codec().encode
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        self._listener.listen(BACKLOG)
        self._resume: asyncio.TimerHandle | None = None
        self._pending: dict[int, socket.socket] = {}
        self._sessions: dict[int, Session] = {}
        self._detached: dict[str, ReaderSession] = {}
        self._turned_away = TurnedAway(
            lambda connection, uid: self._refuse(connection, LocalError("forbidden", uid=uid))
        )
        self.nonces: dict[bytes, str] = {}
        """Nonces of hellos that peers have yet to answer by attaching: nonce -> their address."""
        node.on_forgotten.append(self._unwatch)

    def start(self) -> None:
        """Accept."""
        accept = self._node.meter.timed("attach", self._accept)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), accept)

    def close(self) -> None:
        """Accept nobody any more, and drop every connection."""
        loop = asyncio.get_running_loop()
        if self._resume is not None:
            self._resume.cancel()
        loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._turned_away.close()
        for fd in list(self._pending):
            self._drop_pending(fd)
        for fd, session in list(self._sessions.items()):
            loop.remove_reader(fd)
            if session.pidfd >= 0:
                loop.remove_reader(session.pidfd)
            session.close_fds()
        self._sessions.clear()
        for reader in list(self._detached.values()):
            self._give_up(reader)
        self._detached.clear()

    # Connections ------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            if error.errno not in _SHORT:
                raise
            self._pause_accepting()
            return
        connection.setblocking(False)
        credentials = peer_credentials(connection)
        if credentials.uid not in self._node.allowed_uids:
            self._turned_away.add(connection, credentials.uid)
            return
        if len(self._pending) >= PENDING_MAX:
            self._drop_pending(next(iter(self._pending)))
        fd = connection.fileno()
        self._pending[fd] = connection
        readable = self._node.meter.timed("attach", self._readable)
        asyncio.get_running_loop().add_reader(fd, readable, connection)

    def _pause_accepting(self) -> None:
        """Descriptors are short: make one free, and do not spin on who waits meanwhile."""
        self._node.counters["accepts_delayed"] += 1
        if self._pending:
            self._drop_pending(next(iter(self._pending)))
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        self._resume = loop.call_later(ACCEPT_PAUSE, self.start)

    def _drop_pending(self, fd: int) -> None:
        connection = self._pending.pop(fd)
        asyncio.get_running_loop().remove_reader(fd)
        connection.close()

    def _readable(self, connection: socket.socket) -> None:
        fds: list[int] = []
        try:
            data, fds, cut = seqpacket.receive(connection)
        except BlockingIOError:
            return
        except seqpacket.FdOverflow as error:
            self._refuse(connection, LocalError("frame_malformed", detail=str(error)))
            return
        except ConnectionError:
            data, cut = b"", False
        if not data:
            seqpacket.close_all(fds)
            self._ended(connection)
            return
        try:
            if cut:
                raise FrameError("frame_too_large", {"size": "?", "limit": str(len(data) - 1)})
            self._message(connection, self._decode(data), fds)
        except FrameError as error:
            self._refuse(connection, KvdError(error.code, **error.context))
        except KvdError as error:
            self._refuse(connection, error)
        except OSError as error:
            if error.errno not in _SHORT:
                raise
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            self._refuse(connection, LocalError("busy", what="open files", limit=limit))
        finally:
            # Whatever the message did not take over is nobody's.
            seqpacket.close_all(fds)

    def _refuse(self, connection: socket.socket, error: KvdError) -> None:
        self._node.counters[f"attach_refused_{error.code}"] += 1
        self._send(connection, attach.Refused(error.code, error.context))

    def _send(
        self, connection: socket.socket, reply: attach.AttachReply, fds: Sequence[int] = ()
    ) -> None:
        # A peer that does not read, or is gone, is noticed by its end.
        with suppress(BlockingIOError, ConnectionError):
            seqpacket.send(connection, self._encode(reply), fds)

    def _message(
        self, connection: socket.socket, message: attach.AttachRequest, fds: list[int]
    ) -> None:
        session = self._sessions.get(connection.fileno())
        if session is not None:
            session.last_heard = self._node.now()
        match message:
            case attach.AttachMember() if session is None:
                self._attach_member(connection, message, fds)
            case attach.AttachReader() if session is None:
                self._attach_reader(connection, message, fds)
            case attach.MapRegion() | attach.MapSums() if isinstance(session, MemberSession):
                self._send(connection, *mapped(self._node, session, message))
            case attach.MapMember() if isinstance(session, ReaderSession):
                self._map_member(session, message)
            case _:
                raise LocalError("frame_malformed", detail="not expected on this connection")

    # Members ----------------------------------------------------------------------------------

    def _attach_member(
        self, connection: socket.socket, message: attach.AttachMember, fds: list[int]
    ) -> None:
        node = self._node
        protocol = agreed(message.protocol_min, message.protocol_max)
        ref = check_member(node, message)
        passed = list(fds)
        wants_device = message.device_bytes > 0
        device_fd = passed.pop() if wants_device and passed else -1
        if wants_device and device_fd < 0:
            raise LocalError("frame_malformed", detail="device_bytes without its descriptor")
        credentials, pidfd = self._take_pidfd(connection, passed)
        if pidfd not in fds:
            fds.append(pidfd)
        self._bury_predecessors(ref)
        check_process(node, ref, credentials)
        if ref not in node.sessions.members:
            self._check_room()
        session = make_session(node, ref, message, connection, (credentials, pidfd), device_fd)
        for taken in (pidfd, device_fd):
            if taken >= 0:
                fds.remove(taken)
        replaced = node.sessions.add_member(session)
        if replaced is not None:
            self._replace(replaced)
        self._watch(connection, session)
        reply, handed = answer(node, session, protocol)
        self._send(connection, reply, handed)

    def _bury_predecessors(self, ref: MemberRef) -> None:
        """Whoever had this name and is dead is buried first, if its end was not seen yet."""
        for old in list(self._node.sessions.members.values()):
            if old.ref[:2] == ref[:2] and old.is_dead():
                self._died(old)

    def _replace(self, old: MemberSession) -> None:
        """The same life of a member attached again: its old connection and page are void."""
        self._unwatch(old)
        old.close_fds()
        self._node.memory.run(old.close_memory)

    # Readers ----------------------------------------------------------------------------------

    def _attach_reader(
        self, connection: socket.socket, message: attach.AttachReader, fds: list[int]
    ) -> None:
        node = self._node
        protocol = agreed(message.protocol_min, message.protocol_max)
        if message.nonce not in self.nonces:
            raise LocalError("unauthorized")
        credentials, pidfd = self._take_pidfd(connection, fds)
        if pidfd not in fds:
            fds.append(pidfd)
        executor = kvd_executor(message.boot_id.hex())
        self._check_reader(executor, credentials)
        self._check_room()
        pool = node.memory.pool
        handed = [pool.readonly_fd()] if pool is not None else []
        session = ReaderSession(
            new_token(),
            credentials.pid,
            credentials.uid,
            pidfd,
            connection,
            node.now(),
            node.now(),
            executor,
            message.nonce,
            message.your_token,
        )
        fds.remove(pidfd)
        self._give_up(self._detached.pop(executor, None))
        node.sessions.add_reader(session)
        self._watch(connection, session)
        size = pool.size if pool is not None else 0
        reply = attach.Attached(protocol, node.boot_id, session.token, size, 0)
        self._send(connection, reply, handed)
        seqpacket.close_all(handed)

    def _check_reader(self, executor: str, credentials: Credentials) -> None:
        """A kvd may attach as often as it likes, but nobody may under its name.

        Raises: LocalError(unauthorized).
        """
        known = self._node.sessions.readers.get(executor) or self._detached.get(executor)
        if known is None:
            return
        if known.is_dead():
            self._died(known)
        elif known.pid != credentials.pid:
            raise LocalError("unauthorized")

    def _map_member(self, session: ReaderSession, message: attach.MapMember) -> None:
        ref = MemberRef(message.engine, message.member, message.incarnation)
        member = self._node.sessions.members.get(ref)
        if member is None or member.device is None:
            raise LocalError("engine_unknown", engine=message.engine)
        assert session.socket is not None
        handed = [os.open(f"/proc/self/fd/{member.device_fd}", os.O_RDONLY | os.O_CLOEXEC)]
        sums = self._node.memory.sums.area if member.layout is not None else None
        try:
            reply = attach.Mapped(
                member.device.size,
                member.device_layout,
                member.layout,
                sums.size if sums is not None else 0,
            )
            self._send(session.socket, reply, [*handed, sums.fd] if sums is not None else handed)
        finally:
            seqpacket.close_all(handed)

    # Both -------------------------------------------------------------------------------------

    def _check_room(self) -> None:
        limit = self._node.config.limits.sessions
        if len(self._node.sessions) >= limit:
            raise LocalError("busy", what="sessions", limit=limit)

    def _take_pidfd(
        self, connection: socket.socket, passed: Sequence[int]
    ) -> tuple[Credentials, int]:
        """Who is at the other end, and its pidfd: one of `passed`, or a new one to be closed."""
        first = passed[0] if passed else None
        pidfd, _ = take_pidfd(connection, first, use_kernel=self._use_kernel_pidfd)
        return peer_credentials(connection), pidfd

    def _watch(self, connection: socket.socket, session: Session) -> None:
        fd = connection.fileno()
        self._pending.pop(fd, None)
        self._sessions[fd] = session
        died = self._node.meter.timed("death", self._died)
        asyncio.get_running_loop().add_reader(session.pidfd, died, session)

    def _unwatch(self, session: Session) -> None:
        """Look at its connection and its process no more; both descriptors are still open."""
        loop = asyncio.get_running_loop()
        if session.socket is not None:
            fd = session.socket.fileno()
            self._sessions.pop(fd, None)
            loop.remove_reader(fd)
        if session.pidfd >= 0:
            loop.remove_reader(session.pidfd)

    def _ended(self, connection: socket.socket) -> None:
        """A connection closed: the death of its process, unless that is seen to live."""
        fd = connection.fileno()
        if fd in self._pending:
            self._drop_pending(fd)
            return
        session = self._sessions[fd]
        if session.is_dead():
            self._died(session)
            return
        asyncio.get_running_loop().remove_reader(fd)
        del self._sessions[fd]
        connection.close()
        session.socket = None
        if isinstance(session, MemberSession):
            if self._is_known(session):
                self._node.apply(ev.MemberSilent(session.ref))
            else:
                self._node.forget_member(session)
        elif isinstance(session, ReaderSession):
            self._reader_left(session)

    def _reader_left(self, session: ReaderSession) -> None:
        """A kvd that lives closed a connection: its death must still be seen if that was the last.

        Until it attaches again it is offered nothing; what it was granted it may be reading still.
        """
        self._node.sessions.drop(session)
        if session.executor in self._node.sessions.readers:
            self._give_up(session)
        else:
            self._detached[session.executor] = session

    def _give_up(self, session: ReaderSession | None) -> None:
        """Another session of the same process is watched instead."""
        if session is not None:
            self._unwatch(session)
            session.close_fds()

    def _is_known(self, session: MemberSession) -> bool:
        """Whether the machine has this life of the member on its books."""
        return session.said_hello or session.ref in self._node.state.members

    def _died(self, session: Session) -> None:
        """Proven by its pidfd: the process has ended."""
        node = self._node
        self._unwatch(session)
        if isinstance(session, MemberSession):
            if self._is_known(session):
                node.apply(ev.MemberDied(session.ref))
            else:
                node.forget_member(session)
        elif isinstance(session, ReaderSession):
            node.sessions.drop(session)
            self._detached.pop(session.executor, None)
            session.close_fds()
            node.apply(ev.ExecutorLost(session.executor))
