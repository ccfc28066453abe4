"""The one mutator: `Machine.handle(events, now) -> effects`.

Everything that kvd knows and decides is in here, and nothing else is: no I/O, no clock, no
randomness, no logging. The shell turns frames, deaths and time into events, calls `handle` without
awaiting anything in between, and performs the effects in order. A refused request changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from kvd.core import adoption, arming, incoming, members, outgoing, pool_ops, regions, slot_ops
from kvd.core import events as ev
from kvd.core import results as res
from kvd.core import slot_events as se
from kvd.core.block_queues import BlockQueues
from kvd.core.effects import Effect, Refuse, Reply, SendRevoke
from kvd.core.errors import KvdError, LocalError
from kvd.core.ids import ReadId
from kvd.core.prefix import BlockIndex
from kvd.core.slot import Rules
from kvd.core.state import Settings, State, Waiter
from kvd.core.story import Story

SWEEP_INTERVAL: Final = 1_000_000_000
"""How often leases and books are swept, ns; holds are looked at on every tick."""


class Machine:
    """kvd's state and its only way to change."""

    def __init__(
        self,
        settings: Settings,
        index: BlockIndex,
        queues: type[BlockQueues] = BlockQueues,
    ) -> None:
        """An empty node.

        Args:
            settings: sizes, deadlines and limits; see `reconfigure`.
            index: an empty block index.
            queues: what the order of eviction is kept in.
        """
        rules = _rules(settings)
        story = Story(settings.limits.story_entries)
        self.state = State(settings, index, rules, story, queues=queues)

    def reconfigure(self, settings: Settings) -> None:
        """Go on with other deadlines and another cap of decode regions.

        What runs keeps the deadline that it was given; nothing is ended by a lower cap. Sizes and
        limits of tables must be those of the start.
        """
        self.state.settings = settings
        self.state.rules = _rules(settings)

    def handle(self, events: Iterable[ev.Event], now: int) -> list[Effect]:
        """Apply events in order; return what must be done, in order.

        Args:
            events: what happened.
            now: time of the events, ns, never smaller than in earlier calls.
        """
        out: list[Effect] = []
        for event in events:
            handler = _HANDLERS[type(event)]
            try:
                handler(self.state, event, now, out)
            except KvdError as error:
                self.state.count(f"refused_{error.code}")
                reply = getattr(event, "reply", 0)
                if reply:
                    out.append(Refuse(reply, error))
        return out


def _rules(settings: Settings) -> Rules:
    return Rules(settings.timing, settings.limits.readers_per_slot)


def _ticked(m: State, _: ev.Tick, now: int, out: list[Effect]) -> None:
    for member in list(m.members.values()):
        for index in list(member.held):
            slot_ops.feed(m, se.Ticked(member.slots[index].ref), now, out)
    outgoing.tick(m, now, out)
    incoming.tick(m, now, out)
    _expire_waiters(m, now, out)
    if now >= m.next_sweep:
        m.next_sweep = now + SWEEP_INTERVAL
        pool_ops.expire(m, now, out)
        arming.forget_ended(m, m.settings.keep_ended)
    pool_ops.make_room(m)
    pool_ops.flush(m, out)
    members.sweep_leaving(m, out)
    adoption.settle(m, now, out)


def _awaited(m: State, e: ev.TransferAwaited, now: int, out: list[Effect]) -> None:
    """Answer when the transfer is over, on whichever side this engine is."""
    m.member(e.ref)
    coming = m.incoming.get(e.transfer)
    if coming is not None and coming.engine == e.ref.engine:
        if coming.is_over:
            out.append(incoming.outcome(coming, e.reply))
            return
    else:
        going = m.outgoing.get(e.transfer)
        if going is None or going.engine != e.ref.engine:
            raise LocalError("transfer_unknown", transfer=e.transfer)
        if going.failed or not going.open:
            out.append(outgoing.outcome(going, e.reply))
            return
    if len(m.waiters) >= m.settings.limits.waiters:
        raise LocalError("busy", limit=m.settings.limits.waiters, what="waiters")
    m.waiters.append(Waiter(e.reply, e.ref.engine, e.transfer, e.deadline, now))


def _dropped(m: State, e: ev.TransferDropped, now: int, out: list[Effect]) -> None:
    """An engine gives a transfer up, on whichever side it is."""
    m.member(e.ref)
    going = m.outgoing.get(e.transfer)
    coming = m.incoming.get(e.transfer)
    if going is not None and going.engine == e.ref.engine:
        outgoing.dropped(m, going, now, out)
        out.append(Reply(e.reply, res.Done()))
    elif e.peer and (coming is None or coming.engine != e.ref.engine):
        out.append(SendRevoke(e.peer, ReadId(e.transfer, -1, 0, 0), "dropped"))
        out.append(Reply(e.reply, res.Done()))
    else:
        incoming.dropped(m, e, now, out)


def _expire_waiters(m: State, now: int, out: list[Effect]) -> None:
    for waiter in [w for w in m.waiters if w.deadline <= now]:
        m.waiters.remove(waiter)
        m.count("waits_expired")
        what = f"transfer {waiter.transfer}"
        out.append(Refuse(waiter.reply, LocalError("deadline_exceeded", what=what)))


def _silent(m: State, e: ev.MemberSilent, now: int, _: list[Effect]) -> None:
    members.silent(m, e, now)


def _region_asked(m: State, e: ev.RegionAsked, _: int, out: list[Effect]) -> None:
    regions.asked(m, e, out)


def _region_made(m: State, e: ev.RegionMade, _: int, out: list[Effect]) -> None:
    regions.made(m, e, out)


def _region_dropped(m: State, e: ev.RegionDropped, now: int, out: list[Effect]) -> None:
    m.member(e.ref)
    regions.owned(m, e.region, e.ref.engine)
    incoming.drop_region_transfers(m, e.region, now, out)
    regions.dropped(m, e, out)


def _allocated(m: State, e: ev.BlocksAllocated, _: int, out: list[Effect]) -> None:
    regions.allocated(m, e, out)


def _query_came(m: State, e: ev.QueryCame, _: int, out: list[Effect]) -> None:
    incoming.query_came(m, e, out)


_Handler = Callable[[State, Any, int, list[Effect]], None]

_HANDLERS: Final[dict[type, _Handler]] = {
    ev.NodeAdopted: adoption.adopted,
    ev.MemberJoined: members.joined,
    ev.MemberDied: members.died,
    ev.MemberSilent: _silent,
    ev.LookedUp: pool_ops.looked_up,
    ev.Reserved: pool_ops.reserved,
    ev.Committed: pool_ops.committed,
    ev.RequestEnded: pool_ops.request_ended,
    ev.Renewed: pool_ops.renewed,
    ev.BlocksPoisoned: pool_ops.blocks_poisoned,
    ev.SlotsChanged: slot_ops.slots_changed,
    ev.MemberAnswered: slot_ops.member_answered,
    ev.ExecutorLost: members.executor_lost,
    ev.ClaimCame: slot_ops.claim_came,
    ev.DeclineCame: slot_ops.decline_came,
    ev.EndCame: slot_ops.end_came,
    ev.ReadAnswered: slot_ops.read_answered,
    ev.FenceEnded: slot_ops.fence_ended,
    ev.TransferExpected: incoming.expected,
    ev.TransferAwaited: _awaited,
    ev.TransferDropped: _dropped,
    ev.OfferCame: incoming.offer_came,
    ev.GrantCame: incoming.grant_came,
    ev.RevokeCame: incoming.revoke_came,
    ev.QueryCame: _query_came,
    ev.CopyEnded: incoming.copy_ended,
    ev.PeerLost: incoming.peer_lost,
    ev.RegionAsked: _region_asked,
    ev.RegionMade: _region_made,
    ev.RegionDropped: _region_dropped,
    ev.BlocksAllocated: _allocated,
    ev.Tick: _ticked,
}
