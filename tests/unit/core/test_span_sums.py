"""Checksums of spans: what is recorded of a save, and what a reported mismatch does."""

from __future__ import annotations

import struct

import pytest

from kvd.core import effects as fx
from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.block_types import BlockState
from kvd.core.ids import ReadId
from kvd.core.transfer_types import SourceKind
from tests.unit.core.tiny_kvd import KEY, READER, SCHEDULER, WORKERS, Kvd, read_spec, slot

SUM = struct.pack("<I", 0xABCD)


def ready_block(kvd: Kvd, request: str = "r") -> int:
    """A ready block that the request keeps."""
    (block,) = kvd.reserve(request)
    kvd.save(0, request, block)
    kvd.say(se.SaveEnded(slot(0), "s", True, (), SUM))
    kvd.ask(ev.Committed(0, SCHEDULER, (ev.CommitItem(block, KEY, 4),)))
    return block


def load(kvd: Kvd, block: int, epoch: int = 1) -> None:
    """A load of the block is under way."""
    item = se.LoadSpec("r", (block,), 4)
    assert kvd.say(se.Acquired(slot(epoch), 0, (item,))) == ()


def mismatches(kvd: Kvd) -> int:
    return kvd.machine.state.counters["checksum_mismatches"]


# What a save says ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sums", [SUM[:3], SUM * 2])
def test_checksums_that_do_not_fit_the_save_are_refused(sums: bytes) -> None:
    kvd = Kvd(checksums="always")
    (block,) = kvd.reserve("r")
    kvd.save(0, "r", block)
    assert kvd.say(se.SaveEnded(slot(0), "s", True, (), sums)) == ("frame_malformed",)
    assert kvd.say(se.SaveEnded(slot(0), "s", True, (), SUM)) == ()


def test_they_are_written_when_the_save_ends_and_before_the_header() -> None:
    kvd = Kvd(checksums="always")
    (block,) = kvd.reserve("r")
    kvd.ask(ev.Committed(0, SCHEDULER, (ev.CommitItem(block, KEY, 4),)))
    kvd.save(0, "r", block)
    kvd.say(se.SaveEnded(slot(0), "s", True, (), SUM))
    told = [e for e in kvd.sent if isinstance(e, fx.WriteSums | fx.WriteHeader)]
    assert [type(effect) for effect in told] == [fx.WriteSums, fx.WriteHeader]
    assert told[0] == fx.WriteSums(0, (block,), (4,), SUM)


def test_they_cover_the_rows_that_the_copy_made_valid() -> None:
    kvd = Kvd(checksums="always")
    (block,) = kvd.reserve("r")
    kvd.save(0, "r", block)
    kvd.say(se.SaveEnded(slot(0), "s", True, (3,), SUM))
    assert fx.WriteSums(0, (block,), (3,), SUM) in kvd.sent


def test_a_save_without_any_voids_those_of_the_save_before_it() -> None:
    kvd = Kvd(checksums="sampled")
    (block,) = kvd.reserve("r")
    kvd.save(0, "r", block)
    kvd.say(se.SaveEnded(slot(0), "s", True, (), SUM))
    kvd.save(1, "r", block)
    kvd.say(se.SaveEnded(slot(1), "s", True))
    assert fx.WriteSums(0, (block,), (4,), b"") in kvd.sent


def test_a_failed_save_leaves_none() -> None:
    kvd = Kvd(checksums="always")
    (block,) = kvd.reserve("r")
    kvd.save(0, "r", block)
    kvd.say(se.SaveEnded(slot(0), "s", False, (), SUM))
    assert not any(isinstance(effect, fx.WriteSums) for effect in kvd.sent)


def test_without_checksums_nothing_is_recorded() -> None:
    kvd = Kvd()
    (block,) = kvd.reserve("r")
    kvd.save(0, "r", block)
    assert kvd.say(se.SaveEnded(slot(0), "s", True, (), SUM)) == ()
    assert not any(isinstance(effect, fx.WriteSums) for effect in kvd.sent)


# What a load found --------------------------------------------------------------------------------


def test_a_damaged_block_is_poisoned_counted_and_named() -> None:
    kvd = Kvd(checksums="always")
    block = ready_block(kvd)
    load(kvd, block)
    kvd.say(se.LoadEnded(slot(1), False, (se.BadSum(block, 0xABCD, 0x12),)))
    assert fx.MarkVoid((block,)) in kvd.sent  # no life after this one finds it ready
    assert kvd.table.state[block] == BlockState.POISONED
    assert mismatches(kvd) == 1
    hits = kvd.ask(ev.LookedUp(0, SCHEDULER, "next", KEY))
    assert hits.blocks == ()
    (found, _) = kvd.machine.state.story.about(f"block{block}")[-2:]
    assert found.outcome == "checksum_mismatch"
    assert "layer=0, shard=0, expected='0000abcd', got='00000012'" in str(found.event)
    kvd.end("r")
    assert block in kvd.table.free


def test_a_slot_into_which_damage_was_loaded_is_poisoned() -> None:
    kvd = Kvd(checksums="always")
    block = ready_block(kvd)
    load(kvd, block)
    kvd.say(se.LoadEnded(slot(1), False, (se.BadSum(block, 1, 2),)))
    assert kvd.machine.state.members[WORKERS[0]].slots[0].poisoned


@pytest.mark.parametrize("names", [("r",), ()], ids=["of the request", "of nobody named"])
def test_rows_of_a_damaged_request_are_saved_nowhere_whatever_the_word_says(
    names: tuple[str, ...],
) -> None:
    kvd = Kvd(checksums="always")
    block = ready_block(kvd)
    (own,) = kvd.reserve("r")
    load(kvd, block)
    kvd.say(se.LoadEnded(slot(1), True, (se.BadSum(block, 1, 2),)))
    kvd.say(se.Written(slot(1), 0, (se.SaveSpec("s", (own,), (4,), names),)))
    assert not kvd.machine.state.members[WORKERS[0]].slots[0].armed
    assert kvd.machine.state.counters["refused_block_poisoned"] == 1


def test_nothing_is_offered_of_a_slot_into_which_damage_was_loaded() -> None:
    kvd = Kvd(checksums="always")
    block = ready_block(kvd)
    load(kvd, block)
    kvd.say(se.LoadEnded(slot(1), True, (se.BadSum(block, 1, 2),)))
    kvd.say(se.Written(slot(1), 0, (), (read_spec("t", block),)))
    assert not kvd.machine.state.members[WORKERS[0]].slots[0].armed


def test_rows_of_other_requests_stand() -> None:
    kvd = Kvd(checksums="always")
    block = ready_block(kvd)
    (other,) = kvd.reserve("s")
    load(kvd, block)
    kvd.say(se.LoadEnded(slot(1), True, (se.BadSum(block, 1, 2),)))
    kvd.say(se.Written(slot(1), 0, (se.SaveSpec("s", (other,), (4,), ("s",)),)))
    kvd.say(se.Computed(slot(1)), se.SaveEnded(slot(1), "s", True))
    assert kvd.table.state[block] == BlockState.POISONED
    assert kvd.table.state[other] == BlockState.FILLING


def test_only_blocks_of_that_load_can_be_reported() -> None:
    kvd = Kvd(checksums="always")
    block = ready_block(kvd)
    (other,) = kvd.reserve("s")
    load(kvd, block)
    kvd.say(se.LoadEnded(slot(1), False, (se.BadSum(other, 1, 2), se.BadSum(1 << 40, 1, 2))))
    assert mismatches(kvd) == 0
    assert kvd.table.state[other] == BlockState.FILLING
    assert kvd.table.state[block] == BlockState.READY


def test_a_report_of_a_tenancy_that_is_over_changes_nothing() -> None:
    kvd = Kvd(checksums="always")
    block = ready_block(kvd)
    load(kvd, block)
    kvd.say(se.LoadEnded(slot(0), False, (se.BadSum(block, 1, 2),)))
    assert mismatches(kvd) == 0
    assert kvd.table.state[block] == BlockState.READY


# What a remote reader found -----------------------------------------------------------------------


def pool_read(kvd: Kvd) -> tuple[int, ReadId]:
    """A block and a granted read of it, redirected to the pool."""
    (block,) = kvd.reserve("r")
    ref = slot(0)
    save = se.SaveSpec("s", (block,), (4,), ("r",))
    kvd.say(se.Written(ref, 0, (save,), (read_spec("t", block),)), se.Computed(ref))
    kvd.say(se.SaveEnded(ref, "s", True, (), SUM))
    (offer,) = [e.offer for e in kvd.sent if isinstance(e, fx.SendOffer)]
    kvd.tell(ev.ClaimCame(READER, ref, offer.read, 1))
    (grant,) = [e for e in kvd.sent if isinstance(e, fx.SendGrant)]
    assert grant.source.kind is SourceKind.POOL
    return block, offer.read


def test_a_reader_names_the_damaged_block_and_the_read_fails() -> None:
    kvd = Kvd(checksums="always")
    block, read = pool_read(kvd)
    kvd.tell(ev.EndCame(READER, slot(0), read, False, (se.BadSum(block, 5, 6),)))
    assert mismatches(kvd) == 1
    assert kvd.table.state[block] == BlockState.POISONED
    assert kvd.machine.state.outgoing["t"].failed


def test_only_the_reader_that_was_granted_it_can_report_its_blocks() -> None:
    kvd = Kvd(checksums="always")
    block, read = pool_read(kvd)
    (other,) = kvd.reserve("s")
    kvd.tell(ev.EndCame("kvd#other", slot(0), read, False, (se.BadSum(block, 5, 6),)))
    kvd.tell(ev.EndCame(READER, slot(0, 1), read, False, (se.BadSum(block, 5, 6),)))
    kvd.tell(ev.EndCame(READER, slot(0), ReadId("u", 0, 0, 0), False, (se.BadSum(block, 5, 6),)))
    kvd.tell(ev.EndCame(READER, slot(0), read, True, (se.BadSum(other, 5, 6),)))
    assert mismatches(kvd) == 0
    assert kvd.table.state[block] == BlockState.FILLING
