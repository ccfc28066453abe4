"""Steps of members: what kvd keeps for copies that it may not have heard of yet."""

from __future__ import annotations

import pytest

from kvd.core import effects as fx
from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.errors import LocalError
from tests.unit.core.step_kvd import StepKvd, load, redirect, slot, spec
from tests.unit.core.tiny_kvd import READER, SCHEDULER, WORKERS, read_spec

# What a step keeps ------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["abort", "end", "poison"])
def test_targets_are_kept_before_kvd_has_heard_of_a_copy(ending: str) -> None:
    kvd = StepKvd()
    blocks = kvd.reserve("r", 2)
    assert kvd.open(1, (spec(*blocks),)) == ""
    if ending == "abort":
        kvd.abort("r")
    elif ending == "end":
        kvd.end("r")
    else:
        kvd.ask(ev.BlocksPoisoned(0, SCHEDULER, blocks))
        kvd.end("r")
    assert {kvd.state(block) for block in blocks} == {"poisoned"}
    assert not set(kvd.reserve("q", 6)) & set(blocks)
    kvd.close(1)
    assert set(kvd.reserve("q", 2)) == set(blocks)


@pytest.mark.parametrize("ending", ["abort", "end", "poison"])
def test_sources_are_kept_before_kvd_has_heard_of_a_copy(ending: str) -> None:
    kvd = StepKvd()
    blocks = kvd.fill("r", 2)
    kvd.commit("r", blocks[0])
    assert kvd.open(1, loads=(load(*blocks),)) == ""
    if ending == "poison":
        kvd.ask(ev.BlocksPoisoned(0, SCHEDULER, blocks))
    kvd.ask(ev.RequestEnded(0, SCHEDULER, "r", None, aborted=ending == "abort"))
    with pytest.raises(LocalError, match="pool_full"):
        raise kvd.ask(ev.Reserved(0, SCHEDULER, "q", 7))
    kvd.reserve("q", 6)
    kvd.close(1)
    assert set(kvd.reserve("q", 2)) == set(blocks)


def test_a_closed_step_keeps_its_blocks_until_its_copies_have_ended() -> None:
    kvd = StepKvd()
    blocks = kvd.fill("r")
    assert kvd.open(1, (spec(*blocks),), (load(*blocks),)) == ""
    assert kvd.code(se.Acquired(slot(), 0, step=1)) == ""
    assert kvd.code(se.Written(slot(index=1), 1, step=1)) == ""
    kvd.close(1)
    kvd.abort("r")
    assert not set(kvd.reserve("q", 7)) & set(blocks)
    kvd.say(se.LoadEnded(slot(), True))
    assert kvd.state(blocks[0]) == "poisoned"
    kvd.say(se.SaveEnded(slot(index=1), "s", True))
    assert kvd.state(blocks[0]) == "reset"
    assert not kvd.table.steps


@pytest.mark.parametrize("commit_first", [False, True])
def test_a_block_is_ready_when_its_step_is_over(commit_first: bool) -> None:
    kvd = StepKvd()
    blocks = kvd.reserve("r")
    assert kvd.open(1, (spec(*blocks),)) == ""
    if commit_first:
        kvd.commit("r", *blocks)
    for layer in (0, 1):
        assert kvd.code(se.Written(slot(index=layer), layer, step=1)) == ""
        kvd.say(se.SaveEnded(slot(index=layer), "s", True))
    if not commit_first:
        kvd.commit("r", *blocks)
    assert kvd.state(blocks[0]) == "filling"
    kvd.close(1)
    assert kvd.state(blocks[0]) == "ready"
    assert isinstance(kvd.sent[0], fx.WriteHeader)


def test_of_two_blocks_of_one_key_the_step_s_end_makes_one_ready() -> None:
    kvd = StepKvd()
    one, two = kvd.reserve("r", 2)
    assert kvd.open(1, (spec(one, two),)) == ""
    for layer in (0, 1):
        kvd.say(se.Written(slot(index=layer), layer, step=1))
        kvd.say(se.SaveEnded(slot(index=layer), "s", True))
    kvd.commit("r", one)
    kvd.commit("r", two)
    kvd.close(1)
    assert sorted((kvd.state(one), kvd.state(two))) == ["filling", "ready"]
    kvd.end("r")
    assert sorted((kvd.state(one), kvd.state(two))) == ["ready", "reset"]


def test_two_steps_keep_a_block_that_both_save() -> None:
    kvd = StepKvd()
    blocks = kvd.reserve("r")
    assert kvd.open(1, (spec(*blocks, tokens=2),)) == kvd.open(2, (spec(*blocks),)) == ""
    kvd.abort("r")
    kvd.close(1)
    assert kvd.state(blocks[0]) == "poisoned"
    kvd.close(2)
    assert kvd.state(blocks[0]) == "reset"


def test_a_load_under_a_step_says_so_once() -> None:
    kvd = StepKvd()
    blocks = kvd.fill("r")
    assert kvd.open(1, loads=(load(*blocks),)) == ""
    event = se.Acquired(slot(), 0, step=1)
    assert kvd.code(event) == ""
    assert kvd.code(event) == "already_acquired"
    kvd.close(1)
    kvd.say(se.LoadEnded(slot(), True), se.LoadEnded(slot(), True))
    assert not kvd.table.steps


def test_batches_that_come_again_are_answered_as_before() -> None:
    kvd = StepKvd()
    blocks = kvd.reserve("r")
    items = (
        se.StepOpened(WORKERS[0], 1, (), (spec(5),)),
        se.StepOpened(WORKERS[0], 2, (), (spec(*blocks),)),
        se.Written(slot(), 0, step=2),
        se.SaveEnded(slot(), "s", True),
        se.StepClosed(WORKERS[0], 2),
    )
    event = ev.SlotsChanged(0, WORKERS[0], 0, items)
    first = kvd.ask(event)
    before = kvd.books()
    assert kvd.ask(event) == first
    assert first.codes == ("block_not_reserved", "", "", "", "")
    assert kvd.books() == before


# Others ------------------------------------------------------------------------------------------


def test_another_member_does_not_save_into_targets_of_a_step() -> None:
    kvd = StepKvd(both_save=True)
    blocks = kvd.reserve("r")
    assert kvd.open(1, (spec(*blocks),)) == ""
    assert kvd.code(se.Written(slot(rank=1), 0, (spec(*blocks),)), 1) == "span_busy"
    assert kvd.open(1, (spec(*blocks),), rank=1) == "span_busy"
    kvd.close(1)
    assert kvd.code(se.Written(slot(rank=1), 0, (spec(*blocks),)), 1) == ""


def test_another_member_does_not_save_into_sources_of_a_step() -> None:
    kvd = StepKvd()
    blocks = kvd.fill("r")
    assert kvd.open(1, loads=(load(*blocks),), rank=1) == ""
    assert kvd.code(se.Written(slot(), 0, (spec(*blocks),))) == "span_busy"
    kvd.close(1, rank=1)
    assert kvd.code(se.Written(slot(), 0, (spec(*blocks),))) == ""


def test_another_member_does_not_load_targets_of_a_step() -> None:
    kvd = StepKvd()
    blocks = kvd.fill("r")
    assert kvd.open(1, (spec(*blocks),)) == ""
    assert kvd.code(se.Acquired(slot(rank=1), 0, (load(*blocks),)), 1) == "span_busy"
    kvd.close(1)
    assert kvd.code(se.Acquired(slot(rank=1), 0, (load(*blocks),)), 1) == ""


def test_no_read_is_redirected_into_targets_of_a_step() -> None:
    kvd = StepKvd()
    blocks = kvd.reserve("r")
    ref = slot(index=2)
    event = se.Written(ref, 0, (spec(*blocks),), (read_spec("t", *blocks),))
    assert kvd.code(event) == ""
    assert kvd.open(1, (spec(*blocks),)) == ""
    kvd.say(se.SaveEnded(ref, "s", True))
    assert not any(isinstance(effect, fx.SendOffer) for effect in kvd.sent)
    assert kvd.machine.state.outgoing["t"].failed == "not_in_pool"
    assert not kvd.table.span_readers


def test_a_read_of_the_pool_goes_on_beside_a_step_of_other_blocks() -> None:
    """And beside it a save of the step may name a block that was poisoned meanwhile."""
    kvd = StepKvd()
    read, one = kvd.reserve("r", 2)
    (two,) = kvd.reserve("q")
    redirect(kvd, (read,))
    save = se.SaveSpec("s", (one, two), (4, 4), ("r", "q"))
    assert kvd.open(1, (save,)) == ""
    kvd.abort("q")
    assert kvd.code(se.Written(slot(), 0, step=1)) == ""
    found = kvd.machine.state.outgoing["t"].open[0, 0]
    kvd.tell(ev.ClaimCame(READER, found.ref, found.read, 1))
    kvd.tell(ev.EndCame(READER, found.ref, found.read, True))
    assert not kvd.table.span_readers
