"""Steps of members that are refused: why, and that nothing changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.state import Limits
from kvd.core.steps import STEPS_MAX
from tests.unit.core.step_kvd import StepKvd, load, redirect, slot, spec
from tests.unit.core.tiny_kvd import SCHEDULER, WORKERS

Refused = tuple[str, se.StepOpened, int]


def opened(
    number: int = 1,
    *,
    rank: int = 0,
    saves: tuple[se.SaveSpec, ...] = (),
    loads: tuple[se.LoadSpec, ...] = (),
) -> se.StepOpened:
    return se.StepOpened(WORKERS[rank], number, loads, saves)


# What is refused, and changes nothing ----------------------------------------------------------


def not_reserved(kvd: StepKvd) -> Refused:
    kvd.reserve("r")
    return "block_not_reserved", opened(saves=(spec(5),)), 0


def no_such_block(kvd: StepKvd) -> Refused:
    return "block_not_reserved", opened(saves=(spec(99),)), 0


def of_another_request(kvd: StepKvd) -> Refused:
    return "block_not_reserved", opened(saves=(spec(*kvd.reserve("q")),)), 0


def poisoned_target(kvd: StepKvd) -> Refused:
    blocks = kvd.reserve("r")
    kvd.ask(ev.BlocksPoisoned(0, SCHEDULER, blocks))
    return "block_poisoned", opened(saves=(spec(*blocks),)), 0


def ready_target(kvd: StepKvd) -> Refused:
    blocks = kvd.fill("r")
    kvd.commit("r", *blocks)
    return "block_not_reserved", opened(saves=(spec(*blocks),)), 0


def too_many_tokens(kvd: StepKvd) -> Refused:
    return "limit_reached", opened(saves=(spec(*kvd.reserve("r"), tokens=5),)), 0


def no_tokens(kvd: StepKvd) -> Refused:
    return "limit_reached", opened(saves=(spec(*kvd.reserve("r"), tokens=0),)), 0


def two_saves(kvd: StepKvd) -> Refused:
    one, two = kvd.reserve("r", 2)
    return "frame_malformed", opened(saves=(spec(one), spec(two, saver="t"))), 0


def one_target_twice(kvd: StepKvd) -> Refused:
    (block,) = kvd.reserve("r")
    return "frame_malformed", opened(saves=(spec(block, block),)), 0


def targets_without_requests(kvd: StepKvd) -> Refused:
    save = se.SaveSpec("s", kvd.reserve("r"), (4,))
    return "frame_malformed", opened(saves=(save,)), 0


def not_a_contributor(kvd: StepKvd) -> Refused:
    return "not_contributor", opened(rank=1, saves=(spec(*kvd.reserve("r")),)), 1


def another_member(kvd: StepKvd) -> Refused:
    return "stale_incarnation", opened(rank=1, loads=(load(*kvd.fill("r")),)), 0


def number_twice(kvd: StepKvd) -> Refused:
    blocks = kvd.reserve("r")
    assert kvd.open(4) == ""
    kvd.close(4)
    return "frame_malformed", opened(4, saves=(spec(*blocks),)), 0


def number_falls(kvd: StepKvd) -> Refused:
    assert kvd.open(4) == ""
    return "frame_malformed", opened(3), 0


def no_number(kvd: StepKvd) -> Refused:
    return "frame_malformed", opened(0), 0


def too_many_steps(kvd: StepKvd) -> Refused:
    for number in range(1, STEPS_MAX + 1):
        assert kvd.open(number) == ""
    return "busy", opened(STEPS_MAX + 1, saves=(spec(*kvd.reserve("r")),)), 0


def source_not_written(kvd: StepKvd) -> Refused:
    return "span_unwritten", opened(loads=(load(*kvd.reserve("r")),)), 0


def one_layer_not_written(kvd: StepKvd) -> Refused:
    blocks = kvd.reserve("r")
    kvd.save_layer(slot(), 0, blocks, "r")
    return "span_unwritten", opened(loads=(load(*blocks),)), 0


def source_of_another(kvd: StepKvd) -> Refused:
    return "block_not_reserved", opened(loads=(load(*kvd.fill("q")),)), 0


def ready_source_of_another(kvd: StepKvd) -> Refused:
    blocks = kvd.fill("q")
    kvd.commit("q", *blocks)
    return "block_not_reserved", opened(loads=(load(*blocks),)), 0


def poisoned_source(kvd: StepKvd) -> Refused:
    blocks = kvd.fill("r")
    kvd.ask(ev.BlocksPoisoned(0, SCHEDULER, blocks))
    return "block_poisoned", opened(loads=(load(*blocks),)), 0


def tokens_beyond_the_blocks(kvd: StepKvd) -> Refused:
    return "frame_malformed", opened(loads=(load(*kvd.fill("r"), tokens=5),)), 0


def nothing_to_load(kvd: StepKvd) -> Refused:
    return "frame_malformed", opened(loads=(se.LoadSpec("r", (), 0),)), 0


def ended_request(kvd: StepKvd) -> Refused:
    blocks = kvd.fill("r")
    kvd.machine.state.engines["p"].requests["r"].ended = "quarantined"
    return "request_ended", opened(loads=(load(*blocks),)), 0


def source_that_is_saved(kvd: StepKvd) -> Refused:
    blocks = kvd.fill("r")
    assert kvd.code(se.Written(slot(), 0, (spec(*blocks),))) == ""
    return "span_busy", opened(loads=(load(*blocks),)), 0


def source_that_may_be_saved(kvd: StepKvd) -> Refused:
    blocks = kvd.fill("r")
    assert kvd.open(1, (spec(*blocks),)) == ""
    return "span_busy", opened(2, loads=(load(*blocks),)), 0


def source_that_another_may_save(kvd: StepKvd) -> Refused:
    blocks = kvd.fill("r")
    assert kvd.open(1, (spec(*blocks),)) == ""
    return "span_busy", opened(rank=1, loads=(load(*blocks),)), 1


def target_that_another_may_load(kvd: StepKvd) -> Refused:
    blocks = kvd.fill("r")
    assert kvd.open(1, loads=(load(*blocks),), rank=1) == ""
    return "span_busy", opened(saves=(spec(*blocks),)), 0


def target_that_another_loads(kvd: StepKvd) -> Refused:
    blocks = kvd.fill("r")
    assert kvd.code(se.Acquired(slot(rank=1), 0, (load(*blocks),)), 1) == ""
    return "span_busy", opened(saves=(spec(*blocks),)), 0


def target_that_is_read(kvd: StepKvd) -> Refused:
    blocks = kvd.fill("r")
    redirect(kvd, blocks)
    return "span_busy", opened(saves=(spec(*blocks),)), 0


REFUSALS = (
    not_reserved, no_such_block, of_another_request, poisoned_target, ready_target,
    too_many_tokens, no_tokens, two_saves, one_target_twice, targets_without_requests,
    not_a_contributor, another_member, number_twice, number_falls, no_number, too_many_steps,
    source_not_written, one_layer_not_written, source_of_another, ready_source_of_another,
    poisoned_source, tokens_beyond_the_blocks, nothing_to_load, ended_request,
    source_that_is_saved, source_that_may_be_saved, source_that_another_may_save,
    target_that_another_may_load, target_that_another_loads, target_that_is_read,
)  # fmt: skip


@pytest.mark.parametrize("prepare", REFUSALS, ids=lambda prepare: prepare.__name__)
def test_step_is_refused_and_changes_nothing(prepare: Callable[[StepKvd], Refused]) -> None:
    kvd = StepKvd()
    code, event, rank = prepare(kvd)
    before = kvd.books(rank)
    assert kvd.code(event, rank) == code
    assert kvd.books(rank) == before


@pytest.mark.parametrize("what", ["saves", "loads"])
def test_a_step_of_too_many_blocks_is_refused(what: str) -> None:
    kvd = StepKvd(limits=Limits(blocks_per_request=2))
    one, two = kvd.fill("r", 2)
    (three,) = kvd.fill("q")
    if what == "saves":
        save = se.SaveSpec("s", (one, two, three), (4, 4, 4), ("r", "r", "q"))
        event = opened(saves=(save,))
    else:
        event = opened(loads=(load(one, two), load(three, who="q")))
    before = kvd.books()
    assert kvd.code(event) == "limit_reached"
    assert kvd.books() == before


@pytest.mark.parametrize(
    "event",
    [
        se.Written(slot(), 0, step=7),
        se.Acquired(slot(), 0, step=7),
        se.Written(slot(), 0, (spec(0),), step=1),
        se.Acquired(slot(), 0, (load(0),), step=1),
        se.Written(slot(), 2, step=1),
        se.Acquired(slot(), 2, step=1),
        se.Acquired(slot(), -1, step=1),
    ],
)
def test_a_layer_of_no_step_is_refused_and_arms_nothing(event: se.SlotEvent) -> None:
    kvd = StepKvd()
    blocks = kvd.fill("r")
    assert kvd.open(1, (spec(*blocks),), (load(*blocks),)) == ""
    assert kvd.code(event) in ("frame_malformed", "layer_unmapped")
    assert kvd.member().slots[0].is_free
    assert not kvd.table.save_blocks
    assert not kvd.table.load_blocks


def test_a_refused_number_is_not_used_again() -> None:
    """Copies may have named it, and would be taken for those of another step."""
    kvd = StepKvd()
    assert kvd.open(1, (spec(3),)) == "block_not_reserved"
    kvd.close(1)
    assert kvd.open(1, (spec(*kvd.reserve("r")),)) == "frame_malformed"
    assert kvd.open(2, (spec(*kvd.reserve("r")),)) == ""


def test_a_step_of_nothing_keeps_nothing() -> None:
    kvd = StepKvd()
    assert kvd.open(1) == kvd.open(2, (spec(),)) == ""
    assert kvd.code(se.Acquired(slot(), 0, step=1)) == ""
    assert kvd.code(se.Written(slot(), 0, step=1)) == ""
    kvd.close(1)
    kvd.close(2)
    kvd.close(2)
    kvd.close(9)
    assert not kvd.table.steps
    assert not kvd.table.saving
    assert not kvd.table.pins


def test_members_of_another_shard_are_not_asked() -> None:
    kvd = StepKvd(num_shards=2)
    blocks = kvd.fill("r")
    assert kvd.open(1, (spec(*blocks),)) == ""
    for layer in (0, 1):
        kvd.save_layer(slot(index=layer, rank=1), layer, blocks, "r")
    assert kvd.open(1, loads=(load(*blocks),), rank=1) == ""
    assert kvd.open(2, (spec(*blocks),), rank=1) == ""


def test_a_member_without_a_shard_of_the_layout_has_no_step() -> None:
    kvd = StepKvd()
    kvd.member().shard = 1
    assert kvd.open(1, (spec(*kvd.reserve("r")),)) == "frame_malformed"
    kvd.member().shard = 0
