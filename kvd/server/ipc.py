"""engine.sock: requests of members, answered once each; questions to members.

A frame is checked in this order: size, shape, token, then the operation. Whatever is wrong with it
is answered with an `error` frame if its request number can be read, counted, and forgotten: the
next frame of the next client is not disturbed.

Slot events for whose answer nobody waits (`quiet`) are answered with the frame behind them, or a
moment later: an answer costs as much as the events, on either side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import zmq

from kvd.core import effects as ef
from kvd.core import events as ev
from kvd.core import results as res
from kvd.core.errors import KvdError, LocalError
from kvd.server import translate
from kvd.server.handshake import agreed
from kvd.server.hello_checks import about_of, check_hello, port_of, store_of
from kvd.server.node import Node
from kvd.server.peer_ports import PeerPorts
from kvd.server.sessions import MemberSession, Unsaid
from kvd.server.zmq_pump import ZmqPump
from kvd.wire import messages as msg
from kvd.wire.codec import FrameError, client_codec, request_no_of, server_codec

QUEUED_FRAMES_MAX: Final = 64
"""Frames of one client that wait to be looked at; it waits with the next."""

QUEUED_REPLIES_MAX: Final = 1000
"""Replies that wait for one client to read them; further ones are dropped and counted."""

QUIET_SECONDS: Final = 0.002
"""How long the answer to frames for which nobody waits may take."""

_MS: Final = 1_000_000


class EngineSocket:
    """The ROUTER that members talk to."""

    def __init__(self, node: Node, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        """Bind; nothing is received before `start`."""
        self._node = node
        limit = node.config.server.frame_size_max
        self._decode = client_codec(limit).decode
        self._encode = server_codec(1 << 62).encode
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Larger than the limit by so much that a refusal can still be answered; beyond it the
        # connection is cut before memory is taken.
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * limit)
        socket.setsockopt(zmq.RCVHWM, QUEUED_FRAMES_MAX)
        socket.setsockopt(zmq.SNDHWM, QUEUED_REPLIES_MAX)
        for uid in node.allowed_uids:
            # Of other users' processes not even the handshake is read.
            socket.setsockopt(zmq.IPC_FILTER_UID, uid)
        socket.bind(f"ipc://{path}")
        self._pump = ZmqPump(socket, self._received, node.meter)
        self._operations: Final[dict[type, Callable[[MemberSession, int, Any], None]]] = {
            msg.Events: self._events,
            msg.Lookup: self._lookup,
            msg.Reserve: self._reserve,
            msg.Commit: self._commit,
            msg.Unpin: self._unpin,
            msg.Abort: self._abort,
            msg.Renew: self._renew,
            msg.Poison: self._poison,
            msg.Answer: self._answer,
            msg.RegionCreate: self._region_create,
            msg.RegionDestroy: self._region_destroy,
            msg.Allocated: self._allocated,
            msg.Expect: self._expect,
            msg.AwaitTransfer: self._await_transfer,
            msg.DropTransfer: self._drop_transfer,
            msg.Stats: self._stats,
            msg.Goodbye: self._goodbye,
        }
        node.on(ef.AskMember, self._ask_member)
        self.ports: PeerPorts | None = None

    def start(self) -> None:
        """Receive."""
        self._pump.start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._pump.close()

    # Receiving --------------------------------------------------------------------------------

    def _received(self, parts: list[bytes]) -> None:
        node = self._node
        node.counters["frames_received"] += 1
        identity = parts[0]
        try:
            if len(parts) != 2:
                detail = f"{len(parts) - 1} parts, not 1"
                raise FrameError("frame_malformed", {"detail": detail}, request_no_of(parts[-1]))
            frame = self._decode(parts[1])
        except FrameError as error:
            self._refuse(identity, error.request_no, KvdError(error.code, **error.context))
            return
        try:
            self._dispatch(identity, frame)
        except KvdError as error:
            self._refuse(identity, frame.request_no, error)

    def _dispatch(self, identity: bytes, frame: msg.ClientFrame) -> None:
        node = self._node
        session = node.sessions.member(frame.token)
        if session is None:
            raise LocalError("unauthorized")
        session.identity = identity
        session.last_heard = node.now()
        if type(frame) is msg.Hello:
            self._hello(session, frame)
            return
        if not node.is_ready:
            raise not_ready(node)
        if not session.said_hello:
            raise LocalError("engine_unknown", engine=session.ref.engine)
        number = frame.request_no
        if type(frame) is msg.Events:
            handle = node.replies.expect(lambda result: self._seen(session, frame, result))
        else:
            handle = node.replies.expect(lambda result: self._answered(identity, number, result))
        try:
            self._operations[type(frame)](session, handle, frame)
        except KvdError as error:
            node.replies.refuse(handle, error)

    def _answered(self, identity: bytes, number: int, result: res.Result | KvdError) -> None:
        if isinstance(result, KvdError):
            self._refuse(identity, number, result)
        else:
            frame = translate.reply_frame(number, self._node.boot_id, result)
            self._send(identity, frame)

    def _seen(
        self, session: MemberSession, frame: msg.Events, result: res.Result | KvdError
    ) -> None:
        """Answer slot events; quiet ones with the next that are not, or in a moment."""
        if not isinstance(result, res.SlotsSeen):
            self._answered(session.identity, frame.request_no, result)
            return
        unsaid, session.unsaid = session.unsaid, None
        since = -1 if unsaid is None else min(unsaid.since, frame.first_no)
        if frame.quiet and not result.codes:
            first_no = frame.first_no if unsaid is None else since
            session.unsaid = Unsaid(frame.request_no, first_no, result.next_no)
            if unsaid is None:
                asyncio.get_running_loop().call_later(QUIET_SECONDS, self._say, session)
            return
        self._send_seen(session, frame.request_no, result.next_no, result.codes, since)

    def _send_seen(
        self,
        session: MemberSession,
        number: int,
        next_no: int,
        codes: tuple[str, ...],
        since: int,
    ) -> None:
        frame = msg.Seen(number, self._node.boot_id, next_no, list(codes), since)
        self._send(session.identity, frame)

    def _say(self, session: MemberSession) -> None:
        """Nothing came that the answer to quiet frames could go with."""
        unsaid, session.unsaid = session.unsaid, None
        if unsaid is not None and self._node.sessions.members.get(session.ref) is session:
            self._send_seen(session, unsaid.number, unsaid.next_no, (), unsaid.since)

    def _refuse(self, identity: bytes, number: int, error: KvdError) -> None:
        node = self._node
        node.counters[f"frames_refused_{error.code}"] += 1
        self._send(identity, translate.error_frame(number, node.boot_id, error))

    def _send(self, identity: bytes, frame: msg.ServerFrame) -> None:
        """Send without waiting; a receiver that is gone or does not read will ask again."""
        if not self._pump.send([identity, self._encode(frame)]):
            self._node.counters["replies_dropped"] += 1

    # Sessions ---------------------------------------------------------------------------------

    def _hello(self, session: MemberSession, frame: msg.Hello) -> None:
        node = self._node
        protocol = agreed(frame.protocol_min, frame.protocol_max)
        if not node.is_ready:
            raise not_ready(node)
        check_hello(session, frame, node.config)
        store = store_of(session, frame, node.config)
        event = translate.joined(0, session.ref, session.pid, session.num_slots, frame)
        port = port_of(frame)
        ports = self.ports
        port_before = ports.take(session.ref, port) if ports is not None else 0
        identity, number = session.identity, frame.request_no

        def answered(result: res.Result | KvdError) -> None:
            if isinstance(result, KvdError):
                if ports is not None:
                    ports.take(session.ref, port_before)
                self._refuse(identity, number, result)
                return
            assert isinstance(result, res.Joined)
            session.said_hello = True
            session.layout = frame.layout
            session.device_layout = frame.device
            session.resident = tuple(frame.resident)
            session.kv_port = port
            session.store, session.about = store, about_of(frame)
            self._send(identity, self._hello_ok(number, protocol, result))

        node.apply(replace(event, reply=node.replies.expect(answered)))

    def _hello_ok(self, number: int, protocol: int, result: res.Joined) -> msg.HelloOk:
        node = self._node
        return msg.HelloOk(
            number,
            node.boot_id,
            protocol,
            result.num_blocks,
            result.block_stride,
            list(result.epochs),
            result.next_no,
            node.config.server.frame_size_max,
            node.config.limits.batch_items,
            node.config.pool.checksums,
        )

    def _goodbye(self, session: MemberSession, handle: int, frame: msg.Goodbye) -> None:
        node = self._node
        node.replies.answer(handle, res.Done())
        node.apply(ev.MemberDied(session.ref, "goodbye"))

    def _stats(self, session: MemberSession, handle: int, frame: msg.Stats) -> None:
        if len(frame.values) > STATS_MAX:
            raise LocalError("busy", what="statistics of a member", limit=STATS_MAX)
        if len(session.stats) + len(frame.values) > 4 * STATS_MAX:
            session.stats.clear()
        session.stats.update(frame.values)
        session.hot = frame.layers, frame.requests
        self._node.replies.answer(handle, res.Done())

    # Requests ---------------------------------------------------------------------------------

    def _events(self, session: MemberSession, handle: int, frame: msg.Events) -> None:
        self._check_life(session, frame.boot_id, frame.incarnation)
        items = translate.slot_events(session.ref, frame.items)
        self._node.apply(ev.SlotsChanged(handle, session.ref, frame.first_no, items))

    def _check_life(self, session: MemberSession, boot_id: bytes, incarnation: int) -> None:
        """R4: what belongs to another life of kvd or of the member is refused, and counted."""
        if boot_id != self._node.boot_id:
            raise LocalError("stale_boot")
        if incarnation != session.ref.incarnation:
            raise LocalError("stale_incarnation", member=session.ref)

    def _lookup(self, session: MemberSession, handle: int, frame: msg.Lookup) -> None:
        event = ev.LookedUp(handle, session.ref, frame.request, frame.hashes, frame.pin)
        self._node.apply(event)

    def _reserve(self, session: MemberSession, handle: int, frame: msg.Reserve) -> None:
        self._node.apply(ev.Reserved(handle, session.ref, frame.request, frame.count))

    def _commit(self, session: MemberSession, handle: int, frame: msg.Commit) -> None:
        items = translate.commit_items(frame)
        self._node.apply(ev.Committed(handle, session.ref, items))

    def _unpin(self, session: MemberSession, handle: int, frame: msg.Unpin) -> None:
        blocks = tuple(frame.blocks) if frame.blocks is not None else None
        self._node.apply(ev.RequestEnded(handle, session.ref, frame.request, blocks))

    def _abort(self, session: MemberSession, handle: int, frame: msg.Abort) -> None:
        event = ev.RequestEnded(handle, session.ref, frame.request, None, aborted=True)
        self._node.apply(event)

    def _renew(self, session: MemberSession, handle: int, frame: msg.Renew) -> None:
        self._node.apply(ev.Renewed(handle, session.ref, frame.request))

    def _poison(self, session: MemberSession, handle: int, frame: msg.Poison) -> None:
        self._node.apply(ev.BlocksPoisoned(handle, session.ref, tuple(frame.blocks)))

    def _answer(self, session: MemberSession, handle: int, frame: msg.Answer) -> None:
        self._check_life(session, frame.boot_id, frame.incarnation)
        event = translate.answer(session.ref, frame)
        self._node.replies.answer(handle, res.Done())
        self._node.apply(event)

    def _region_create(self, session: MemberSession, handle: int, frame: msg.RegionCreate) -> None:
        spec = ev.RegionSpec(
            frame.num_layers, frame.num_blocks, frame.block_tokens, frame.row_bytes
        )
        self._node.apply(ev.RegionAsked(handle, session.ref, frame.region, spec))

    def _region_destroy(
        self, session: MemberSession, handle: int, frame: msg.RegionDestroy
    ) -> None:
        self._node.apply(ev.RegionDropped(handle, session.ref, frame.region))

    def _allocated(self, session: MemberSession, handle: int, frame: msg.Allocated) -> None:
        blocks = tuple(frame.blocks)
        self._node.apply(ev.BlocksAllocated(handle, session.ref, frame.region, blocks))

    def _expect(self, session: MemberSession, handle: int, frame: msg.Expect) -> None:
        node = self._node
        limits = node.state.settings.limits
        limits.check("blocks of a request", len(frame.blocks), "blocks_per_request")
        lifetime = min(frame.lifetime_ms * _MS, node.config.peers.transfer_deadline)
        event = ev.TransferExpected(
            handle,
            session.ref,
            frame.transfer,
            frame.region,
            tuple(frame.blocks),
            frame.tokens,
            frame.num_layers,
            node.now() + lifetime,
        )
        node.apply(event)

    def _await_transfer(
        self, session: MemberSession, handle: int, frame: msg.AwaitTransfer
    ) -> None:
        node = self._node
        longest = node.config.peers.transfer_deadline
        deadline = node.now() + min(frame.deadline_ms_left * _MS, longest)
        node.apply(ev.TransferAwaited(handle, session.ref, frame.transfer, deadline))

    def _drop_transfer(self, session: MemberSession, handle: int, frame: msg.DropTransfer) -> None:
        event = ev.TransferDropped(handle, session.ref, frame.transfer, frame.peer)
        self._node.apply(event)

    # Questions --------------------------------------------------------------------------------

    def _ask_member(self, effect: ef.AskMember) -> None:
        session = self._node.sessions.members.get(effect.member)
        if session is not None and session.identity:
            self._send(session.identity, translate.query_frame(self._node.boot_id, effect))


STATS_MAX: Final = 512
"""Figures that one member may show."""


def not_ready(node: Node) -> LocalError:
    """The refusal of everything while kvd starts or stops."""
    if node.is_stopping:
        return LocalError("stopping")
    pool = node.memory.pool
    percent = 100 * node.memory.populated // pool.size if pool is not None and pool.size else 0
    return LocalError("starting", percent=percent)
