"""Attaching to another kvd of this host as a reader, and mapping what it lets us read.

Blocking, with deadlines; runs in worker threads only.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import stat
import threading
from contextlib import suppress

from kvd.core.errors import PeerError
from kvd.core.ids import MemberRef
from kvd.plan.layout import BlockLayout
from kvd.server import seqpacket
from kvd.server.peer_credentials import peer_credentials
from kvd.transfer.shm import ProducerMemory
from kvd.wire import attach
from kvd.wire.codec import FrameError, attach_reply_codec, attach_request_codec
from kvd.wire.protocol import ATTACH_SOCKET, PROTOCOL, PROTOCOL_MIN
from kvd.wire.runtime_dir import SOCKET_PATH_BYTES_MAX
from kvd.wire.sum_layout import SumView
from kvd_kernels.host import Mapping


class ReaderAttachment:
    """An attach connection to a producer's kvd, with the memory mapped through it."""

    def __init__(
        self, path: str, boot_id: bytes, nonce: bytes, send_token: bytes, timeout: float
    ) -> None:
        """Attach.

        Args:
            path: attach.sock of the producer's kvd, as its hello says.
            boot_id: our boot id.
            nonce: of its hello.
            send_token: what its frames to us must carry.
            timeout: of each question, seconds.

        Raises: PeerError(peer_refused | peer_unreachable).
        """
        self._lock = threading.Lock()
        self._encode = attach_request_codec().encode
        self._decode = attach_reply_codec().decode
        self._members: dict[MemberRef, ProducerMemory] = {}
        self._pool: Mapping | None = None
        self._peer = path
        self._timeout = timeout
        self.socket = _connect(path, timeout)
        try:
            request = attach.AttachReader(PROTOCOL_MIN, PROTOCOL, boot_id, nonce, send_token)
            pidfd = os.pidfd_open(os.getpid())
            try:
                reply, fds = self._ask(request, [pidfd])
            finally:
                os.close(pidfd)
            try:
                if not isinstance(reply, attach.Attached):
                    raise PeerError("peer_refused", peer=path, detail="not an answer to an attach")
                self.token = reply.token
                self.boot_id = reply.boot_id
                if reply.pool_bytes and fds:
                    self._pool = _map(fds[0], reply.pool_bytes)
            finally:
                seqpacket.close_all(fds)
        except (PeerError, OSError, ValueError) as error:
            self.socket.close()
            if isinstance(error, PeerError):
                raise
            raise PeerError("peer_unreachable", peer=path, detail=str(error)) from error

    def memory_of(self, ref: MemberRef) -> ProducerMemory:
        """The slots of one member and the pool, mapped at the first call.

        Raises: PeerError(peer_refused | peer_unreachable).
        """
        with self._lock:
            known = self._members.get(ref)
            if known is not None:
                return known
            old = [other for other in self._members if other[:2] == ref[:2]]
            known = self._members[ref] = self._map_member(ref)
        for other in old:
            self.forget_member(other)
        return known

    def _map_member(self, ref: MemberRef) -> ProducerMemory:
        request = attach.MapMember(ref.engine, ref.member, ref.incarnation)
        reply, fds = self._ask(request, [])
        try:
            if not isinstance(reply, attach.Mapped) or not fds or reply.device is None:
                raise PeerError("peer_refused", peer=self._peer, detail="no slot memory")
            device = _map(fds[0], reply.num_bytes)
            sums = _map(fds[1], reply.sums_bytes) if reply.sums_bytes and len(fds) > 1 else None
            view = SumView(sums) if sums is not None else None
        except (OSError, ValueError) as error:
            raise PeerError("peer_refused", peer=self._peer, detail=str(error)) from error
        finally:
            seqpacket.close_all(fds)
        layout = BlockLayout(reply.layout) if reply.layout is not None else None
        return ProducerMemory(device, reply.device, self._pool, layout, view, sums)

    def _ask(
        self, request: attach.AttachRequest, fds: list[int]
    ) -> tuple[attach.AttachReply, list[int]]:
        try:
            seqpacket.send(self.socket, self._encode(request), fds)
            _wait_readable(self.socket, self._timeout)
            data, received, cut = seqpacket.receive(self.socket)
        except (OSError, seqpacket.FdOverflow) as error:
            # An answer that is late would be taken for the answer to the next question.
            self._hang_up()
            raise PeerError("peer_unreachable", peer=self._peer, detail=str(error)) from error
        if not data or cut:
            seqpacket.close_all(received)
            raise PeerError("peer_unreachable", peer=self._peer, detail="it closed the connection")
        try:
            reply = self._decode(data)
        except FrameError as error:
            seqpacket.close_all(received)
            raise PeerError("peer_refused", peer=self._peer, detail=str(error)) from error
        if isinstance(reply, attach.Refused):
            seqpacket.close_all(received)
            raise PeerError("peer_refused", peer=self._peer, detail=reply.code)
        return reply, received

    def has_ended(self) -> bool:
        """Whether the connection is of no use any more; never waits.

        That is when the other kvd has closed it, or has said what nobody asked for.
        """
        if not self._lock.acquire(blocking=False):
            return False  # what can be read now is somebody's answer
        try:
            self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self._lock.release()
        return True

    def _hang_up(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def forget_member(self, ref: MemberRef) -> None:
        """Unmap a member that is gone; waits for copies out of it."""
        with self._lock:
            known = self._members.pop(ref, None)
        if known is not None:
            known.close()

    @property
    def members(self) -> list[MemberRef]:
        """Members whose slots are mapped."""
        with self._lock:
            return list(self._members)

    def close(self) -> None:
        """Unmap everything, waiting for copies, and drop the connection."""
        with self._lock:
            self.socket.close()
            for memory in self._members.values():
                memory.close()
            self._members.clear()
            if self._pool is not None:
                self._pool.close()
                self._pool = None


def _wait_readable(connection: socket.socket, timeout: float) -> None:
    """Wait for an answer.

    Raises: TimeoutError.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(timeout * 1000):
        raise TimeoutError(f"no answer within {timeout:g} s")


def _map(fd: int, num_bytes: int) -> Mapping:
    """Map what the other kvd passed, if nobody can cut it short under us.

    Raises: ValueError, OSError.
    """
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("its memory could be cut short")
    return Mapping(fd, num_bytes, writable=False)


def _connect(path: str, timeout: float) -> socket.socket:
    """Connect to a socket that a hello named, and make sure whose it is before saying anything.

    Raises: PeerError(peer_refused | peer_unreachable).
    """
    if os.path.basename(path) != ATTACH_SOCKET or len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        # Nobody is to make us talk to other programs' sockets.
        raise PeerError("peer_refused", peer=path[:64], detail="not the attach.sock of a kvd")
    try:
        if not path.startswith("/") or not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise PeerError("peer_refused", peer=path, detail="not a socket")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except (OSError, ValueError) as error:
        raise PeerError("peer_unreachable", peer=path, detail=str(error)) from error
    try:
        connection.settimeout(timeout)
        connection.connect(path)
        # The event loop watches it later, and would make it so anyway.
        connection.setblocking(False)
        uid = peer_credentials(connection).uid
    except OSError as error:
        connection.close()
        raise PeerError("peer_unreachable", peer=path, detail=str(error)) from error
    if uid not in (0, os.getuid()):
        connection.close()
        raise PeerError("peer_refused", peer=path, detail=f"it runs as uid {uid}")
    return connection
