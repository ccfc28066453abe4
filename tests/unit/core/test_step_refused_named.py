"""Layers that name a step which kvd has refused: each is decided as if it had asked for itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest

from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.check import problems
from kvd.core.steps import STEPS_MAX
from kvd.core.use_events import ACQUIRED, COMPUTED, LOADED, SAVED, WRITTEN, Used, parts
from tests.unit.core.step_kvd import LAYERS, StepKvd, load, redirect, slot, spec
from tests.unit.core.tiny_kvd import SCHEDULER, WORKERS

Refused = Callable[[StepKvd], se.StepOpened]
"""Brings a kvd somewhere, and says which step it refuses there."""


def opened(number: int, saves: Any = (), loads: Any = ()) -> se.StepOpened:
    return se.StepOpened(WORKERS[0], number, tuple(loads), tuple(saves))


def not_reserved(kvd: StepKvd) -> se.StepOpened:
    return opened(1, [spec(3)])


def of_another(kvd: StepKvd) -> se.StepOpened:
    return opened(1, [spec(*kvd.reserve("q"), who="r")])


def poisoned(kvd: StepKvd) -> se.StepOpened:
    """Also a target of a step that is open."""
    blocks = kvd.reserve("r", 2)
    assert kvd.open(1, (spec(*blocks),)) == ""
    kvd.ask(ev.BlocksPoisoned(0, SCHEDULER, blocks[:1]))
    return opened(2, [spec(*blocks)])


def read(kvd: StepKvd) -> se.StepOpened:
    """Layer 0 is read remotely; layer 1 is not."""
    blocks = kvd.reserve("r")
    redirect(kvd, blocks)
    return opened(1, [spec(*blocks)])


def twice(kvd: StepKvd) -> se.StepOpened:
    (block,) = kvd.reserve("r")
    return opened(1, [spec(block, block)])


def two_saves(kvd: StepKvd) -> se.StepOpened:
    """No step can have them, but each layer can."""
    one, two = kvd.reserve("r", 2)
    return opened(1, [spec(one), spec(two, saver="t")])


def too_many(kvd: StepKvd) -> se.StepOpened:
    for number in range(1, STEPS_MAX + 1):
        assert kvd.open(number) == ""
    return opened(STEPS_MAX + 1, [spec(*kvd.reserve("r"))])


SAVES: Final = (not_reserved, of_another, poisoned, read, twice, two_saves, too_many)


def not_written(kvd: StepKvd) -> se.StepOpened:
    return opened(1, loads=[load(*kvd.reserve("r"))])


def half_written(kvd: StepKvd) -> se.StepOpened:
    """Layer 0 can be loaded, and layer 1 cannot."""
    blocks = kvd.reserve("r")
    kvd.save_layer(slot(index=3), 0, blocks, "r")
    return opened(1, loads=[load(*blocks)])


def not_pinned(kvd: StepKvd) -> se.StepOpened:
    return opened(1, loads=[load(*kvd.fill("q"))])


def being_saved(kvd: StepKvd) -> se.StepOpened:
    blocks = kvd.fill("r")
    assert kvd.code(se.Written(slot(index=2), 1, (spec(*blocks),))) == ""
    return opened(1, loads=[load(*blocks)])


LOADS: Final = (not_written, half_written, not_pinned, being_saved)


def refuse(kvd: StepKvd, story: Refused) -> se.StepOpened:
    event = story(kvd)
    assert kvd.code(event) != ""
    return event


def outcome(kvd: StepKvd, *events: Any) -> Any:
    """First code, effects, books and counters; and that the books add up."""
    codes = kvd.say(*events)
    counts = {name: count for name, count in kvd.machine.state.counters.items() if count}
    assert problems(kvd.machine.state) == []
    return next(filter(None, codes), ""), kvd.sent[:-1], kvd.books(), counts


@pytest.mark.parametrize("layer", range(LAYERS + 1))
@pytest.mark.parametrize("story", SAVES, ids=lambda story: story.__name__)
def test_a_save_is_decided_alone(story: Refused, layer: int) -> None:
    kvd, other = StepKvd(), StepKvd()
    number, same = refuse(kvd, story).number, refuse(other, story)
    said = outcome(kvd, se.Written(slot(), layer, step=number))
    assert said == outcome(other, se.Written(slot(), layer, same.saves))


@pytest.mark.parametrize("layer", range(LAYERS + 1))
@pytest.mark.parametrize("story", LOADS, ids=lambda story: story.__name__)
def test_a_load_is_decided_alone(story: Refused, layer: int) -> None:
    kvd, other = StepKvd(), StepKvd()
    number, same = refuse(kvd, story).number, refuse(other, story)
    said = outcome(kvd, se.Acquired(slot(), layer, step=number))
    assert said == outcome(other, se.Acquired(slot(), layer, same.loads))


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("story", [*SAVES, *LOADS], ids=lambda story: story.__name__)
def test_a_tenancy_is_taken_apart(story: Refused, layer: int) -> None:
    kvd, other = StepKvd(), StepKvd()
    number, same = refuse(kvd, story).number, refuse(other, story)
    loads = number if same.loads else 0
    did = ACQUIRED | WRITTEN | COMPUTED | (LOADED if loads else SAVED)
    told = Used(slot(), layer, did, loads, 0 if loads else number, "s")
    alone = [
        replace(part, step=0, loads=same.loads)
        if type(part) is se.Acquired
        else replace(part, step=0, saves=same.saves)
        if type(part) is se.Written
        else part
        for part in parts(told)
    ]
    assert outcome(kvd, told) == outcome(other, *alone)


def test_some_layers_of_a_refused_step_go_well() -> None:
    kvd = StepKvd()
    number = refuse(kvd, half_written).number
    assert kvd.code(se.Acquired(slot(), 0, step=number)) == ""
    assert kvd.code(se.Acquired(slot(index=1), 1, step=number)) == "span_unwritten"
    assert [copy.step for copy in kvd.table.load_blocks.values()] == [None]
    kvd = StepKvd()
    number = refuse(kvd, two_saves).number
    assert kvd.code(se.Written(slot(), 0, step=number)) == ""
    assert [copy.step for copy in kvd.table.save_blocks.values()] == [None, None]


def test_what_is_not_known_of_it_may_have_been_copied() -> None:
    """An event of a later kind that names a refused step, and targets of one that is open."""
    kvd = StepKvd()
    blocks = kvd.fill("r")
    assert kvd.open(1, (spec(*blocks),)) == ""
    number = refuse(kvd, lambda kvd: opened(2, [spec(*blocks), spec(3, saver="t")])).number
    assert kvd.code(Used(slot(), 0, 1 << 20, 0, number, "s")) == "frame_malformed"
    assert kvd.state(blocks[0]) == "poisoned"


def test_it_is_forgotten_when_it_is_closed() -> None:
    kvd = StepKvd()
    number = refuse(kvd, two_saves).number
    kvd.close(number)
    kvd.close(number)
    assert not kvd.member().refused
    assert kvd.code(se.Written(slot(), 0, step=number)) == "frame_malformed"
    assert kvd.member().slots[0].is_free


def test_the_latest_are_remembered() -> None:
    kvd = StepKvd()
    for number in range(1, STEPS_MAX + 2):
        assert kvd.open(number, (spec(3),)) == "block_not_reserved"
    assert len(kvd.member().refused) == STEPS_MAX
    assert kvd.code(se.Written(slot(), 0, step=1)) == "frame_malformed"
    assert kvd.code(se.Written(slot(), 0, step=2)) == "block_not_reserved"
    assert problems(kvd.machine.state) == []


def test_a_number_that_fell_is_not_remembered() -> None:
    """It would take the place of another step."""
    kvd = StepKvd()
    blocks = kvd.reserve("r", 2)
    assert kvd.open(1, (spec(blocks[0]),)) == ""
    assert kvd.open(1, (spec(blocks[1]),)) == "frame_malformed"
    assert not kvd.member().refused
    assert kvd.code(se.Written(slot(), 0, step=1)) == ""
    assert [copy.blocks for copy in kvd.table.save_blocks.values()] == [blocks[:1]]


def test_it_goes_with_its_member() -> None:
    kvd = StepKvd()
    number = refuse(kvd, two_saves).number
    member = kvd.member()
    assert kvd.code(se.Written(slot(), 0, step=number)) == ""
    kvd.tell(ev.MemberDied(WORKERS[0]))
    assert not member.refused


def test_saves_of_its_own_beside_it_are_refused() -> None:
    kvd = StepKvd()
    number = refuse(kvd, two_saves).number
    (block,) = kvd.reserve("r")
    both = se.Written(slot(), 0, (spec(block),), step=number)
    assert kvd.code(both) == "frame_malformed"
    assert kvd.code(se.Acquired(slot(), 0, (load(block),), number)) == "frame_malformed"
