"""attach.sock: prove who we are, get a token and the memory that we may use.

One message each way, with descriptors; the connection then stays open, and its end is how both
sides learn at once that the other is gone. Everything received is checked before it is used, and
whatever is not used is closed: a refused attach leaves no descriptor and no mapping behind.
"""

from __future__ import annotations

import array
import fcntl
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final

from engine_shim.client.errors import KvdRefused
from engine_shim.client.gate_view import GateView
from engine_shim.client.identity import MemberIdentity, Sockets
from engine_shim.client.options import left_ms
from engine_shim.client.wakeup import Wakeup
from kvd.wire.attach import Attached, AttachMember, AttachReply, Refused
from kvd.wire.codec import FrameError, attach_reply_codec, attach_request_codec
from kvd.wire.protocol import ATTACH_BYTES_MAX, PROTOCOL, PROTOCOL_MIN, TOKEN_BYTES, agree
from kvd_kernels.host import Mapping

FileId = tuple[int, int]
"""Device and inode of a file."""

FDS_MAX: Final = 8
POLL_MS_MAX: Final = 1 << 30
_INT: Final = array.array("i").itemsize
_UCRED: Final = struct.Struct("=iII")


@dataclass(slots=True)
class Attachment:
    """What an attach gave; owned by whoever holds it, given back by `close`."""

    sock: socket.socket
    boot_id: bytes
    token: bytes
    gate: GateView | None
    pool: Mapping | None
    pool_file: FileId

    def has_pool(self, mapping: Mapping, file: FileId) -> bool:
        """Whether a mapping of an earlier session shows this pool, all of it."""
        return self.pool is not None and (self.pool_file, self.pool.size) == (file, mapping.size)

    def close(self) -> None:
        """End the connection and unmap gate page and pool (which no view may use)."""
        if self.gate is not None:
            self.gate.close()
        if self.pool is not None:
            self.pool.close()
        self.hang_up()

    def hang_up(self) -> None:
        """End the connection, at once for kvd even while sleepers hold duplicates of it."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def attach(
    sockets: Sockets,
    identity: MemberIdentity,
    trusted_uids: Sequence[int],
    wakeup: Wakeup,
    is_closing: Callable[[], bool],
    end: int,
) -> Attachment:
    """Attach once.

    Args:
        trusted_uids: users besides root and our own that may serve the socket.
        wakeup, is_closing: end the wait early when the client closes.
        end: deadline, ns of the monotonic clock.

    Raises: KvdRefused: unreachable, server_untrusted, deadline_exceeded, closed, frame_malformed,
        protocol_mismatch, or what kvd answered.
    """
    with ExitStack() as undo:
        sock = _connect(sockets, end)
        undo.callback(sock.close)
        _check_server(sock, sockets, trusted_uids)
        _introduce(sock, sockets, identity)
        data, fds = _await_reply(sock, sockets, wakeup, is_closing, end)
        undo.callback(close_all, fds)
        reply = decode_reply(data)
        if not isinstance(reply, Attached):
            raise KvdRefused("frame_malformed", detail="attach.sock answered something else")
        attachment = _accept(sock, reply, fds, identity)
        close_all(fds)  # mapped and duplicated: the numbers are not needed any more
        undo.pop_all()
    return attachment


def _connect(sockets: Sockets, end: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(max(0.001, left_ms(end) / 1000))
        sock.connect(os.fspath(sockets.attach))
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise _unreachable(sockets, error.strerror or str(error)) from error
    return sock


def _unreachable(sockets: Sockets, detail: str) -> KvdRefused:
    return KvdRefused("unreachable", path=sockets.attach, detail=detail)


def _check_server(sock: socket.socket, sockets: Sockets, trusted_uids: Sequence[int]) -> None:
    """Whoever serves the socket gets our memory and gives us ours: it must be trusted."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(raw)
    if uid not in (0, os.geteuid(), *trusted_uids):
        raise KvdRefused("server_untrusted", path=sockets.attach, uid=uid)


def _introduce(sock: socket.socket, sockets: Sockets, identity: MemberIdentity) -> None:
    message = attach_request_codec().encode(
        AttachMember(
            PROTOCOL_MIN,
            PROTOCOL,
            identity.engine,
            identity.member,
            identity.incarnation,
            identity.num_slots,
            identity.memory_bytes,
        )
    )
    pidfd = os.pidfd_open(os.getpid())
    try:
        fds = [pidfd] if identity.memory_fd < 0 else [pidfd, identity.memory_fd]
        rights = array.array("i", fds)
        sock.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    except OSError as error:
        raise _unreachable(sockets, error.strerror or str(error)) from error
    finally:
        os.close(pidfd)


def _await_reply(
    sock: socket.socket,
    sockets: Sockets,
    wakeup: Wakeup,
    is_closing: Callable[[], bool],
    end: int,
) -> tuple[bytes, list[int]]:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.register(wakeup.fd, select.POLLIN)
    while True:
        ready = dict(poll.poll(min(left_ms(end), POLL_MS_MAX)))
        if not ready and left_ms(end) == 0:
            raise KvdRefused("deadline_exceeded", what=f"the answer of {sockets.attach}")
        if wakeup.fd in ready:
            wakeup.clear()
            if is_closing():
                raise KvdRefused("closed")
        if sock.fileno() in ready:
            data, fds = receive(sock)
            if not data:
                close_all(fds)
                raise _unreachable(sockets, "it closed the connection")
            return data, fds


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one message and the descriptors that the caller owns now; b"" is the end.

    Raises:
        BlockingIOError: nothing is there.
        KvdRefused(frame_malformed): it was cut off; nothing of it is kept.
    """
    try:
        data, ancillary, flags, _ = sock.recvmsg(
            ATTACH_BYTES_MAX + 1,
            socket.CMSG_SPACE(FDS_MAX * _INT),
            socket.MSG_CMSG_CLOEXEC,
        )
    except ConnectionError:
        return b"", []
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.extend(array.array("i", payload[: len(payload) - len(payload) % _INT]))
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(fds)
        raise KvdRefused("frame_malformed", detail="a message of attach.sock was cut off")
    return data, fds


def close_all(fds: list[int]) -> None:
    """Close descriptors and forget their numbers."""
    while fds:
        os.close(fds.pop())


def decode_reply(data: bytes) -> AttachReply:
    """Read what attach.sock answered.

    Raises: KvdRefused: frame_malformed, or the refusal that it says.
    """
    try:
        reply = attach_reply_codec().decode(data)
    except FrameError as error:
        raise KvdRefused(error.code, **error.context) from error
    if isinstance(reply, Refused):
        raise KvdRefused(reply.code, **reply.context)
    return reply


def map_memory(fd: int, num_bytes: int) -> Mapping:
    """Map memory that kvd handed out, for writing unless the descriptor only reads.

    Raises: ValueError, OSError.
    """
    mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    return Mapping(fd, num_bytes, writable=mode == os.O_RDWR)


def file_of(fd: int) -> FileId:
    """Which file this is, among those that live: device and inode."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _accept(
    sock: socket.socket, reply: Attached, fds: list[int], identity: MemberIdentity
) -> Attachment:
    """Check and map what came; raises KvdRefused and keeps nothing when anything is off."""
    protocol = agree(reply.protocol, reply.protocol)
    if protocol is None:
        ours = f"{PROTOCOL_MIN}-{PROTOCOL}"
        raise KvdRefused("protocol_mismatch", theirs=reply.protocol, ours=ours)
    want = (2 if reply.gate_bytes else 0) + (1 if reply.pool_bytes else 0)
    detail = ""
    if len(fds) != want:
        detail = f"{len(fds)} descriptors came with an attach that names {want}"
    elif bool(reply.gate_bytes) != bool(identity.num_slots):
        detail = f"a gate page of {reply.gate_bytes} bytes for {identity.num_slots} slots"
    elif len(reply.token) != TOKEN_BYTES:
        detail = f"a token of {len(reply.token)} bytes"
    if detail:
        raise KvdRefused("frame_malformed", detail=detail)
    try:
        with ExitStack() as undo:
            gate = pool = None
            pool_file = (0, 0)
            if reply.gate_bytes:
                slots = identity.num_slots
                gate = GateView(fds[0], reply.gate_bytes, fds[1], sock.fileno(), slots)
                undo.callback(gate.close)
                if gate.boot_id != reply.boot_id:
                    raise ValueError("the gate page is of another life of kvd")
            if reply.pool_bytes:
                pool = map_memory(fds[-1], reply.pool_bytes)
                pool_file = file_of(fds[-1])
            undo.pop_all()
    except (ValueError, OSError) as error:
        raise KvdRefused("frame_malformed", detail=f"memory of attach.sock: {error}") from error
    return Attachment(sock, reply.boot_id, reply.token, gate, pool, pool_file)
