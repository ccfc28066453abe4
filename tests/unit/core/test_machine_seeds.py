"""What the simulator's seeds found in the machine, each as one short story without chance."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.core import effects as fx
from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.block_types import BlockState
from kvd.core.errors import KvdError
from kvd.core.holds import HoldKind, Truth
from kvd.core.ids import ReadId
from kvd.core.results import Found, ItemStatuses, SlotsSeen
from kvd.core.state import Limits
from kvd.core.transfer_types import Offer, Source, SourceKind
from tests.unit.core.tiny_kvd import (
    DECODER,
    KEY,
    READER,
    SCHEDULER,
    SPEC,
    WORKERS,
    Kvd,
    hello,
    read_spec,
    slot,
)


def granted_read(kvd: Kvd, request: str, block: int) -> ReadId:
    """A tenancy at epoch 0 saves `block` and is read remotely; the grant came before the save's
    end, which has come too."""
    ref, read = slot(0), ReadId("t", 0, 0, 0)
    save = se.SaveSpec("s", (block,), (4,), (request,))
    kvd.say(se.Written(ref, 0, (save,), (read_spec("t", block),)), se.Computed(ref))
    kvd.tell(ev.ClaimCame(READER, ref, read, 1))
    assert any(isinstance(effect, fx.SendGrant) for effect in kvd.sent)
    kvd.say(se.SaveEnded(ref, "s", True))
    return read


# Slot events ---------------------------------------------------------------------------------


def test_refusal_is_repeated_when_the_event_is_sent_again() -> None:
    kvd = Kvd()
    written = se.Written(slot(0), 0, (se.SaveSpec("s", (2,), (4,)),))
    batch = ev.SlotsChanged(0, WORKERS[0], 0, (se.Acquired(slot(0)), written))
    first = kvd.ask(batch)
    assert first == SlotsSeen(2, ("", "block_not_reserved"))
    assert kvd.ask(batch) == first


def test_events_older_than_every_remembered_code_are_out_of_order() -> None:
    kvd = Kvd(limits=Limits(batch_items=2))
    for epoch in range(3):
        kvd.say(se.Computed(slot(epoch)))
    refused = kvd.ask(ev.SlotsChanged(0, WORKERS[0], 0, (se.Computed(slot(0)),)))
    assert refused.code == "out_of_order"
    assert kvd.ask(ev.SlotsChanged(0, WORKERS[0], 1, (se.Computed(slot(1)),))) == SlotsSeen(3)


def test_span_is_not_saved_while_another_rank_loads_it() -> None:
    kvd = Kvd()
    (block,) = kvd.reserve("r")
    kvd.save(0, "r", block, tokens=2)
    kvd.say(se.SaveEnded(slot(0), "s", True))
    load = se.Acquired(slot(0, rank=1), 0, (se.LoadSpec("r", (block,), 2),))
    assert kvd.say(load, rank=1) == ()
    assert kvd.save(1, "r", block)[1] == "span_busy"
    kvd.say(se.LoadEnded(slot(0, rank=1), True), rank=1)
    assert kvd.save(2, "r", block) == ()


def test_fence_that_outruns_a_death_ends_loads() -> None:
    kvd = Kvd()
    (block,) = kvd.reserve("r")
    kvd.save(0, "r", block)
    kvd.say(se.SaveEnded(slot(0), "s", True))
    kvd.say(se.Acquired(slot(1), 0, (se.LoadSpec("r", (block,), 4),)))
    for later in (400, 40, 40, 40):
        kvd.tick(later)
    kvd.tell(ev.FenceEnded(slot(1), HoldKind.COMPUTE, "engine", True))
    kvd.end("r")
    assert kvd.table.pins == {}


def test_answer_that_computing_ended_is_not_believed_during_a_load() -> None:
    kvd = Kvd()
    (block,) = kvd.reserve("r")
    kvd.save(0, "r", block)
    kvd.say(se.SaveEnded(slot(0), "s", True))
    kvd.say(se.Acquired(slot(1), 0, (se.LoadSpec("r", (block,), 4),)))
    kvd.tick(400)
    answer = ev.MemberAnswered(WORKERS[0], slot(1), HoldKind.COMPUTE, "engine", Truth.ENDED_OK)
    assert kvd.tell(answer) == []
    kvd.say(se.LoadEnded(slot(1), True))
    assert any(isinstance(effect, fx.StoreGate) for effect in kvd.tell(answer))


# Blocks that have another owner by now -------------------------------------------------------


def test_late_commit_does_not_name_the_next_owners_block() -> None:
    kvd = Kvd()
    (block,) = kvd.reserve("old")
    kvd.end("old")
    assert kvd.reserve("new") == (block,)
    late = ev.Committed(0, SCHEDULER, (ev.CommitItem(block, KEY, 4, "old"),))
    assert kvd.ask(late) == ItemStatuses(("block_not_reserved",))
    kvd.save(0, "new", block)
    kvd.say(se.SaveEnded(slot(0), "s", True))
    assert kvd.ask(ev.LookedUp(0, SCHEDULER, "r", KEY)) == Found(())


def test_late_save_does_not_write_the_next_owners_block() -> None:
    kvd = Kvd()
    (block,) = kvd.reserve("old")
    kvd.end("old")
    assert kvd.reserve("new") == (block,)
    assert kvd.save(0, "old", block)[1] == "block_not_reserved"


def test_redirect_does_not_offer_the_next_owners_block() -> None:
    kvd = Kvd()
    (block,) = kvd.reserve("old")
    read = granted_read(kvd, "old", block)
    kvd.end("old")
    assert kvd.reserve("new") == (block,)
    save = se.SaveSpec("s", (block,), (4,), ("new",))
    kvd.say(se.Written(slot(0, 1), 0, (save,)), se.Computed(slot(0, 1)))
    kvd.say(se.SaveEnded(slot(0, 1), "s", True))
    sent = kvd.tell(ev.EndCame(READER, slot(0), read, False))
    assert [type(effect) for effect in sent] == [fx.SendRevoke, fx.StoreGate]
    assert kvd.machine.state.outgoing["t"].failed == "not_in_pool"


def test_redirect_does_not_offer_a_span_that_is_saved_again() -> None:
    kvd = Kvd()
    (block,) = kvd.reserve("r")
    read = granted_read(kvd, "r", block)
    save = se.SaveSpec("s", (block,), (4,), ("r",))
    kvd.say(se.Written(slot(0, 1), 0, (save,)), se.Computed(slot(0, 1)))
    kvd.tell(ev.EndCame(READER, slot(0), read, False))
    assert kvd.machine.state.outgoing["t"].failed == "not_in_pool"


def test_read_of_the_pool_is_offered_again_after_a_failure() -> None:
    kvd = Kvd()
    (block,) = kvd.reserve("r")
    read = granted_read(kvd, "r", block)
    sent = kvd.tell(ev.EndCame(READER, slot(0), read, False))
    source = Source(slot(0), SourceKind.POOL, (block,))
    assert fx.SendOffer("d", Offer(read.next_attempt(), 4, source)) in sent
    assert kvd.table.span_readers == {(block, 0): {read.next_attempt()}}


def test_quarantine_spares_the_next_owner_of_a_block() -> None:
    kvd = Kvd()
    (block,) = kvd.reserve("old")
    ref = slot(0)
    kvd.say(se.Written(ref, 0, (se.SaveSpec("s", (block,), (4,), ("old",)),)))
    kvd.say(se.SaveEnded(ref, "s", True))
    kvd.end("old")
    assert kvd.reserve("new") == (block,)
    for later in (400, 40, 40, 40):
        kvd.tick(later)
    kvd.tell(ev.FenceEnded(ref, HoldKind.COMPUTE, "engine", False))
    assert kvd.machine.state.counters["quarantines"] == 1
    assert kvd.table.state[block] == BlockState.FILLING


@pytest.mark.parametrize(
    ("blocks", "code"),
    [((99,), "block_not_reserved"), ((3,), "block_not_reserved"), ((0, 1), "frame_malformed")],
)
def test_pool_blocks_of_a_read_must_be_the_engines(blocks: tuple[int, ...], code: str) -> None:
    kvd = Kvd()
    assert kvd.reserve("r", 2) == (0, 1)
    assert kvd.say(se.Written(slot(0), 0, (), (read_spec("t", *blocks),))) == (code,)


# Reads and transfers -------------------------------------------------------------------------


def test_read_of_the_pool_is_not_granted_again_in_doubt() -> None:
    kvd = Kvd()
    (block,) = kvd.reserve("r")
    read = granted_read(kvd, "r", block).next_attempt()
    kvd.tell(ev.EndCame(READER, slot(0), read._replace(attempt=0), False))
    kvd.tell(ev.ClaimCame(READER, slot(0), read, 2))
    assert any(isinstance(effect, fx.SendGrant) for effect in kvd.sent)
    kvd.tick(150)
    assert kvd.tell(ev.ClaimCame(READER, slot(0), read, 3)) == []
    kvd.tell(ev.ReadAnswered(READER, "d", slot(0), read, Truth.NEVER_STARTED))
    assert kvd.table.span_readers == {(block, 0): {read.next_attempt()}}


def test_ended_transfers_leave_room_for_others() -> None:
    kvd = Kvd(limits=Limits(transfers=2), keep_ended=2)
    for epoch in range(5):
        transfer = f"t{epoch}"
        spec = read_spec(transfer)
        assert kvd.say(se.Written(slot(epoch), 0, (), (spec,)), se.Computed(slot(epoch))) == ()
        kvd.tell(ev.ClaimCame(READER, slot(epoch), spec.read, 1))
        kvd.tell(ev.EndCame(READER, slot(epoch), spec.read, True))
    assert len(kvd.machine.state.outgoing) <= 3


def test_producer_that_drops_a_transfer_tells_the_reader() -> None:
    kvd = Kvd()
    kvd.say(se.Written(slot(0), 0, (), (read_spec("t"),)), se.Computed(slot(0)))
    kvd.tell(ev.ClaimCame(READER, slot(0), ReadId("t", 0, 0, 0), 1))
    kvd.ask(ev.TransferDropped(0, WORKERS[0], "t"))
    assert fx.SendRevoke("d", ReadId("t", -1, 0, 0), "dropped") in kvd.sent


def test_retry_of_a_failed_transfer_is_not_offered() -> None:
    kvd = Kvd()
    (block,) = kvd.reserve("r")
    read = granted_read(kvd, "r", block)
    kvd.ask(ev.TransferDropped(0, SCHEDULER, "t"))
    kvd.tell(ev.EndCame(READER, slot(0), read, False))
    assert not any(isinstance(effect, fx.SendOffer) for effect in kvd.sent)
    assert kvd.machine.state.outgoing["t"].open == {}


def expect(kvd: Kvd) -> ReadId:
    """A transfer into a region, with one claimed read."""
    kvd.tell(ev.RegionAsked(7, DECODER, "region", SPEC))
    kvd.tell(ev.RegionMade("region"))
    kvd.ask(ev.TransferExpected(0, DECODER, "t", "region", (1,), 4, 1, 10_000))
    read = ReadId("t", 0, 0, 0)
    kvd.tell(ev.OfferCame("kvd#p", Offer(read, 4, Source(slot(0), SourceKind.SLOT, (0,)))))
    assert any(isinstance(effect, fx.SendClaim) for effect in kvd.sent)
    return read


def grant(read: ReadId) -> ev.GrantCame:
    return ev.GrantCame("kvd#p", read, 1, Source(slot(0), SourceKind.SLOT, (0,)))


def test_region_that_is_dropped_fails_its_transfers() -> None:
    kvd = Kvd()
    read = expect(kvd)
    kvd.ask(ev.RegionDropped(0, DECODER, "region"))
    assert fx.SendDecline("kvd#p", slot(0), read) in kvd.sent
    assert kvd.tell(grant(read)) == []


def test_read_of_a_known_transfer_that_is_not_known_never_started() -> None:
    kvd = Kvd()
    read = expect(kvd)
    kvd.tell(ev.PeerLost("kvd#p"))
    sent = kvd.tell(ev.QueryCame("kvd#q", slot(0), read, False))
    assert sent == [fx.SendAnswer("kvd#q", slot(0), read, Truth.NEVER_STARTED, False)]
    stranger = read._replace(transfer="other")
    sent = kvd.tell(ev.QueryCame("kvd#q", slot(0), stranger, False))
    assert sent == [fx.SendAnswer("kvd#q", slot(0), stranger, Truth.UNKNOWN, False)]


def test_grant_of_a_claim_that_was_given_up_starts_nothing() -> None:
    kvd = Kvd()
    read = expect(kvd)
    offer = Offer(read, 4, Source(slot(0), SourceKind.SLOT, (0,)))
    kvd.tell(ev.QueryCame("kvd#p", slot(0), read, False))
    assert kvd.tell(grant(read)) == []
    kvd.tell(ev.OfferCame("kvd#p", offer))
    assert kvd.tell(grant(read)) == []
    assert [type(effect) for effect in kvd.tell(replace(grant(read), claim=2))] == [fx.StartCopy]


def test_abort_keeps_a_block_that_is_read() -> None:
    kvd = Kvd()
    (block,) = kvd.reserve("r")
    read = granted_read(kvd, "r", block)
    kvd.tell(ev.EndCame(READER, slot(0), read, False))
    kvd.ask(ev.RequestEnded(0, SCHEDULER, "r", None, aborted=True))
    assert kvd.table.state[block] == BlockState.POISONED
    assert kvd.reserve("new", 3) == tuple(set(range(4)) - {block})


# Members -------------------------------------------------------------------------------------


def test_new_kvd_begins_after_what_was_acquired() -> None:
    kvd = Kvd((ev.SlotAnnounced(0, 3, True, 5), ev.SlotAnnounced(1, 9, True, 5)))
    assert [slot.ref.epoch for slot in kvd.machine.state.members[WORKERS[0]].slots] == [6, 9]


def test_announced_saves_and_reads_hold_their_slot() -> None:
    kvd = Kvd((ev.SlotAnnounced(0, 4, False, 5, False, ("s",), (read_spec("t", 2),)),))
    held = kvd.machine.state.members[WORKERS[0]].slots[0]
    assert held.ref == slot(5)
    assert {hold.kind for hold in held.holds} == {HoldKind.SAVE, HoldKind.READ}
    assert kvd.say(se.SaveEnded(slot(5), "s", True)) == ()
    kvd.tick(1)
    assert kvd.sent == [fx.SendQuery("kvd@d", slot(5), ReadId("t", 0, 0, 0), False)]


def test_engine_stays_until_members_of_its_earlier_life_have_left() -> None:
    kvd = Kvd()
    kvd.say(se.Written(slot(0), 0, (), (read_spec("t"),)), se.Computed(slot(0)))
    kvd.tell(ev.ClaimCame(READER, slot(0), ReadId("t", 0, 0, 0), 1))
    for member in (SCHEDULER, *WORKERS):
        kvd.tell(ev.MemberDied(member))
    again = WORKERS[0]._replace(incarnation=2)
    kvd.ask(hello(again))
    kvd.tell(ev.MemberDied(again))
    kvd.tell(ev.EndCame(READER, slot(0), ReadId("t", 0, 0, 0), True))
    assert fx.DropMember(WORKERS[0]) in kvd.tick(1)
    assert "p" not in kvd.machine.state.engines


def test_life_that_said_goodbye_does_not_join_again() -> None:
    kvd = Kvd()
    kvd.say(se.Written(slot(0), 0, (), (read_spec("t"),)), se.Computed(slot(0)))
    kvd.tell(ev.ClaimCame(READER, slot(0), ReadId("t", 0, 0, 0), 1))
    kvd.tell(ev.MemberDied(WORKERS[0], "goodbye"))
    refused = kvd.ask(hello(WORKERS[0]))
    assert isinstance(refused, KvdError)
    assert refused.code == "stale_incarnation"
    assert slot(0).member in kvd.machine.state.members
