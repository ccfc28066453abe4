"""attach.sock: where processes prove who they are and get the memory that they may use.

One message in, one message out, with descriptors; the connection then stays open. Its end, or the
readability of the process's pidfd, is how kvd learns of a death, at once and without a heartbeat.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvd.core import events as ev
from kvd.core.errors import KvdError, LocalError
from kvd.core.ids import MemberRef, kvd_executor
from kvd.memory.gate_page import GatePage
from kvd.server import seqpacket
from kvd.server.node import Node
from kvd.server.peer_credentials import Credentials, peer_credentials, take_pidfd
from kvd.server.sessions import MemberSession, ReaderSession, Session, new_token
from kvd.wire import attach
from kvd.wire.codec import FrameError, attach_reply_codec, attach_request_codec
from kvd.wire.protocol import PROTOCOL, PROTOCOL_MIN, agree
from kvd_kernels.host import Mapping

BACKLOG: Final = 128
PENDING_MAX: Final = 64
"""Connections that have said nothing yet; the oldest gives way to a new one."""


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
        self._pending: dict[int, socket.socket] = {}
        self._sessions: dict[int, Session] = {}
        self.nonces: dict[bytes, str] = {}
        """Nonces of hellos that peers have yet to answer by attaching: nonce -> their address."""

    def start(self) -> None:
        """Accept."""
        accept = self._node.meter.timed("attach", self._accept)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), accept)

    def close(self) -> None:
        """Accept nobody any more, and drop every connection."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for fd, connection in list(self._pending.items()):
            loop.remove_reader(fd)
            connection.close()
        self._pending.clear()
        for fd, session in list(self._sessions.items()):
            loop.remove_reader(fd)
            if session.pidfd >= 0:
                loop.remove_reader(session.pidfd)
            session.close_fds()
        self._sessions.clear()

    # Connections ------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        connection.setblocking(False)
        credentials = peer_credentials(connection)
        if not self._is_allowed(credentials.uid):
            self._refuse(connection, LocalError("forbidden", uid=credentials.uid))
            connection.close()
            return
        if len(self._pending) >= PENDING_MAX:
            self._drop_pending(next(iter(self._pending)))
        fd = connection.fileno()
        self._pending[fd] = connection
        readable = self._node.meter.timed("attach", self._readable)
        asyncio.get_running_loop().add_reader(fd, readable, connection)

    def _is_allowed(self, uid: int) -> bool:
        return uid in (0, os.getuid()) or uid in self._node.config.server.allowed_uids

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
            case attach.MapRegion(region) if isinstance(session, MemberSession):
                self._map_region(session, region)
            case attach.MapMember() if isinstance(session, ReaderSession):
                self._map_member(session, message)
            case _:
                raise LocalError("frame_malformed", detail="not expected on this connection")

    # Members ----------------------------------------------------------------------------------

    def _attach_member(
        self, connection: socket.socket, message: attach.AttachMember, fds: list[int]
    ) -> None:
        node = self._node
        protocol = self._agree(message.protocol_min, message.protocol_max)
        node.machine.state.settings.limits.check("slots", message.num_slots, "slots_per_member")
        self._check_room()
        wants_device = message.device_bytes > 0
        passed = list(fds)
        device_fd = passed.pop() if wants_device and passed else -1
        if wants_device and device_fd < 0:
            raise LocalError("frame_malformed", detail="device_bytes without its descriptor")
        credentials, pidfd = self._take_pidfd(connection, passed, fds)
        ref = MemberRef(message.engine, message.member, message.incarnation)
        session = MemberSession(
            new_token(),
            credentials.pid,
            credentials.uid,
            pidfd,
            connection,
            node.now(),
            node.now(),
            ref,
            num_slots=message.num_slots,
        )
        try:
            if wants_device:
                _seal(device_fd)
                session.device = Mapping(device_fd, message.device_bytes, writable=True)
                session.device_fd = device_fd
                fds.remove(device_fd)
            if message.num_slots:
                session.page = GatePage(message.num_slots, node.boot_id)
                session.event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except (ValueError, OSError) as error:
            session.close_memory()
            os.close(pidfd)
            raise LocalError("frame_malformed", detail=f"device memory: {error}") from error
        self._register_member(connection, session)
        reply, handed = self._attached(session, protocol)
        self._send(connection, reply, handed)

    def _register_member(self, connection: socket.socket, session: MemberSession) -> None:
        """From now on the session owns the connection; a dead predecessor is buried first."""
        node = self._node
        for old in list(node.sessions.members.values()):
            if old.ref[:2] == session.ref[:2] and old.ref != session.ref and old.is_dead():
                self._died(old)
        replaced = node.sessions.add_member(session)
        if replaced is not None:
            self._replace(replaced)
        self._watch(connection, session)

    def _replace(self, old: MemberSession) -> None:
        """The same life of a member attached again: its old connection and page are void."""
        loop = asyncio.get_running_loop()
        if old.socket is not None:
            self._sessions.pop(old.socket.fileno(), None)
            loop.remove_reader(old.socket.fileno())
        loop.remove_reader(old.pidfd)
        old.close_fds()
        self._node.memory.run(old.close_memory)

    def _attached(self, session: MemberSession, protocol: int) -> tuple[attach.Attached, list[int]]:
        node = self._node
        pool = node.memory.pool
        handed = []
        if session.page is not None:
            handed += [session.page.fd, session.event_fd]
        if pool is not None:
            handed.append(pool.fd)
        reply = attach.Attached(
            protocol,
            node.boot_id,
            session.token,
            pool.size if pool is not None else 0,
            session.page.size if session.page is not None else 0,
        )
        return reply, handed

    def _map_region(self, session: MemberSession, name: str) -> None:
        core = self._node.state.regions.get(name)
        region = self._node.memory.region(name)
        if core is None or region is None or core.engine != session.ref.engine or core.dropped:
            raise LocalError("region_unknown", region=name)
        assert session.socket is not None
        self._send(session.socket, attach.Mapped(region.size), [region.fd])

    # Readers ----------------------------------------------------------------------------------

    def _attach_reader(
        self, connection: socket.socket, message: attach.AttachReader, fds: list[int]
    ) -> None:
        node = self._node
        protocol = self._agree(message.protocol_min, message.protocol_max)
        self._check_room()
        if message.nonce not in self.nonces:
            raise LocalError("unauthorized")
        credentials, pidfd = self._take_pidfd(connection, list(fds), fds)
        session = ReaderSession(
            new_token(),
            credentials.pid,
            credentials.uid,
            pidfd,
            connection,
            node.now(),
            node.now(),
            kvd_executor(message.boot_id.hex()),
            message.nonce,
            message.your_token,
        )
        node.sessions.add_reader(session)
        self._watch(connection, session)
        pool = node.memory.pool
        handed, size = [], 0
        if pool is not None:
            handed, size = [pool.readonly_fd()], pool.size
        reply = attach.Attached(protocol, node.boot_id, session.token, size, 0)
        self._send(connection, reply, handed)
        seqpacket.close_all(handed)

    def _map_member(self, session: ReaderSession, message: attach.MapMember) -> None:
        ref = MemberRef(message.engine, message.member, message.incarnation)
        member = self._node.sessions.members.get(ref)
        if member is None or member.device is None:
            raise LocalError("engine_unknown", engine=message.engine)
        assert session.socket is not None
        readonly = os.open(f"/proc/self/fd/{member.device_fd}", os.O_RDONLY | os.O_CLOEXEC)
        reply = attach.Mapped(member.device.size, member.device_layout, member.layout)
        self._send(session.socket, reply, [readonly])
        os.close(readonly)

    # Both -------------------------------------------------------------------------------------

    def _agree(self, theirs_min: int, theirs_max: int) -> int:
        protocol = agree(theirs_min, theirs_max)
        if protocol is None:
            raise LocalError(
                "protocol_mismatch",
                theirs=f"{theirs_min}-{theirs_max}",
                ours=f"{PROTOCOL_MIN}-{PROTOCOL}",
            )
        return protocol

    def _check_room(self) -> None:
        limit = self._node.config.limits.sessions
        if len(self._node.sessions) >= limit:
            raise LocalError("busy", what="sessions", limit=limit)

    def _take_pidfd(
        self, connection: socket.socket, passed: list[int], fds: list[int]
    ) -> tuple[Credentials, int]:
        """The process's pidfd, owned by the caller; what was passed and taken leaves `fds`."""
        first = passed[0] if passed else None
        pidfd, _ = take_pidfd(connection, first, use_kernel=self._use_kernel_pidfd)
        if pidfd in fds:
            fds.remove(pidfd)
        return peer_credentials(connection), pidfd

    def _watch(self, connection: socket.socket, session: Session) -> None:
        fd = connection.fileno()
        self._pending.pop(fd, None)
        self._sessions[fd] = session
        died = self._node.meter.timed("death", self._died)
        asyncio.get_running_loop().add_reader(session.pidfd, died, session)

    def _ended(self, connection: socket.socket) -> None:
        """A connection closed: the death of its process, unless that is seen to live."""
        fd = connection.fileno()
        if fd in self._pending:
            self._drop_pending(fd)
            return
        session = self._sessions.get(fd)
        asyncio.get_running_loop().remove_reader(fd)
        if session is None:
            connection.close()
            return
        if session.is_dead():
            self._died(session)
            return
        del self._sessions[fd]
        connection.close()
        session.socket = None
        if isinstance(session, MemberSession):
            if self._is_known(session):
                self._node.apply(ev.MemberSilent(session.ref))
            else:
                self._node.forget_member(session)

    def _is_known(self, session: MemberSession) -> bool:
        """Whether the machine has this life of the member on its books."""
        return session.said_hello or session.ref in self._node.state.members

    def _died(self, session: Session) -> None:
        """Proven by its pidfd: the process has ended."""
        node = self._node
        loop = asyncio.get_running_loop()
        if session.pidfd >= 0:
            loop.remove_reader(session.pidfd)
        if session.socket is not None:
            self._sessions.pop(session.socket.fileno(), None)
            loop.remove_reader(session.socket.fileno())
        if isinstance(session, MemberSession):
            if self._is_known(session):
                node.apply(ev.MemberDied(session.ref))
            else:
                node.forget_member(session)
        elif isinstance(session, ReaderSession):
            node.sessions.drop(session)
            session.close_fds()
            node.apply(ev.ExecutorLost(session.executor))


def _seal(device_fd: int) -> None:
    """Make sure that nobody can cut the memory short: reading it would kill this process.

    Raises: OSError for a file that is no memfd, or that forbids seals.
    """
    if not fcntl.fcntl(device_fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        fcntl.fcntl(device_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
