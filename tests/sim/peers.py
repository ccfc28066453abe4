"""The network side of one kvd: handshakes, who lives at an address, frames to and from peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core import effects as fx
from kvd.core import events as ev
from kvd.core.holds import HoldKind
from kvd.core.ids import kvd_executor
from tests.sim.clock import MS

if TYPE_CHECKING:
    from tests.sim.node import Node


class Peers:
    """Frames carry both boot ids: one from or for another life than the known one is dropped."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._boots: dict[str, int] = {}

    def start(self) -> None:
        """A new life: shake hands with everybody, oneself at once."""
        node = self._node
        self._boots = {node.address: node.boot}
        for other in node.world.nodes.values():
            if other is not node:
                self._greet(other, node.boot)

    def _greet(self, other: Node, boot: int) -> None:
        """Hello until it is heard: a handshake runs over a connection."""
        node, world = self._node, self._node.world
        if boot != node.boot or node.machine is None:
            return
        delay = world.rng.randint(1, 30 * MS)
        cut = world.links.is_cut(node.address, other.address)
        if other.machine is None or cut or world.links.is_cut(other.address, node.address):
            world.clock.at(delay, self._greet, other, boot)
            return
        world.clock.at(delay, other.peers.hello, node, boot)
        world.clock.at(delay, self.hello, other, other.boot)

    def hello(self, other: Node, boot: int) -> None:
        """The other kvd lives as `boot`; an earlier life of it is thereby proven dead."""
        node = self._node
        known = self._boots.get(other.address)
        if node.machine is None or (known is not None and known >= boot):
            return
        self._boots[other.address] = boot
        if known is not None:
            name = kvd_executor(f"{other.address}.{known}")
            events: list[ev.Event] = [ev.PeerLost(name), ev.ExecutorLost(name)]
            node.world.rng.shuffle(events)
            for event in events:
                node.handle(event)

    # Sending ---------------------------------------------------------------------------------

    def send(self, effect: fx.Effect) -> None:
        """Put an effect for a peer on the wire, as the event that it is at the other end."""
        node = self._node
        executor = node.executor
        match effect:
            case fx.SendOffer(address, offer):
                node.check_rows(offer.read, offer.source)
                self._frame(address, ev.OfferCame(executor, offer))
            case fx.SendGrant(to, read, claim, source):
                node.check_rows(read, source)
                self._frame(to, ev.GrantCame(executor, read, claim, source))
            case fx.SendRevoke(to, read, why):
                self._frame(to, ev.RevokeCame(executor, read, why))
            case fx.SendClaim(peer, ref, read, claim):
                self._frame(peer, ev.ClaimCame(executor, ref, read, claim))
            case fx.SendDecline(peer, ref, read):
                self._frame(peer, ev.DeclineCame(executor, ref, read))
            case fx.SendReadEnded(peer, ref, read, ok):
                self._frame(peer, ev.EndCame(executor, ref, read, ok))
            case fx.SendAnswer(peer, ref, read, truth, fence):
                answer = ev.ReadAnswered(executor, node.address, ref, read, truth, fence)
                self._frame(peer, answer)
            case fx.SendQuery():
                self._query(effect)
            case _:
                raise AssertionError(effect)

    def _query(self, effect: fx.SendQuery) -> None:
        """Ask; what is known about a dead or unreachable executor answers in its place."""
        node, world = self._node, self._node.world
        address, boot = self.resolve(effect.executor)
        delay = world.rng.randint(1, 20 * MS)
        known = self._boots.get(address)
        if known is not None and boot != known:
            event: ev.Event = ev.ExecutorLost(effect.executor)
            if effect.fence and world.rng.random() < 0.5:
                event = ev.FenceEnded(effect.ref, HoldKind.READ, effect.read, True)
            world.clock.at(delay, node.tell, node.boot, event)
            return
        other = world.nodes[address]
        cut = world.links.is_cut(node.address, address)
        unreachable = known is None or cut or other.machine is None
        if effect.fence and unreachable and world.rng.random() < 0.7:
            event = ev.FenceEnded(effect.ref, HoldKind.READ, effect.read, False)
            world.clock.at(delay, node.tell, node.boot, event)
        query = ev.QueryCame(node.executor, effect.ref, effect.read, effect.fence)
        self._frame(effect.executor, query)

    def _frame(self, to: str, event: ev.Event) -> None:
        node = self._node
        address, boot = self.resolve(to)
        if boot == self._boots.get(address):
            other = node.world.nodes[address]
            node.world.links.send(
                node.address, address, other.peers.receive, node.address, node.boot, boot, event
            )

    def resolve(self, to: str) -> tuple[str, int]:
        """Address and life behind an executor's name or an address."""
        if to.startswith("kvd#"):
            address, _, boot = to[4:].rpartition(".")
            return address, int(boot)
        address = to.removeprefix("kvd@")
        return address, self._boots.get(address, 0)

    def receive(self, source: str, source_boot: int, own_boot: int, event: ev.Event) -> None:
        """A frame arrived."""
        node = self._node
        if own_boot == node.boot and source_boot == self._boots.get(source):
            node.handle(event)
