"""The life after a death, by example: what is a hit at once, and what is held for whom."""

from __future__ import annotations

from dataclasses import replace

from kvd.core import effects as fx
from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.adopted import AdoptedBlocks, AdoptedPool, NodeAdopted
from kvd.core.block_columns import BlockColumns
from kvd.core.block_types import BlockState
from kvd.core.errors import KvdError
from kvd.core.ids import MemberRef
from kvd.core.results import Found
from tests.unit.core.tiny_kvd import (
    DECODER,
    KEY,
    LAYOUT,
    SCHEDULER,
    SPEC,
    WORKERS,
    Kvd,
    hello,
    slot,
)

DIGEST = LAYOUT.namespace
MEMBERS = (SCHEDULER, *WORKERS)


def last_life(
    ready: tuple[tuple[int, bytes, int], ...] = (),
    filling: tuple[int, ...] = (),
    odd: tuple[int, ...] = (),
    absent: tuple[MemberRef, ...] = MEMBERS,
    regions: tuple[tuple[str, str, ev.RegionSpec], ...] = (),
) -> NodeAdopted:
    """A pool of four blocks, as headers and record tell of it; ready: (block, hash, tokens)."""
    columns = BlockColumns(4)
    for block, block_hash, tokens in ready:
        columns.states[block] = BlockState.READY
        columns.set_key(block, (0, block_hash), tokens)
    for block in filling:
        columns.states[block] = BlockState.FILLING
    pool = AdoptedPool(
        DIGEST,
        LAYOUT.stride,
        LAYOUT.shape,
        ((DIGEST, b"probe"),),
        AdoptedBlocks(columns, odd=list(odd)),
    )
    return NodeAdopted(pool, absent, regions)


def lookup(kvd: Kvd, key: bytes = KEY) -> tuple[int, ...]:
    found = kvd.ask(ev.LookedUp(0, SCHEDULER, "again", key))
    assert isinstance(found, Found)
    return found.blocks


def test_ready_blocks_are_hits_at_once_and_where_they_were() -> None:
    kvd = Kvd(last_life=last_life(ready=((2, KEY, 4),)))
    assert lookup(kvd) == (2,)
    assert not any(isinstance(effect, fx.FormatPool) for effect in kvd.sent)


def test_all_blocks_are_found_again_in_free_and_ready() -> None:
    kvd = Kvd(last_life=last_life(ready=((2, KEY, 4),), absent=()))
    assert sorted(kvd.reserve("r", 3)) == [0, 1, 3]
    assert kvd.reserve("r2", 1) == (2,), "evicted, it is nobody's"


def test_headers_that_make_no_sense_are_freed() -> None:
    kvd = Kvd(joined=False)
    kvd.tell(last_life(ready=((2, KEY, 4),), odd=(1, 3)))
    assert fx.ClearHeaders((1, 3)) in kvd.sent
    assert list(kvd.table.free) == [3, 1, 0]
    assert kvd.machine.state.counters["blocks_not_adopted"] == 2
    assert kvd.machine.state.counters["blocks_adopted"] == 1


def test_of_two_blocks_with_one_key_one_is_freed() -> None:
    kvd = Kvd(joined=False)
    kvd.tell(last_life(ready=((0, KEY, 4), (3, KEY, 4))))
    assert fx.ClearHeaders((3,)) in kvd.sent


def test_a_filling_block_is_held_until_every_member_came_back() -> None:
    kvd = Kvd(last_life=last_life(filling=(1,)), joined=False)
    for event in (hello(SCHEDULER), hello(WORKERS[0])):
        kvd.ask(event)
        assert kvd.table.state[1] == BlockState.FILLING
    kvd.ask(hello(WORKERS[1]))
    assert kvd.table.state[1] == BlockState.RESET
    assert fx.ClearHeaders((1,)) in kvd.sent


def test_or_until_it_is_proven_dead() -> None:
    kvd = Kvd(last_life=last_life(filling=(1,)), joined=False)
    for ref in MEMBERS:
        assert kvd.table.state[1] == BlockState.FILLING
        kvd.tell(ev.MemberDied(ref))
    assert kvd.table.state[1] == BlockState.RESET


def test_a_save_that_its_member_announced_holds_it_until_it_has_ended() -> None:
    saving = ev.SlotAnnounced(0, 3, False, 3, False, ("s",), ())
    kvd = Kvd((saving,), last_life=last_life(filling=(1,)))
    assert kvd.table.state[1] == BlockState.FILLING
    kvd.say(se.SaveEnded(slot(3), "s", True, (4,)))
    kvd.tick(1)
    assert kvd.table.state[1] == BlockState.RESET


def test_nobody_commits_or_reserves_what_is_held() -> None:
    kvd = Kvd(last_life=last_life(filling=(0, 1, 2, 3), absent=(*MEMBERS, DECODER, replace_ref())))
    error = kvd.ask(ev.Reserved(0, SCHEDULER, "r", 1))
    assert isinstance(error, KvdError)
    assert error.code == "pool_full"
    item = ev.CommitItem(0, KEY, 4)
    statuses = kvd.ask(ev.Committed(0, SCHEDULER, (item,)))
    assert statuses.codes == ("block_not_reserved",)


def replace_ref() -> MemberRef:
    """A member that never comes back."""
    return WORKERS[0]._replace(engine="elsewhere")


def test_a_poisoned_block_stays_marked_until_its_save_has_ended() -> None:
    kvd = Kvd()
    (block,) = kvd.reserve("r")
    kvd.save(0, "r", block)
    kvd.ask(ev.RequestEnded(0, SCHEDULER, "r", aborted=True))
    assert fx.MarkVoid((block,)) in kvd.sent
    assert not any(isinstance(effect, fx.ClearHeaders) for effect in kvd.sent)
    kvd.say(se.SaveEnded(slot(0), "s", True, (4,)))
    assert fx.ClearHeaders((block,)) in kvd.sent


def test_another_layout_waits_for_the_members_of_the_last_life() -> None:
    kvd = Kvd(last_life=last_life(), joined=False)
    other = replace(LAYOUT, namespace=b"another", stride=32)
    error = kvd.ask(replace(hello(SCHEDULER), layout=other))
    assert isinstance(error, KvdError)
    assert error.code == "layout_mismatch"
    for ref in MEMBERS:
        kvd.tell(ev.MemberDied(ref))
    assert not isinstance(kvd.ask(replace(hello(SCHEDULER), layout=other)), KvdError)


def test_a_region_is_there_for_its_engine() -> None:
    life = last_life(absent=(*MEMBERS, DECODER), regions=(("region", "d", SPEC),))
    kvd = Kvd(last_life=life)
    answer = kvd.ask(ev.RegionAsked(0, DECODER, "region", SPEC))
    assert not isinstance(answer, KvdError)
    assert not any(isinstance(effect, fx.MakeRegion) for effect in kvd.sent)


def test_a_region_is_freed_when_its_engine_died_meanwhile() -> None:
    life = last_life(absent=(*MEMBERS, DECODER), regions=(("region", "d", SPEC),))
    kvd = Kvd(last_life=life, joined=False)
    kvd.tell(ev.MemberDied(DECODER))
    assert fx.FreeRegion("region") in kvd.sent
    nobody = Kvd(joined=False)
    nobody.tell(last_life(absent=(), regions=(("region", "d", SPEC),)))
    assert fx.FreeRegion("region") in nobody.sent
