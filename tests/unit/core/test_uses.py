"""Tenancies that are told in one event: the same comes of it as of event by event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from kvd.core import effects as fx
from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core import use_events as ue
from kvd.core import uses
from kvd.core.use_events import ACQUIRED, COMPUTED, LOADED, SAVED, WRITTEN, Used, parts
from kvd.wire import slot_items
from tests.unit.core.step_kvd import LAYERS, StepKvd, load, redirect, slot, spec
from tests.unit.core.tiny_kvd import SCHEDULER

SAVING: Final = ACQUIRED | WRITTEN | COMPUTED | SAVED
LOADING: Final = ACQUIRED | LOADED | WRITTEN | COMPUTED

Story = Callable[[StepKvd], Used]
"""Brings a kvd somewhere, and says what is told then."""


def test_the_wire_has_the_same_numbers() -> None:
    for name in ("ACQUIRED", "LOADED", "WRITTEN", "COMPUTED", "SAVED", "DID_MAX"):
        assert getattr(ue, name) == getattr(slot_items, name)


# What is carried out at once ----------------------------------------------------------------------


def saved(kvd: StepKvd) -> Used:
    blocks = kvd.reserve("r", 2)
    kvd.open(1, (spec(*blocks),))
    return Used(slot(), 1, SAVING, 0, 1, "s")


def loaded(kvd: StepKvd) -> Used:
    kvd.open(1, loads=(load(*kvd.fill("r", 2)),))
    return Used(slot(), 1, LOADING, 1)


def both(kvd: StepKvd) -> Used:
    kvd.open(1, loads=(load(*kvd.fill("r", 2)),))
    kvd.open(2, (spec(*kvd.reserve("r")),))
    return Used(slot(), 0, ue.DID_MAX, 1, 2, "s")


def neither(kvd: StepKvd) -> Used:
    return Used(slot(), 0, ACQUIRED | WRITTEN | COMPUTED)


def of_no_layer(kvd: StepKvd) -> Used:
    return Used(slot(), -1, ACQUIRED | WRITTEN | COMPUTED)


def some_poisoned(kvd: StepKvd) -> Used:
    """The rows of the others are good."""
    event = saved(kvd)
    kvd.reserve("q")
    bad = kvd.member().steps[1].saves[0].blocks[:1]
    kvd.ask(ev.BlocksPoisoned(0, SCHEDULER, bad))
    return event


def left_by_its_request(kvd: StepKvd) -> Used:
    blocks = kvd.fill("r", 2)
    kvd.commit("r", *blocks)
    kvd.open(1, loads=(load(*blocks),))
    kvd.end("r")
    return Used(slot(), 1, LOADING, 1)


def a_second_layer(kvd: StepKvd) -> Used:
    kvd.say(saved(kvd))
    return Used(slot(1), 0, SAVING, 0, 1, "s")


AT_ONCE: Final = (
    saved, loaded, both, neither, of_no_layer, some_poisoned, left_by_its_request, a_second_layer,
)  # fmt: skip

# What is taken apart ------------------------------------------------------------------------------


def in_part(kvd: StepKvd) -> Used:
    saved(kvd)
    return Used(slot(), 1, ACQUIRED | WRITTEN, 0, 1)


def without_its_load_ended(kvd: StepKvd) -> Used:
    loaded(kvd)
    return Used(slot(), 1, ACQUIRED | WRITTEN | COMPUTED, 1)


def without_its_save_ended(kvd: StepKvd) -> Used:
    saved(kvd)
    return Used(slot(), 1, ACQUIRED | WRITTEN | COMPUTED, 0, 1, "s")


def of_another_epoch(kvd: StepKvd) -> Used:
    saved(kvd)
    return Used(slot(1), 1, SAVING, 0, 1, "s")


def of_another_slot(kvd: StepKvd) -> Used:
    saved(kvd)
    return Used(slot(index=9), 1, SAVING, 0, 1, "s")


def of_another_member(kvd: StepKvd) -> Used:
    saved(kvd)
    return Used(slot(rank=1), 1, SAVING, 0, 1, "s")


def of_a_held_slot(kvd: StepKvd) -> Used:
    event = saved(kvd)
    kvd.say(se.Acquired(slot(), 1))
    return event


def of_a_poisoned_tenancy(kvd: StepKvd) -> Used:
    event = saved(kvd)
    kvd.say(se.Acquired(slot(), 1), se.Poisoned(slot()))
    return event


def of_a_closed_step(kvd: StepKvd) -> Used:
    event = saved(kvd)
    kvd.close(1)
    return event


def of_a_step_of_loads(kvd: StepKvd) -> Used:
    loaded(kvd)
    return Used(slot(), 1, SAVING, 0, 1, "s")


def of_a_step_of_saves(kvd: StepKvd) -> Used:
    saved(kvd)
    return Used(slot(), 1, LOADING, 1)


def of_no_such_layer(kvd: StepKvd) -> Used:
    saved(kvd)
    return Used(slot(), LAYERS, SAVING, 0, 1, "s")


def of_no_such_layer_loaded(kvd: StepKvd) -> Used:
    loaded(kvd)
    return Used(slot(), LAYERS, LOADING, 1)


def by_another_saver(kvd: StepKvd) -> Used:
    saved(kvd)
    return Used(slot(), 1, SAVING, 0, 1, "t")


def all_poisoned(kvd: StepKvd) -> Used:
    event = saved(kvd)
    kvd.ask(ev.BlocksPoisoned(0, SCHEDULER, kvd.member().steps[1].saves[0].blocks))
    return event


def a_source_poisoned(kvd: StepKvd) -> Used:
    event = loaded(kvd)
    kvd.ask(ev.BlocksPoisoned(0, SCHEDULER, kvd.member().steps[1].sources[:1]))
    return event


def of_an_ended_request(kvd: StepKvd) -> Used:
    event = loaded(kvd)
    kvd.machine.state.engines["p"].requests["r"].ended = "a slot is quarantined"
    return event


def saved_twice_at_a_time(kvd: StepKvd) -> Used:
    event = saved(kvd)
    kvd.say(se.Written(slot(index=1), 1, step=1))
    return event


def saved_while_it_is_loaded(kvd: StepKvd) -> Used:
    blocks = kvd.fill("r")
    kvd.open(1, loads=(load(*blocks),))
    kvd.say(se.Acquired(slot(index=1), 1, step=1))
    kvd.open(2, (spec(*blocks),))
    return Used(slot(), 1, SAVING, 0, 2, "s")


def loaded_while_it_is_saved(kvd: StepKvd) -> Used:
    blocks = kvd.fill("r")
    kvd.open(1, loads=(load(*blocks),))
    kvd.open(2, (spec(*blocks),))
    kvd.say(se.Written(slot(index=1), 1, step=2))
    return Used(slot(), 1, LOADING, 1)


def read_by_others(kvd: StepKvd) -> Used:
    blocks = kvd.reserve("r")
    redirect(kvd, blocks)
    kvd.open(1, (spec(*blocks),))
    return Used(slot(), 0, SAVING, 0, 1, "s")


APART: Final = (
    in_part, without_its_load_ended, without_its_save_ended, of_another_epoch, of_another_slot,
    of_another_member, of_a_held_slot, of_a_poisoned_tenancy, of_a_closed_step, of_a_step_of_loads,
    of_a_step_of_saves, of_no_such_layer, of_no_such_layer_loaded, by_another_saver, all_poisoned,
    a_source_poisoned, of_an_ended_request, saved_twice_at_a_time, saved_while_it_is_loaded,
    loaded_while_it_is_saved, read_by_others,
)  # fmt: skip


def outcome(kvd: StepKvd, *events: Any) -> Any:
    """First code, effects, books and counters of a batch."""
    codes = kvd.say(*events)
    effects = [effect for effect in kvd.sent if not isinstance(effect, fx.Reply)]
    counts = {name: count for name, count in kvd.machine.state.counters.items() if count}
    return next(filter(None, codes), ""), effects, kvd.books(), counts


@pytest.mark.parametrize("story", [*AT_ONCE, *APART], ids=lambda story: story.__name__)
def test_the_same_comes_of_it_as_event_by_event(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[bool] = []
    at_once = uses.at_once

    def counted(*args: Any) -> bool:
        done.append(at_once(*args))
        return done[-1]

    monkeypatch.setattr(uses, "at_once", counted)
    kvd, other = StepKvd(), StepKvd()
    event, same = story(kvd), story(other)
    del done[:]
    assert outcome(kvd, event) == outcome(other, *parts(same))
    assert done == [story in AT_ONCE]


@pytest.mark.parametrize("story", [saved, both], ids=lambda story: story.__name__)
def test_checksums_are_forgotten_span_by_span(story: Story) -> None:
    kvd, other = StepKvd(checksums="on"), StepKvd(checksums="on")
    event, same = story(kvd), story(other)
    told = outcome(kvd, event)
    assert told == outcome(other, *parts(same))
    assert any(isinstance(effect, fx.WriteSums) for effect in told[1])


@pytest.mark.parametrize("did", [0, ue.DID_MAX + 1, 1 << 40])
def test_what_is_not_known_is_refused_and_may_have_been_copied(did: int) -> None:
    kvd = StepKvd()
    blocks = kvd.fill("r")
    kvd.open(1, (spec(*blocks),))
    before = kvd.member().slots
    assert kvd.code(Used(slot(), 0, did, 0, 1, "s")) == "frame_malformed"
    assert kvd.member().slots == before
    assert kvd.state(blocks[0]) == "poisoned"


# What a step has saved ----------------------------------------------------------------------------


def step_saved(kvd: StepKvd, layers: int = LAYERS) -> tuple[int, ...]:
    """Two blocks of which so many layers were saved at once."""
    blocks = kvd.reserve("r", 2)
    kvd.open(1, (spec(*blocks),))
    for layer in range(layers):
        assert kvd.code(Used(slot(layer), layer, SAVING, 0, 1, "s")) == ""
    assert kvd.table.marks is not None
    return blocks


def test_it_is_ready_when_the_step_is_closed() -> None:
    kvd = StepKvd()
    blocks = step_saved(kvd)
    kvd.commit("r", *blocks)
    assert {kvd.state(block) for block in blocks} == {"filling"}
    kvd.close(1)
    assert {kvd.state(block) for block in blocks} == {"ready"}
    assert kvd.table.marks is None


def test_a_layer_short_it_is_not_ready() -> None:
    kvd = StepKvd()
    blocks = step_saved(kvd, LAYERS - 1)
    kvd.commit("r", *blocks)
    kvd.close(1)
    assert {kvd.state(block) for block in blocks} == {"filling"}


def test_it_can_be_loaded_layer_by_layer_before_the_step_is_closed() -> None:
    kvd = StepKvd()
    blocks = step_saved(kvd, 1)
    assert kvd.code(se.Acquired(slot(index=1), 1, (load(*blocks),))) == "span_unwritten"
    assert kvd.code(se.Acquired(slot(index=1), 0, (load(*blocks),))) == ""


def test_the_next_step_can_load_it() -> None:
    kvd = StepKvd()
    blocks = step_saved(kvd)
    kvd.close(1)
    assert kvd.open(2, loads=(load(*blocks),)) == ""


def test_what_one_step_saved_does_not_undo_what_came_later() -> None:
    kvd = StepKvd()
    blocks = step_saved(kvd)
    assert kvd.open(2, (spec(*blocks, tokens=3),)) == ""
    assert kvd.code(Used(slot(LAYERS), 0, SAVING, 0, 2, "s")) == ""
    kvd.say(se.Written(slot(index=1), 0, (spec(blocks[0], tokens=2),)))
    kvd.say(se.SaveEnded(slot(index=1), "s", True), se.Computed(slot(index=1)))
    kvd.table.settle()
    assert [kvd.table.fills[block].tokens for block in blocks] == [[2, 4], [3, 4]]


def test_what_is_fewer_now_cannot_be_loaded() -> None:
    kvd = StepKvd()
    blocks = kvd.fill("r")
    assert kvd.open(1, (spec(*blocks, tokens=3),)) == ""
    assert kvd.code(Used(slot(), 0, SAVING, 0, 1, "s")) == ""
    event = se.Acquired(slot(index=1), 0, (load(*blocks),))
    assert kvd.code(event) == "span_unwritten"


def test_it_is_counted_before_the_step_is_closed() -> None:
    kvd = StepKvd()
    blocks = step_saved(kvd, 1)
    assert [kvd.table.num_saved(block) for block in blocks] == [1, 1]


def test_a_block_that_nobody_needs_is_free_after_the_step() -> None:
    kvd = StepKvd()
    blocks = step_saved(kvd)
    kvd.abort("r")
    assert {kvd.state(block) for block in blocks} == {"poisoned"}
    kvd.close(1)
    assert {kvd.state(block) for block in blocks} == {"reset"}


# Steps that load what was loaded before -----------------------------------------------------------


def loaded_before(kvd: StepKvd) -> tuple[int, ...]:
    """Blocks that a step has loaded: how many tokens each layer has is known."""
    blocks = kvd.fill("r", 2)
    assert kvd.open(1, loads=(load(*blocks),)) == ""
    kvd.close(1)
    assert all(kvd.table.fills[block].least == {0: 4} for block in blocks)
    return blocks


def test_the_next_step_loads_it_again() -> None:
    kvd = StepKvd()
    blocks = loaded_before(kvd)
    assert kvd.open(2, loads=(load(*blocks),)) == ""


def test_fewer_tokens_of_one_layer_are_seen() -> None:
    kvd = StepKvd()
    blocks = loaded_before(kvd)
    kvd.say(se.Written(slot(), 1, (spec(blocks[1], tokens=3),)))
    kvd.say(se.SaveEnded(slot(), "s", True), se.Computed(slot()))
    assert kvd.open(2, loads=(load(*blocks),)) == "span_unwritten"
    assert kvd.open(3, loads=(load(*blocks, tokens=7),)) == ""


def test_fewer_tokens_by_a_step_are_seen() -> None:
    kvd = StepKvd()
    blocks = loaded_before(kvd)
    assert kvd.open(2, (spec(*blocks, tokens=3),)) == ""
    assert kvd.code(Used(slot(), 0, SAVING, 0, 2, "s")) == ""
    assert kvd.open(3, loads=(load(*blocks),)) == "span_busy"
    kvd.close(2)
    assert kvd.open(4, loads=(load(*blocks),)) == "span_unwritten"


def test_each_shard_has_its_own() -> None:
    kvd = StepKvd(2)
    blocks = loaded_before(kvd)
    assert kvd.open(1, loads=(load(*blocks),), rank=1) == "span_unwritten"


def test_a_block_that_was_given_away_is_not_loaded() -> None:
    kvd = StepKvd()
    blocks = loaded_before(kvd)
    kvd.ask(ev.BlocksPoisoned(0, SCHEDULER, blocks[:1]))
    assert kvd.open(2, loads=(load(*blocks),)) == "block_poisoned"
    assert kvd.open(3, loads=(load(*blocks, who="q"),)) == "block_poisoned"
    assert kvd.open(4, loads=(load(*blocks[1:], who="q"),)) == "block_not_reserved"
