"""Steps whose requests, copies or members come to a bad end."""

from __future__ import annotations

import pytest

from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.check import problems
from kvd.core.holds import HoldKind, Truth
from kvd.core.ids import RequestKey, StepId
from tests.unit.core.step_kvd import StepKvd, load, slot, spec
from tests.unit.core.tiny_kvd import READER, SCHEDULER, WORKERS, read_spec

# Requests that end under a step ------------------------------------------------------------------


def test_the_end_of_one_request_is_not_that_of_another_s_saves() -> None:
    kvd = StepKvd()
    (one,), (two,) = kvd.reserve("r"), kvd.reserve("q")
    save = se.SaveSpec("s", (one, two), (4, 4), ("r", "q"))
    assert kvd.open(1, (save,)) == ""
    kvd.abort("r")
    for layer, named in ((0, {"step": 1}), (1, {"saves": (save,)})):
        assert kvd.code(se.Written(slot(index=layer), layer, **named)) == ""
        kvd.say(se.SaveEnded(slot(index=layer), "s", True))
    kvd.commit("q", two)
    kvd.close(1)
    assert (kvd.state(one), kvd.state(two)) == ("reset", "ready")


@pytest.mark.parametrize("whole", [True, False])
def test_the_end_of_one_request_is_not_that_of_another_s_loads(whole: bool) -> None:
    kvd = StepKvd()
    one, two = kvd.fill("r"), kvd.fill("q")
    loads = (load(*one), load(*two, who="q"))
    assert kvd.open(1, loads=loads) == ""
    kvd.abort("r")
    named = se.Acquired(slot(), 0, step=1) if whole else se.Acquired(slot(), 0, loads)
    assert kvd.code(named) == ""
    kvd.close(1)
    kvd.say(se.LoadEnded(slot(), True))
    assert (kvd.state(one[0]), kvd.state(two[0])) == ("reset", "filling")


def test_nobody_s_rows_are_neither_saved_nor_loaded() -> None:
    kvd = StepKvd()
    blocks = kvd.fill("r")
    assert kvd.open(1, (spec(*blocks),), (load(*blocks),)) == ""
    kvd.abort("r")
    assert kvd.code(se.Acquired(slot(), 0, step=1)) == "block_poisoned"
    assert kvd.code(se.Written(slot(), 0, step=1)) == "block_poisoned"
    kvd.close(1)
    assert kvd.state(blocks[0]) == "reset"


def test_loads_of_a_quarantined_request_are_refused() -> None:
    kvd = StepKvd()
    assert kvd.open(1, loads=(load(*kvd.fill("r")),)) == ""
    kvd.machine.state.engines["p"].requests["r"].ended = "quarantined"
    assert kvd.code(se.Acquired(slot(), 0, step=1)) == "request_ended"


def test_a_span_that_is_saved_now_is_not_loaded_for_who_is_gone() -> None:
    kvd = StepKvd()
    one, two = kvd.fill("r"), kvd.fill("q")
    assert kvd.open(1, loads=(load(*one), load(*two, who="q"))) == ""
    assert kvd.code(se.Written(slot(index=1), 0, (spec(*one),))) == ""
    kvd.abort("r")
    assert kvd.code(se.Acquired(slot(), 0, step=1)) == "block_poisoned"
    assert kvd.code(se.Acquired(slot(), 1, step=1)) == ""


# Copies that end badly ---------------------------------------------------------------------------


def test_a_failed_save_of_a_step_poisons_its_targets() -> None:
    kvd = StepKvd()
    blocks = kvd.reserve("r")
    assert kvd.open(1, (spec(*blocks),)) == ""
    kvd.say(se.Written(slot(), 0, step=1))
    kvd.say(se.SaveEnded(slot(), "s", False))
    assert kvd.state(blocks[0]) == "poisoned"
    kvd.end("r")
    kvd.close(1)
    assert kvd.state(blocks[0]) == "reset"


def test_rows_of_a_damaged_load_go_nowhere() -> None:
    """The member may have copied them before it heard the refusal."""
    kvd = StepKvd()
    sources, targets = kvd.fill("r"), kvd.fill("r")
    assert kvd.open(1, (spec(*targets),), (load(*sources),)) == ""
    kvd.say(se.Acquired(slot(), 0, step=1))
    kvd.say(se.LoadEnded(slot(), True, (se.BadSum(sources[0], 1, 2),)))
    assert kvd.state(targets[0]) == "filling"
    assert kvd.code(se.Written(slot(), 0, step=1)) == "block_poisoned"
    assert kvd.state(targets[0]) == "poisoned"
    kvd.close(1)
    assert kvd.table.dead == {*sources, *targets}


@pytest.mark.parametrize("named", [{"step": 1}, {"saves": "explicit"}])
def test_a_refused_announcement_may_have_been_copied(named: dict[str, object]) -> None:
    """A block that was whole before is not to be believed after."""
    kvd = StepKvd()
    blocks, (other,) = kvd.fill("r"), kvd.fill("r")
    assert kvd.open(1, (spec(*blocks),)) == ""
    if "saves" in named:
        named = {"saves": (spec(*blocks, other),)}
    kvd.say(se.Acquired(slot()), se.Poisoned(slot()))
    assert kvd.code(se.Written(slot(), 0, **named)) == "poisoned"  # type: ignore[arg-type]
    assert (kvd.state(blocks[0]), kvd.state(other)) == ("poisoned", "filling")


def test_saying_it_twice_poisons_nothing() -> None:
    kvd = StepKvd()
    blocks = kvd.reserve("r")
    assert kvd.open(1, (spec(*blocks),)) == ""
    event = se.Written(slot(), 0, step=1)
    assert kvd.code(event) == ""
    assert kvd.code(event) == "already_armed"
    assert kvd.state(blocks[0]) == "filling"


def test_one_layer_is_saved_once_at_a_time() -> None:
    kvd = StepKvd()
    blocks = kvd.reserve("r")
    assert kvd.open(1, (spec(*blocks),)) == ""
    assert kvd.code(se.Written(slot(), 0, step=1)) == ""
    assert kvd.code(se.Written(slot(index=1), 0, step=1)) == "span_busy"


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (se.SaveEnded(slot(), "s", True, (4,)), "frame_malformed"),
        (se.SaveEnded(slot(), "s", True, (4, 5)), "frame_malformed"),
        (se.SaveEnded(slot(), "s", True, (), b"1234"), "frame_malformed"),
        (se.SaveEnded(slot(), "t", True), "no_such_hold"),
        (se.SaveEnded(slot(), "s", True, (4, 2)), ""),
    ],
)
def test_counts_of_a_save_of_a_step_are_checked(event: se.SaveEnded, code: str) -> None:
    kvd = StepKvd()
    blocks = kvd.reserve("r", 2)
    assert kvd.open(1, (spec(*blocks),)) == ""
    kvd.say(se.Written(slot(), 0, step=1))
    assert kvd.code(event) == code
    assert bool(kvd.table.save_blocks) == bool(code)


# Deaths and doubts -------------------------------------------------------------------------------


def test_a_dead_member_s_steps_keep_nothing() -> None:
    kvd = StepKvd()
    blocks, ready = kvd.reserve("r", 2), kvd.fill("q")
    kvd.commit("q", *ready)
    assert kvd.open(1, (spec(*blocks),)) == kvd.open(2, loads=(load(*ready, who="q"),)) == ""
    kvd.say(se.Written(slot(), 0, step=1))
    kvd.say(se.Acquired(slot(index=1), 0, step=2))
    kvd.tell(ev.MemberDied(WORKERS[0]))
    assert not kvd.table.steps
    assert not kvd.table.saving
    assert kvd.table.dead <= set(blocks)
    assert kvd.table.pins[ready[0]] == {RequestKey("p", "q")}


def test_a_member_that_dies_with_a_granted_read_keeps_no_block() -> None:
    kvd = StepKvd()
    blocks = kvd.reserve("r")
    assert kvd.open(1, (spec(*blocks),)) == ""
    read = read_spec("t")
    assert kvd.code(se.Written(slot(), 0, reads=(read,), step=1)) == ""
    kvd.tell(ev.ClaimCame(READER, slot(), read.read, 1))
    kvd.tell(ev.MemberDied(WORKERS[0]))
    assert WORKERS[0] in kvd.machine.state.members
    assert not kvd.table.steps
    assert not kvd.table.saving


def test_steps_of_who_lives_outlive_another_member() -> None:
    kvd = StepKvd(num_shards=2)
    blocks = kvd.reserve("r")
    assert kvd.open(1, (spec(*blocks),), rank=1) == ""
    kvd.tell(ev.MemberDied(WORKERS[0]))
    kvd.tell(ev.MemberDied(SCHEDULER))
    assert kvd.state(blocks[0]) == "poisoned"
    kvd.close(1, rank=1)
    assert kvd.state(blocks[0]) == "reset"


def test_a_member_that_attaches_again_has_its_steps() -> None:
    kvd = StepKvd()
    blocks = kvd.reserve("r")
    assert kvd.open(1, (spec(*blocks),)) == ""
    kvd.tell(ev.MemberSilent(WORKERS[0]))
    kvd.tick(10_000_000_000)
    assert StepId(WORKERS[0], 1) in kvd.table.steps
    assert kvd.code(se.Written(slot(), 0, step=1)) == ""


def test_a_quarantined_save_keeps_the_blocks_of_its_closed_step() -> None:
    kvd = StepKvd()
    blocks = kvd.reserve("r")
    assert kvd.open(1, (spec(*blocks),)) == ""
    kvd.say(se.Written(slot(), 0, step=1), se.Computed(slot()), se.StepClosed(WORKERS[0], 1))
    for _ in range(20):
        kvd.tick(100)
    kvd.tell(ev.FenceEnded(slot(), HoldKind.SAVE, "s", False))
    assert kvd.machine.state.counters["quarantines"] == 1
    kvd.end("r")
    assert kvd.state(blocks[0]) == "poisoned"
    assert not set(kvd.reserve("q", 7)) & set(blocks)
    kvd.say(se.SaveEnded(slot(), "s", True))
    assert kvd.state(blocks[0]) == "reset"


def test_a_save_of_which_the_truth_was_told_ends_its_step() -> None:
    kvd = StepKvd()
    blocks = kvd.reserve("r")
    assert kvd.open(1, (spec(*blocks),)) == ""
    kvd.say(se.Written(slot(), 0, step=1), se.StepClosed(WORKERS[0], 1))
    kvd.tick(260)
    kvd.tell(ev.MemberAnswered(WORKERS[0], slot(), HoldKind.SAVE, "s", Truth.ENDED_OK))
    assert not kvd.table.steps
    assert kvd.table.fills[blocks[0]].tokens == [4, 0]


def test_a_committed_block_without_its_owner_waits_for_the_step_no_longer_than_others() -> None:
    kvd = StepKvd(orphan_grace=1000)
    blocks = kvd.reserve("r")
    assert kvd.open(1, (spec(*blocks),)) == ""
    kvd.commit("r", *blocks)
    kvd.end("r")
    kvd.tick(2_000_000_000)
    assert kvd.state(blocks[0]) == "poisoned"
    kvd.close(1)
    assert kvd.state(blocks[0]) == "reset"


# What the check finds ----------------------------------------------------------------------------


def test_the_check_finds_a_step_that_lies() -> None:
    kvd = StepKvd()
    blocks = kvd.fill("r")
    assert kvd.open(1, (spec(*blocks),), (load(*blocks),)) == ""
    state, step = kvd.machine.state, StepId(WORKERS[0], 1)
    kept = kvd.table.steps[step]
    kept.copies = 1
    assert any("0 copies open, not 1" in text for text in problems(state))
    kept.copies, kept.closed = 0, True
    assert any("its member says otherwise" in text for text in problems(state))
    kept.closed = False
    kvd.table.saving.clear()
    assert any("the table has {}" in text for text in problems(state))
    kvd.table.saving.update(blocks)
    del kvd.table.steps[step]
    found = problems(state)
    assert any("keeps nothing" in text for text in found)
    assert any("which does not load it" in text for text in found)
