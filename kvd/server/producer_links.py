"""Producer's side of hand-offs: links to the kvds that read for decode engines.

One DEALER for each address that a transfer names. A link says hello, waits until the other kvd
has attached as a reader with the hello's nonce, and then carries offers and grants. What cannot be
sent is dropped: the machine offers and asks again.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq

from kvd.core import effects as ef
from kvd.core import events as ev
from kvd.core.errors import PeerError
from kvd.core.holds import HoldKind
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
            link.pump.close()
        self._links.clear()

    # Sending ----------------------------------------------------------------------------------

    def _send_offer(self, effect: ef.SendOffer) -> None:
        link = self._link(effect.address)
        if link is not None and link.state == "ready":
            self._send(link, pm.Offers(link.token, self._boot, [tr.offer_item(effect.offer)]))

    def _send_grant(self, effect: ef.SendGrant) -> None:
        link = self._by_executor(effect.executor)
        if link is not None:
            source = tr.source_item(effect.source)
            name = tr.read_name(effect.read)
            self._send(link, pm.Grant(link.token, self._boot, name, effect.claim, source))

    def _send_revoke(self, effect: ef.SendRevoke) -> None:
        link = self._by_executor(effect.to)
        if link is None and not effect.to.startswith("kvd"):
            link = self._link(effect.to)
        if link is None:
            return
        if link.state == "ready":
            name = tr.read_name(effect.read)
            self._send(link, pm.Revoke(link.token, self._boot, name, effect.why))
        elif len(link.revokes) < REVOKES_KEPT:
            link.revokes.append(effect)

    def _send_query(self, effect: ef.SendQuery) -> None:
        """Ask the executor; who cannot be asked about a fence cannot be fenced."""
        link = self._by_executor(effect.executor)
        if link is None and effect.executor.startswith("kvd@"):
            link = self._link(effect.executor.removeprefix("kvd@"))
        if link is not None and link.state == "ready":
            frame = pm.PeerQuery(
                link.token,
                self._boot,
                tr.tenancy_name(effect.ref),
                tr.read_name(effect.read),
                effect.fence,
            )
            self._send(link, frame)
        elif effect.fence:
            event = ev.FenceEnded(effect.ref, HoldKind.READ, effect.read, stopped=False)
            self._node.apply_soon(event)

    def _member_gone(self, session: MemberSession) -> None:
        """Whoever mapped the member's slots can let them go."""
        for link in self._links.values():
            if link.state == "ready":
                self._send(link, pm.MemberGone(link.token, self._boot, *session.ref))

    def _send(self, link: ProducerLink, frame: pm.ToConsumer) -> None:
        if not link.pump.send([self._encode(frame)]):
            self._node.counters["peer_frames_dropped"] += 1

    @property
    def _boot(self) -> bytes:
        return self._node.boot_id

    # Links ------------------------------------------------------------------------------------

    def _by_executor(self, executor: str) -> ProducerLink | None:
        for link in self._links.values():
            if link.executor == executor and link.state == "ready":
                return link
        return None

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
        if link.state != "ready" and now - link.hello_at >= HELLO_INTERVAL:
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
        """Whether one more link may be made: one that nobody answers on gives way to it."""
        if len(self._links) < self._node.config.limits.peers:
            return True
        idle = [link for link in self._links.values() if not self._is_answered(link)]
        if not idle:
            return False
        oldest = min(idle, key=lambda link: link.hello_at)
        self._attach.nonces.pop(oldest.nonce, None)
        oldest.pump.close()
        del self._links[oldest.address]
        return True

    def _is_answered(self, link: ProducerLink) -> bool:
        return link.state == "ready" and link.executor in self._node.sessions.readers

    def _hello(self, link: ProducerLink, now: int) -> None:
        link.hello_at = now
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
        self._send(link, hello)

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
                node.apply(ev.EndCame(reader.executor, ref, read, frame.ok))
            case pm.PeerAnswer():
                ref, read = tr.slot_ref(frame.tenancy), tr.read_id(frame.read)
                truth = tr.truth_from(frame.truth)
                event = ev.ReadAnswered(
                    reader.executor, link.address, ref, read, truth, frame.fence
                )
                node.apply(event)
            case pm.Ping():
                pass
