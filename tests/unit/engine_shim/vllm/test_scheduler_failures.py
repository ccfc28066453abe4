"""Steps that fail: who is computed again, from where, who ends, and whom it does not concern."""

from __future__ import annotations

import pytest

from engine_shim.steps import StepRequest
from engine_shim.vllm.messages import Failure, StepReport
from engine_shim.vllm.shares import Scheduled
from tests.unit.engine_shim.vllm.stub_engine import StubRequest
from tests.unit.engine_shim.vllm.stub_fixture import (
    MODES,
    OTHER,
    TEXT,
    Make,
    assert_all_let_go,
    make,
)
from tests.unit.engine_shim.vllm.stub_worker import Fault

__all__ = ["make"]


@pytest.mark.parametrize("fault", ["step", "save", "alone"])
def test_no_answer_is_made_of_rows_that_failed(make: Make, fault: str) -> None:
    engine = make("rolling", recompute=False, chunk=64)
    engine.add("a", TEXT)
    engine.add("b", OTHER, outputs=2)
    engine.step(Fault(fault, 2))
    engine.run()
    assert "failed" in {request.error for request in engine.all.values()}
    assert_all_let_go(engine)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("layer", [0, 2, 3])
@pytest.mark.parametrize("kind", ["step", "save", "alone"])
@pytest.mark.parametrize("mode", MODES)
def test_failed_requests_are_computed_again(
    make: Make, mode: str, kind: str, layer: int, depth: int
) -> None:
    engine = make(mode, depth=depth, chunk=16)
    engine.add("a", TEXT, outputs=6)
    engine.add("b", OTHER, outputs=6)
    for at in range(6):
        engine.step(Fault(kind, layer) if at == 2 else None)
    engine.run()
    assert engine.restarts
    assert {request.error for request in engine.all.values()} == {""}
    assert_all_let_go(engine)


@pytest.mark.parametrize("kind", ["step", "save", "alone"])
@pytest.mark.parametrize("mode", MODES)
def test_failed_requests_end_by_the_other_policy(make: Make, mode: str, kind: str) -> None:
    engine = make(mode, recompute=False, chunk=64)
    engine.add("a", TEXT, outputs=3)
    engine.add("b", OTHER, outputs=3)
    engine.step(Fault(kind, 1))
    engine.run()
    ended = [request.error for request in engine.all.values()]
    assert ended.count("failed") == (1 if kind == "alone" else 2)
    assert [point for _, point in engine.restarts] == [0] * ended.count("failed")
    assert_all_let_go(engine)


@pytest.mark.parametrize("mode", MODES)
def test_what_fails_again_and_again_ends(make: Make, mode: str) -> None:
    engine = make(mode, chunk=64)
    engine.add("a", TEXT, outputs=3)
    for _ in range(4):
        assert not engine.all["a"].is_done
        engine.step(Fault("step", 1))
    assert engine.all["a"].error == "injected"
    assert_all_let_go(engine)


def test_progress_forgives_failures(make: Make) -> None:
    engine = make("rolling", chunk=4)
    engine.add("a", TEXT, outputs=3)
    for at in range(30):
        engine.step(Fault("step", 1) if at % 2 else None)
    engine.run()
    assert engine.all["a"].error == ""
    assert len(engine.restarts) > 4


def test_rolling_goes_on_behind_what_the_pool_has(make: Make) -> None:
    engine = make("rolling", chunk=8)
    engine.add("a", TEXT)
    for at in range(4):
        engine.step(Fault("step", 1) if at == 3 else None)
    assert engine.restarts == [("a", 24)]
    engine.run()
    assert engine.all["a"].error == ""


def test_resident_goes_on_behind_what_its_blocks_held(make: Make) -> None:
    """The step was to load a prefix: none of it is there."""
    engine = make("resident", chunk=8)
    engine.add("a", TEXT)
    engine.run()
    engine.add("b", TEXT, outputs=6)
    engine.step(Fault("step", 1))
    assert engine.hits["b"][0] > 0
    assert engine.restarts == [("b", 0)]
    engine.run()
    assert engine.all["b"].error == ""


def test_a_failed_load_is_known_although_the_next_step_is_under_way(make: Make) -> None:
    """Asynchronous scheduling: the step behind it believes in the rows."""
    engine = make("resident", chunk=4, depth=2)
    engine.add("a", TEXT[:28])
    engine.run()
    engine.add("b", TEXT)
    engine.step(Fault("step", 1))
    engine.step()
    assert engine.restarts == [("b", 0)]
    engine.run()
    assert engine.all["b"].error == ""
    assert_all_let_go(engine)


def test_a_step_that_fails_fails_those_too_of_which_nothing_is_moved(make: Make) -> None:
    """Their rows were not written either: an answer would be made of what lay there."""
    engine = make("resident", chunk=64)
    engine.add("a", TEXT[:21], outputs=4)
    engine.step()
    engine.add("b", OTHER)
    engine.step(Fault("step", 0))
    assert [request.request for request in engine.orders[-1].requests] == ["b"]
    assert set(engine.orders[-1].others) == {"a"}
    assert sorted(engine.restarts) == [("a", 17), ("b", 0)]
    engine.run()
    assert {request.error for request in engine.all.values()} == {""}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rows_left_unsaved_are_of_no_concern_to_the_steps_under_way(make: Make, depth: int) -> None:
    engine = make("resident", depth=depth, chunk=8)
    engine.add("a", TEXT, outputs=6)
    for at in range(4):
        engine.step(Fault("shed", 1) if at == 1 else None)
    engine.run()
    assert engine.restarts == []
    assert engine.all["a"].error == ""
    assert_all_let_go(engine)
    engine.add("b", TEXT)
    engine.run()
    assert engine.hits["b"] == [8]


@pytest.mark.parametrize("depth", [2, 3])
def test_a_recovery_does_not_fail_the_steps_under_way(make: Make, depth: int) -> None:
    """Ranks still save into the blocks of the attempt that is given up."""
    engine = make("rolling", depth=depth, chunk=16)
    engine.add("a", TEXT, outputs=6)
    engine.add("b", OTHER, outputs=6)
    for at in range(6):
        engine.step(Fault("alone", 2, 0) if at == 2 else None)
    engine.run()
    assert len({request_id for request_id, _ in engine.restarts}) == 1
    assert {request.error for request in engine.all.values()} == {""}
    assert_all_let_go(engine)


def test_lost_saves_fail_the_next_step_of_their_request_at_once(make: Make) -> None:
    engine = make("rolling", chunk=8)
    engine.add("a", TEXT)
    engine.step()
    engine.worker.lost["a"] = Failure("injected", "a save of the last step")
    engine.step()
    assert engine.restarts == [("a", 8)]
    assert engine.orders[-1].requests[0].request == "a"
    engine.run()
    assert engine.orders[-1].requests[0].request == "a~1"
    assert engine.all["a"].error == ""


def test_reports_of_unknown_requests_are_ignored(make: Make) -> None:
    engine = make()
    report = StepReport({"nobody": Failure("x", "", (1,))}, {"nobody"})
    engine.side.reported(report)
    assert engine.side.restart_points({"nobody": 3}) == {}
    engine.side.finished(StubRequest("nobody", "x", 1, 4), ok=True)
    assert not engine.side.order([Scheduled("nobody", 0, 1, (1,), True)]).requests


def test_drafts_do_not_make_a_block_full(make: Make) -> None:
    """Guesses may be taken back: what they fill is not saved for others."""
    engine = make("resident", chunk=64)
    engine.add("a", TEXT[:12], outputs=1)
    engine.side.matched_tokens(engine.all["a"], 0)
    engine.side.allocated(engine.all["a"], [1, 2, 3, 4], 0)
    (request,) = engine.side.order([Scheduled("a", 0, 13, (1, 2, 3, 4), True, 3)]).requests
    assert isinstance(request, StepRequest)
    assert (request.end, request.save_to, len(request.pool_blocks)) == (10, 8, 2)
