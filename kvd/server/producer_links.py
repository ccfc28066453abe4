"""Producer's side of hand-offs: links to the kvds that read for decode engines.

One DEALER for each address that a transfer names. A link says hello, waits until the other kvd
has attached as a reader with the hello's nonce, and then carries offers and grants. What cannot be
sent is dropped: the machine offers and asks again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq

from kvd.core import effects as ef
from kvd.core import events as ev
from kvd.core.errors import PeerError
from kvd.core.holds import HoldKind
from kvd.core.slot_events import BadSum
from kvd.server import peer_translate as tr
from kvd.server.attach_socket import AttachSocket
from kvd.server.host_identity import kernel_boot_id
from kvd.server.node import Node
from kvd.server.sessions import MemberSession
from kvd.server.zmq_pump import ZmqPump
from kvd.wire import peer_messages as pm
from kvd.wire.codec import FrameError, consumer_codec, producer_codec
from kvd.wire.protocol import FRAME_BYTES_MAX, PROTOCOL, PROTOCOL_MIN

REVOKES_KEPT: Final = 1024
HELLO_INTERVAL: Final = 500_000_000
"""How often an unanswered hello is repeated, ns."""

CONNECT_POLL: Final = 0.01
"""How often it is tried whether a new connection takes its hello, seconds."""

CODE_CHARS_SHOWN: Final = 64
"""Of what a peer gives as its reason, as much is shown in the status."""


@dataclass(slots=True)
class ProducerLink:
    """One link. state: 'connecting', 'ready' or 'refused'."""

    address: str
    pump: ZmqPump
    nonce: bytes
    state: str = "connecting"
    executor: str = ""
    token: bytes = b""
    error: str = ""
    hello_at: int = 0
    hello_due: int = 0
    retry: asyncio.TimerHandle | None = None
    last_heard: int = 0
    revokes: list[ef.SendRevoke] = field(default_factory=list)
    """Revocations that wait for the link: nobody repeats them, unlike offers."""


class ProducerLinks:
    """All links to kvds that read from this one."""

    def __init__(
        self,
        node: Node,
        context: zmq.Context[zmq.Socket[bytes]],
        attach_socket: AttachSocket,
        attach_path: Path,
    ) -> None:
        """No link yet; one is made for each address when the first offer goes there."""
        self._node = node
        self._context = context
        self._attach = attach_socket
        self._attach_path = str(attach_path)
        self._encode = consumer_codec().encode
        self._decode = producer_codec().decode
        self._links: dict[str, ProducerLink] = {}
        node.on(ef.SendOffer, self._send_offer)
        node.on(ef.SendGrant, self._send_grant)
        node.on(ef.SendRevoke, self._send_revoke)
        node.on(ef.SendQuery, self._send_query)
        node.on_forgotten.append(self._member_gone)

    @property
    def links(self) -> list[ProducerLink]:
        """Every link, for the status."""
        return list(self._links.values())

    def close(self) -> None:
        """Drop all links."""
        for link in self._links.values():
            _close(link)
        self._links.clear()

    # Sending ----------------------------------------------------------------------------------

    def _send_offer(self, effect: ef.SendOffer) -> None:
        link = self._link(effect.address)
        if link is not None and link.state == "ready":
            self._send(link, pm.Offers(link.token, self._boot, [tr.offer_item(effect.offer)]))

    def _send_grant(self, effect: ef.SendGrant) -> None:
        source, name = tr.source_item(effect.source), tr.read_name(effect.read)
        self._send_any(
            self._routes(effect.executor),
            lambda token: pm.Grant(token, self._boot, name, effect.claim, source),
        )

    def _send_revoke(self, effect: ef.SendRevoke) -> None:
        name = tr.read_name(effect.read)

        def frame(token: bytes) -> pm.ToConsumer:
            return pm.Revoke(token, self._boot, name, effect.why)

        routes = self._routes(effect.to)
        if routes or effect.to.startswith("kvd"):
            self._send_any(routes, frame)
            return
        link = self._link(effect.to)
        if link is None:
            return
        if link.state == "ready":
            self._send_any([link], frame)
        elif len(link.revokes) < REVOKES_KEPT:
            link.revokes.append(effect)

    def _send_query(self, effect: ef.SendQuery) -> None:
        """Ask the executor; who cannot be asked about a fence cannot be fenced."""
        routes = self._routes(effect.executor)
        if not routes and effect.executor.startswith("kvd@"):
            link = self._link(effect.executor.removeprefix("kvd@"))
            routes = [link] if link is not None and link.state == "ready" else []
        if routes:
            ref, name = tr.tenancy_name(effect.ref), tr.read_name(effect.read)
            self._send_any(
                routes, lambda token: pm.PeerQuery(token, self._boot, ref, name, effect.fence)
            )
        elif effect.fence:
            event = ev.FenceEnded(effect.ref, HoldKind.READ, effect.read, stopped=False)
            self._node.apply_soon(event)

    def _member_gone(self, session: MemberSession) -> None:
        """Whoever mapped the member's slots can let them go."""
        for link in self._links.values():
            if link.state == "ready":
                self._send(link, pm.MemberGone(link.token, self._boot, *session.ref))

    def _send(self, link: ProducerLink, frame: pm.ToConsumer) -> None:
        self._send_any([link], lambda _: frame)

    def _send_any(self, routes: list[ProducerLink], make: Callable[[bytes], pm.ToConsumer]) -> None:
        """Send by the first link that is connected; `make` gets the token that goes into it."""
        for link in routes:
            if link.pump.send([self._encode(make(link.token))]):
                return
        self._node.counters["peer_frames_dropped"] += 1

    @property
    def _boot(self) -> bytes:
        return self._node.boot_id

    # Links ------------------------------------------------------------------------------------

    def _routes(self, executor: str) -> list[ProducerLink]:
        """Links to a kvd: it may have several ports, and leave those that no engine uses."""
        found = [
            link
            for link in self._links.values()
            if link.executor == executor and link.state == "ready"
        ]
        return sorted(found, key=lambda link: link.last_heard, reverse=True)

    def _link(self, address: str) -> ProducerLink | None:
        """The link to an address, made or greeted again when it is time."""
        link = self._links.get(address)
        if link is None:
            link = self._connect(address)
            if link is None:
                return None
        if link.state == "ready" and not self._is_answered(link):
            # The kvd that answered has ended; whoever listens there now must introduce itself.
            self._forget_answer(link)
        now = self._node.now()
        is_due = now - link.hello_at >= HELLO_INTERVAL and link.retry is None
        if link.state != "ready" and is_due:
            self._hello(link, now)
        return link

    def _connect(self, address: str) -> ProducerLink | None:
        if not self._make_room():
            self._node.counters["peer_links_refused"] += 1
            return None
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, self._node.config.peers.connect_timeout // 1_000_000)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.SNDHWM, 1000)
        socket.setsockopt(zmq.RCVHWM, 1000)
        # What cannot be sent now goes another way, or again: it must not wait for a dead port.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        if address.startswith("["):
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.connect(f"tcp://{address}")
        except zmq.ZMQError:
            socket.close(linger=0)
            self._node.counters["peer_addresses_bad"] += 1
            return None
        nonce = secrets.token_bytes(16)
        pump = ZmqPump(socket, lambda parts: self._received(address, parts), self._node.meter)
        link = ProducerLink(address, pump, nonce)
        self._links[address] = link
        pump.start()
        return link

    def _make_room(self) -> bool:
        """Whether one more link may be made: one that nothing is offered on gives way to it.

        Peers' ports come and go with their engines; a link that is needed again is made again.
        """
        if len(self._links) < self._node.config.limits.peers:
            return True
        offered = {
            read.spec.peer
            for transfer in self._node.state.outgoing.values()
            for read in transfer.open.values()
        }
        idle = [
            link
            for link in self._links.values()
            if link.address not in offered or not self._is_answered(link)
        ]
        if not idle:
            return False
        oldest = min(idle, key=lambda link: max(link.hello_at, link.last_heard))
        self._attach.nonces.pop(oldest.nonce, None)
        _close(oldest)
        del self._links[oldest.address]
        return True

    def _is_answered(self, link: ProducerLink) -> bool:
        return link.state == "ready" and link.executor in self._node.sessions.readers

    def _hello(self, link: ProducerLink, now: int) -> None:
        """Introduce ourselves, as soon as the connection is there."""
        self._attach.nonces[link.nonce] = link.address
        hello = pm.PeerHello(
            b"",
            self._boot,
            PROTOCOL_MIN,
            PROTOCOL,
            kernel_boot_id(),
            self._attach_path,
            link.nonce,
        )
        if link.pump.send([self._encode(hello)]):
            link.hello_at, link.hello_due = now, 0
            return
        link.hello_due = link.hello_due or now + self._node.config.peers.connect_timeout
        if now < link.hello_due:
            loop = asyncio.get_running_loop()
            link.retry = loop.call_later(CONNECT_POLL, self._hello_again, link)
        else:
            link.hello_at, link.hello_due = now, 0

    def _hello_again(self, link: ProducerLink) -> None:
        link.retry = None
        if link.state != "ready":
            self._hello(link, self._node.now())

    def _forget_answer(self, link: ProducerLink) -> None:
        self._attach.nonces.pop(link.nonce, None)
        link.state, link.executor, link.token = "connecting", "", b""
        link.nonce = secrets.token_bytes(16)

    # Receiving --------------------------------------------------------------------------------

    def _received(self, address: str, parts: list[bytes]) -> None:
        link = self._links[address]
        node = self._node
        node.counters["peer_frames_received"] += 1
        try:
            frame = self._decode(parts[0] if len(parts) == 1 else b"")
            self._handle(link, frame)
        except FrameError as error:
            node.counters[f"peer_frames_refused_{error.code}"] += 1
        except PeerError as error:
            node.counters[f"peer_frames_refused_{error.code}"] += 1

    def _handle(self, link: ProducerLink, frame: pm.ToProducer) -> None:
        node = self._node
        if type(frame) is pm.PeerRefused:
            link.state, link.error = "refused", frame.code[:CODE_CHARS_SHOWN]
            return
        reader = node.sessions.reader(frame.token)
        if reader is None:
            raise PeerError("unauthorized")
        link.last_heard = reader.last_heard = node.now()
        match frame:
            case pm.PeerWelcome():
                link.state, link.executor, link.error = "ready", reader.executor, ""
                link.token = reader.send_token
                waiting, link.revokes = link.revokes, []
                for effect in waiting:
                    self._send_revoke(effect)
            case pm.Claim():
                ref, read = tr.slot_ref(frame.tenancy), tr.read_id(frame.read)
                node.apply(ev.ClaimCame(reader.executor, ref, read, frame.claim))
            case pm.Decline():
                ref, read = tr.slot_ref(frame.tenancy), tr.read_id(frame.read)
                node.apply(ev.DeclineCame(reader.executor, ref, read))
            case pm.ReadOver():
                ref, read = tr.slot_ref(frame.tenancy), tr.read_id(frame.read)
                bad = tuple([BadSum(one.block, one.expected, one.got) for one in frame.bad])
                ended = ev.EndCame(reader.executor, ref, read, frame.ok and not bad, bad)
                node.apply(ended)
            case pm.PeerAnswer():
                ref, read = tr.slot_ref(frame.tenancy), tr.read_id(frame.read)
                truth = tr.truth_from(frame.truth)
                event = ev.ReadAnswered(
                    reader.executor, link.address, ref, read, truth, frame.fence
                )
                node.apply(event)
            case pm.Ping():
                pass


def _close(link: ProducerLink) -> None:
    if link.retry is not None:
        link.retry.cancel()
    link.pump.close()
