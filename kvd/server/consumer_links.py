"""Consumer's side of hand-offs: kvds that offer rows to our decode engines, and the copies.

One ROUTER for each port of each registered rank. A producer's hello is answered once this kvd has
attached to it as a reader (which proves to both who the other is); from then on offers come in,
and granted reads are copied by worker threads straight into the decode region.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import zmq

from kvd.core import effects as ef
from kvd.core import events as ev
from kvd.core.errors import KvdError, LocalError, PeerError
from kvd.core.ids import MemberRef, kvd_executor
from kvd.core.slot_events import BadSum
from kvd.core.transfer_types import SourceKind
from kvd.plan.layout import RegionLayout
from kvd.server import peer_translate as tr
from kvd.server.handshake import agreed
from kvd.server.host_identity import kernel_boot_id
from kvd.server.node import Node
from kvd.server.peer_ports import PeerPorts
from kvd.server.reader_attach import ReaderAttachment
from kvd.server.sessions import new_token
from kvd.server.zmq_pump import ZmqPump
from kvd.transfer import shm
from kvd.wire import peer_messages as pm
from kvd.wire.codec import FrameError, consumer_codec, producer_codec
from kvd.wire.protocol import PROTOCOL
from kvd.wire.slot_items import BadSumItem

PATH_CHARS_SHOWN: Final = 128
"""Of a path that a hello names, as much is repeated in an answer."""

COPY_THREADS: Final = 2
"""Copies that run at once; more do not move more bytes on a small host."""


@dataclass(slots=True)
class ConsumerLink:
    """A producer's kvd that we read from.

    peer:     its executor name, under which the core knows it.
    token:    what its frames must carry; `attachment.token` goes into ours.
    identity: its ZeroMQ routing id on `pump`.
    nonces:   of its hellos that an attach has proven; it says one on each of our ports.
    """

    peer: str
    boot_id: bytes
    token: bytes
    identity: bytes
    pump: ZmqPump
    attachment: ReaderAttachment
    last_heard: int
    nonces: set[bytes] = field(default_factory=set)
    broken: bool = False


class ConsumerLinks:
    """All producers' kvds, the ports that they reach us at, and the copy threads."""

    def __init__(self, node: Node, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """No port is bound before a member asks for one."""
        self._node = node
        self._decode = consumer_codec().decode
        self._encode = producer_codec().encode
        self.ports = PeerPorts(node, context, self._received)
        self._links: dict[str, ConsumerLink] = {}
        self._attaching: set[bytes] = set()
        self._running: set[asyncio.Future[int]] = set()
        self._closing = False
        self._copies = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="kvd-copy")
        self._attachers = ThreadPoolExecutor(1, thread_name_prefix="kvd-peer")
        node.on(ef.SendClaim, self._send_claim)
        node.on(ef.SendDecline, self._send_decline)
        node.on(ef.SendReadEnded, self._send_read_ended)
        node.on(ef.SendAnswer, self._send_answer)
        node.on(ef.StartCopy, self._start_copy)

    @property
    def links(self) -> list[ConsumerLink]:
        """Every link, for the status."""
        return list(self._links.values())

    async def drain(self, seconds: float) -> None:
        """Start nothing new, give what was granted so long to be copied, and wait for what runs.

        What had no turn in that time is dropped: its producer is told by the end of this process.
        """
        self._closing = True
        if self._running:
            await asyncio.wait(set(self._running), timeout=seconds)
        loop = asyncio.get_running_loop()
        for pool in (self._copies, self._attachers):
            await loop.run_in_executor(None, partial(pool.shutdown, cancel_futures=True))
        if self._running:
            await asyncio.wait(set(self._running))

    def close(self) -> None:
        """Stop listening and let go of the producers' memory; `drain` came first."""
        self.ports.close()
        loop = asyncio.get_running_loop()
        for link in self._links.values():
            if not link.broken:
                loop.remove_reader(link.attachment.socket.fileno())
        for link in self._links.values():
            link.attachment.close()
        self._links.clear()

    # Receiving --------------------------------------------------------------------------------

    def _received(self, pump: ZmqPump, parts: list[bytes]) -> None:
        node = self._node
        node.counters["peer_frames_received"] += 1
        if self._closing:
            return
        try:
            frame = self._decode(parts[1] if len(parts) == 2 else b"")
            if type(frame) is pm.PeerHello:
                self._hello(pump, parts[0], frame)
            else:
                self._handle(pump, parts[0], frame)
        except (FrameError, KvdError) as error:
            node.counters[f"peer_frames_refused_{error.code}"] += 1

    def _handle(self, pump: ZmqPump, identity: bytes, frame: pm.ToConsumer) -> None:
        link = self._links.get(kvd_executor(frame.boot_id.hex()))
        if link is None or link.token != frame.token or not frame.token:
            raise PeerError("unauthorized")
        node = self._node
        link.last_heard = node.now()
        link.identity, link.pump = identity, pump
        match frame:
            case pm.Offers(items=items):
                offers = [ev.OfferCame(link.peer, tr.offer_from(item)) for item in items]
                node.apply(*offers)
            case pm.Grant():
                source = tr.source_from(frame.source)
                read = tr.read_id(frame.read)
                node.apply(ev.GrantCame(link.peer, read, frame.claim, source))
            case pm.Revoke():
                node.apply(ev.RevokeCame(link.peer, tr.read_id(frame.read), frame.why))
            case pm.PeerQuery():
                ref, read = tr.slot_ref(frame.tenancy), tr.read_id(frame.read)
                node.apply(ev.QueryCame(link.peer, ref, read, frame.fence))
            case pm.MemberGone(engine=engine, member=member, incarnation=incarnation):
                gone = MemberRef(engine, member, incarnation)
                self._copies.submit(link.attachment.forget_member, gone)
            case _:
                pass

    # Handshake --------------------------------------------------------------------------------

    def _hello(self, pump: ZmqPump, identity: bytes, frame: pm.PeerHello) -> None:
        node = self._node
        try:
            agreed(frame.protocol_min, frame.protocol_max)
        except LocalError as error:
            self._refuse(pump, identity, error)
            return
        if frame.kernel_boot_id != kernel_boot_id():
            elsewhere = PeerError("peer_not_local", peer=frame.attach_path[:PATH_CHARS_SHOWN])
            self._refuse(pump, identity, elsewhere)
            return
        known = self._links.get(kvd_executor(frame.boot_id.hex()))
        if known is not None and frame.nonce in known.nonces:
            # It lost our answer (or reconnected): the same welcome again.
            self._welcome(known, pump, identity)
            return
        # Anybody can say a boot id. Only an attach with the nonce proves whose hello this is, also
        # of a kvd that is known already and reaches for another port.
        if frame.boot_id in self._attaching:
            return
        limit = node.config.limits.peers
        if len(self._links) + len(self._attaching) >= limit:
            self._refuse(pump, identity, LocalError("busy", what="peers", limit=limit))
            return
        self._attaching.add(frame.boot_id)
        token = new_token()
        timeout = node.config.peers.connect_timeout / 1e9
        future = asyncio.wrap_future(
            self._attachers.submit(
                ReaderAttachment, frame.attach_path, node.boot_id, frame.nonce, token, timeout
            )
        )
        future.add_done_callback(partial(self._attached, pump, identity, frame, token))

    def _attached(
        self,
        pump: ZmqPump,
        identity: bytes,
        frame: pm.PeerHello,
        token: bytes,
        future: asyncio.Future[ReaderAttachment],
    ) -> None:
        self._attaching.discard(frame.boot_id)
        if future.cancelled():
            return
        try:
            attachment = future.result()
        except PeerError as error:
            self._refuse(pump, identity, error)
            return
        if self._closing:
            attachment.close()
            return
        if attachment.boot_id != frame.boot_id:
            attachment.close()
            detail = "another kvd is there"
            other = PeerError("peer_refused", peer=frame.attach_path, detail=detail)
            self._refuse(pump, identity, other)
            return
        peer = kvd_executor(frame.boot_id.hex())
        link = self._links.get(peer)
        if link is not None:
            attachment.close()  # the first one has the memory mapped
        else:
            link = ConsumerLink(
                peer, frame.boot_id, token, identity, pump, attachment, self._node.now()
            )
            self._links[peer] = link
            fd = attachment.socket.fileno()
            asyncio.get_running_loop().add_reader(fd, self._peer_readable, link)
        link.nonces.add(frame.nonce)
        self._welcome(link, pump, identity)

    def _welcome(self, link: ConsumerLink, pump: ZmqPump, identity: bytes) -> None:
        link.identity, link.pump = identity, pump
        welcome = pm.PeerWelcome(link.attachment.token, self._node.boot_id, PROTOCOL, link.token)
        pump.send([identity, self._encode(welcome)])

    def _refuse(self, pump: ZmqPump, identity: bytes, error: KvdError) -> None:
        self._node.counters[f"peer_hellos_refused_{error.code}"] += 1
        frame = pm.PeerRefused(b"", self._node.boot_id, error.code, error.context)
        pump.send([identity, self._encode(frame)])

    def _peer_readable(self, link: ConsumerLink) -> None:
        """Nothing is said unasked on the attach connection: readable means that it has ended."""
        if link.attachment.has_ended():
            self._drop(link)

    def _drop(self, link: ConsumerLink) -> None:
        if link.broken:
            return
        link.broken = True
        asyncio.get_running_loop().remove_reader(link.attachment.socket.fileno())
        if self._closing:
            return  # `close` lets go of its memory
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
        self._copies.submit(link.attachment.close)
        self._node.apply_soon(ev.PeerLost(link.peer))

    # Sending ----------------------------------------------------------------------------------

    def _to(self, peer: str, make: Callable[[bytes, bytes], pm.ToProducer]) -> None:
        link = self._links.get(peer)
        if link is None:
            self._node.counters["peer_frames_dropped"] += 1
            return
        frame = make(link.attachment.token, self._node.boot_id)
        if not link.pump.send([link.identity, self._encode(frame)]):
            self._node.counters["peer_frames_dropped"] += 1

    def _send_claim(self, effect: ef.SendClaim) -> None:
        ref, read = tr.tenancy_name(effect.ref), tr.read_name(effect.read)
        self._to(effect.peer, lambda token, boot: pm.Claim(token, boot, ref, read, effect.claim))

    def _send_decline(self, effect: ef.SendDecline) -> None:
        ref, read = tr.tenancy_name(effect.ref), tr.read_name(effect.read)
        self._to(effect.peer, lambda token, boot: pm.Decline(token, boot, ref, read))

    def _send_read_ended(self, effect: ef.SendReadEnded) -> None:
        ref, read = tr.tenancy_name(effect.ref), tr.read_name(effect.read)
        bad = [BadSumItem(one.block, one.expected, one.got) for one in effect.bad]
        self._to(
            effect.peer, lambda token, boot: pm.ReadOver(token, boot, ref, read, effect.ok, bad)
        )

    def _send_answer(self, effect: ef.SendAnswer) -> None:
        ref, read = tr.tenancy_name(effect.ref), tr.read_name(effect.read)
        truth, fence = effect.truth.value, effect.fence
        self._to(
            effect.peer, lambda token, boot: pm.PeerAnswer(token, boot, ref, read, truth, fence)
        )

    # Copies -----------------------------------------------------------------------------------

    def _start_copy(self, effect: ef.StartCopy) -> None:
        """Copy in a worker; its end comes back as an event, whatever happens."""
        link = self._links.get(effect.peer)
        destination = self._destination(effect)
        if link is None or destination is None or self._closing:
            detail = "peer_gone" if link is None else "region_gone"
            self._node.apply_soon(ev.CopyEnded(effect.read, False, detail))
            return
        copy = partial(_copy, effect, link.attachment, destination)
        future = asyncio.wrap_future(self._copies.submit(copy))
        self._running.add(future)
        future.add_done_callback(partial(self._copied, effect, link.attachment))

    def _copied(
        self, effect: ef.StartCopy, attachment: ReaderAttachment, future: asyncio.Future[int]
    ) -> None:
        read = effect.read
        self._running.discard(future)
        if future.cancelled():
            return
        try:
            moved = future.result()
        except shm.SumsDiffer as error:
            self._node.counters["copies_failed"] += 1
            bad = tuple([BadSum(*one) for one in error.bad])
            self._node.apply(ev.CopyEnded(read, False, str(error)[:200], bad))
        except (PeerError, ValueError, IndexError, OverflowError) as error:
            self._node.counters["copies_failed"] += 1
            self._node.apply(ev.CopyEnded(read, False, str(error)[:200]))
        else:
            self._node.counters["copies_bytes"] += moved
            if effect.source.kind is SourceKind.POOL and attachment.has_ended():
                # Its pool outlives that kvd: the next one may have given the blocks away meanwhile.
                self._node.counters["copies_distrusted"] += 1
                self._node.apply(ev.CopyEnded(read, False, "peer_gone"))
            else:
                self._node.apply(ev.CopyEnded(read, True))

    def _destination(self, effect: ef.StartCopy) -> shm.Destination | None:
        node = self._node
        region = node.memory.region(effect.region)
        core = node.state.regions.get(effect.region)
        if region is None or core is None:
            return None
        spec = core.spec
        layout = RegionLayout(spec.num_layers, spec.num_blocks, spec.block_tokens, spec.row_bytes)
        residents = tuple(
            shm.ResidentMemory(session.device, session.resident)
            for session in node.sessions.members.values()
            if session.ref.engine == core.engine and session.device is not None and session.resident
        )
        first = effect.read.start - effect.read.start % spec.block_tokens
        return shm.Destination(region.mapping, layout, effect.blocks, first, residents)


def _copy(effect: ef.StartCopy, attachment: ReaderAttachment, destination: shm.Destination) -> int:
    """Copy one read; runs in a worker thread. Returns the bytes moved.

    Raises: PeerError, ValueError, IndexError, OverflowError: it cannot be copied as asked.
    """
    memory = attachment.memory_of(effect.source.ref.member)
    read = effect.read
    pieces = shm.plan_read(read.layer, read.start, effect.end, effect.source, memory, destination)
    return shm.copy(pieces)
