"""Draft layers that run several times in a step, as guesses upon guesses are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from engine_shim.testing import Delay, Fail, Hang, Rule
from engine_shim.vllm.messages import StepOrder
from tests.unit.client.waiting import until
from tests.unit.engine_shim.vllm.plans import TOKENS
from tests.unit.engine_shim.vllm.toy_worker import LAYERS, Engine, toy_plan

TEXT = "the quick brown fox jumps over the lazy dog"
FOUND = len(TEXT) // TOKENS * TOKENS
LAST = LAYERS - 1
MS = 1_000_000
LATE = (
    Rule(Delay(3 * MS), stream="save", kind="copy"),
    Rule(Delay(3 * MS), stream="load", kind="copy"),
)
HUNG_AND_FAILED = (
    Rule(Hang(), stream="load", kind="copy", nth=LAST),
    Rule(Fail(), stream="load", kind="host", nth=LAST),
)

Make = Callable[..., Engine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Engine] = []

    def build(*args: object, **options: object) -> Engine:
        made.append(Engine(monkeypatch, *args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for engine in made:
        engine.close()


@pytest.mark.parametrize("again", [(LAST,), (LAST, LAST, LAST)])
def test_a_draft_layer_may_run_again(make: Make, again: tuple[int, ...]) -> None:
    engine = make(LATE, toy_plan(drafts=1))
    engine.again = again
    assert engine.prefill("a", TEXT) == 0
    assert engine.prefill("b", TEXT) == FOUND


def test_several_draft_layers_run_in_turn_and_again(make: Make) -> None:
    engine = make(LATE, toy_plan(drafts=2, num_shared=4))
    engine.again = (LAST - 1, LAST, LAST - 1)
    assert engine.prefill("a", TEXT) == 0
    assert engine.prefill("b", TEXT) == FOUND


def test_a_buffer_is_the_draft_layer_s_until_the_step_ends(make: Make) -> None:
    engine = make((), toy_plan(drafts=1))
    pooled = engine.admit("a", TEXT)
    engine.worker.begin(StepOrder((engine.request(pooled, 0, 6),)))
    for layer in range(LAYERS):
        assert engine.worker.before_layer(layer)
        engine.worker.written(layer)
        engine.worker.computed(layer)
    slot = engine.plan.ring.slot_of[LAST]
    assert "compute" in engine.kvd.holds(slot)
    assert engine.worker.before_layer(LAST)
    engine.worker.end()
    assert "compute" not in engine.kvd.holds(slot)
    assert engine.worker.take_report() is None


def test_draft_layers_that_share_a_buffer_make_way_for_each_other(make: Make) -> None:
    engine = make(LATE, toy_plan(drafts=2, num_shared=1))
    assert engine.prefill("a", TEXT) == 0
    assert engine.prefill("b", TEXT) == FOUND


def test_a_draft_layer_whose_buffer_is_another_s_by_now_fails_the_step(make: Make) -> None:
    engine = make((), toy_plan(drafts=2, num_shared=1))
    engine.again = (LAST - 1,)
    pooled = engine.admit("a", TEXT)
    report = engine.step((engine.request(pooled, 0, 6), TEXT))
    assert report is not None
    assert report.failed["a"].code == "layer_twice"
    engine.kvd.wait_all_free()


def test_what_was_asked_for_before_the_drafts_ran_tells_of_them(make: Make) -> None:
    """vLLM takes the report of a step that guesses tokens before its draft layers have run."""
    # The draft layer's load begins ahead of it: it fails once the report is taken, not before.
    engine = make(HUNG_AND_FAILED, toy_plan(drafts=1))
    engine.prefill("a", TEXT, 64)
    pooled = engine.admit("b", TEXT)
    request = engine.request(pooled, FOUND, len(TEXT))
    engine.worker.begin(StepOrder((request,)))
    for layer in range(LAST):
        assert engine.worker.before_layer(layer)
        engine.worker.written(layer)
        engine.worker.computed(layer)
    report, blocks = engine.worker.take_report(), engine.worker.take_bad_blocks()
    assert report is not None
    assert not report.failed
    until(lambda: engine.device.resume("load") == 1)
    assert not engine.worker.before_layer(LAST)
    engine.worker.end()
    assert report.failed["b"].code == "injected"
    assert blocks == set(request.device_blocks)
    engine.worker.begin(StepOrder())
    assert report.failed, "the next step has a report of its own"
