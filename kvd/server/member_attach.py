"""A member that attaches: what it says and passes is checked and mapped, or nothing is kept."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import ExitStack

from kvd.core.errors import LocalError
from kvd.core.ids import MemberRef
from kvd.memory.gate_page import GatePage
from kvd.server.node import Node
from kvd.server.peer_credentials import Credentials
from kvd.server.sessions import MemberSession, new_token
from kvd.wire import attach
from kvd_kernels.host import Mapping


def check_member(node: Node, message: attach.AttachMember) -> MemberRef:
    """Whether this life of a member may have a session, as far as the books tell.

    Raises: LocalError(limit_reached | stale_incarnation | slot_unknown).
    """
    settings = node.state.settings
    settings.limits.check("slots", message.num_slots, "slots_per_member")
    ref = MemberRef(message.engine, message.member, message.incarnation)
    known = node.state.members.get(ref)
    if known is not None and known.leaving:
        raise LocalError("stale_incarnation", member=ref)
    if known is not None and len(known.slots) != message.num_slots:
        # The books are about all its slots: a page for fewer could not show them.
        raise LocalError("slot_unknown", slot=message.num_slots, count=len(known.slots), member=ref)
    return ref


def check_process(node: Node, ref: MemberRef, credentials: Credentials) -> None:
    """One life of a member is one process: another one that says the same name is not it.

    Raises: LocalError(engine_busy).
    """
    old = node.sessions.members.get(ref)
    if old is not None and old.pid != credentials.pid:
        raise LocalError("engine_busy", member=ref.member, engine=ref.engine, pid=old.pid)


def make_session(
    node: Node,
    ref: MemberRef,
    message: attach.AttachMember,
    connection: socket.socket,
    process: tuple[Credentials, int],
    device_fd: int,
) -> MemberSession:
    """Map what the member passed and make its gate page.

    Args:
        process: credentials and pidfd; the pidfd and device_fd belong to the session once this
            returns, and stay the caller's when it raises.
        device_fd: its slot memory, -1 for none.

    Raises: LocalError(frame_malformed): memory that is none, or less than was announced;
        LocalError(memory_short): no gate page;
        OSError: no descriptor is left.
    """
    credentials, pidfd = process
    now = node.now()
    session = MemberSession(
        new_token(),
        credentials.pid,
        credentials.uid,
        pidfd,
        connection,
        now,
        now,
        ref,
        num_slots=message.num_slots,
    )
    with ExitStack() as undo:
        if device_fd >= 0:
            session.device = _map_device(device_fd, message.device_bytes)
            undo.callback(session.device.close)
        if message.num_slots:
            session.page = GatePage(message.num_slots, node.boot_id)
            undo.callback(session.page.close)
            session.event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        undo.pop_all()
    session.device_fd = device_fd
    return session


def answer(node: Node, session: MemberSession, protocol: int) -> tuple[attach.Attached, list[int]]:
    """What the member gets: its token, and its page, wake-ups and the pool as descriptors."""
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


def mapped(
    node: Node, session: MemberSession, message: attach.MapRegion | attach.MapSums
) -> tuple[attach.Mapped, list[int]]:
    """More memory that a member asked for: a decode region of its engine, or checksums.

    Raises: LocalError(region_unknown).
    """
    if isinstance(message, attach.MapSums):
        sums = node.memory.sums.area
        if sums is None:
            raise LocalError("region_unknown", region="checksums of the pool")
        return attach.Mapped(sums.size), [sums.fd]
    core = node.state.regions.get(message.region)
    region = node.memory.region(message.region)
    if core is None or region is None or core.engine != session.ref.engine or core.dropped:
        raise LocalError("region_unknown", region=message.region)
    return attach.Mapped(region.size), [region.fd]


def _map_device(device_fd: int, num_bytes: int) -> Mapping:
    """Map a member's slot memory, after making sure that nobody can cut it short: reading what is
    not there any more would kill this process.

    Raises: LocalError(frame_malformed) for a file that is no memfd, forbids seals, or is smaller.
    """
    try:
        if not fcntl.fcntl(device_fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            fcntl.fcntl(device_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except OSError as error:
        detail = f"device memory must be a memfd that allows seals: {error.strerror}"
        raise LocalError("frame_malformed", detail=detail) from error
    try:
        return Mapping(device_fd, num_bytes, writable=True)
    except (ValueError, OSError) as error:
        raise LocalError("frame_malformed", detail=f"device memory: {error}") from error
