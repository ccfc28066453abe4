"""Steps whose blocks kvd keeps: aborts, failures, the loss of kvd, and threads that race."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from engine_shim.client import KeptStep, KvdRefused
from engine_shim.copy_order import CopyOrder
from engine_shim.steps import Step, StepFailed, StepRequest
from engine_shim.testing import Fail, FaultyDevice, Hang, Rule
from kvd.core import slot_events as se
from kvd.wire.slot_items import LoadItem
from tests.unit.engine_shim.kept_rig import (
    SOON_S,
    WAIT_S,
    Make,
    Running,
    all_ended,
    engines,
)
from tests.unit.engine_shim.test_pipeline import LAYERS, TEXT


@pytest.fixture
def make() -> Iterator[Make]:
    with engines() as build:
        yield build


# Ends -----------------------------------------------------------------------------------------


def test_blocks_of_an_aborted_request_stay_until_their_copies_were_reported(make: Make) -> None:
    engine = make((Rule(Hang(), stream="save", kind="copy", nth=1),))
    device = engine.device
    assert isinstance(device, FaultyDevice)
    pooled = engine.admit("r1", TEXT)
    engine.pool.extend(pooled, 8)

    def abort(layer: int) -> None:
        if layer == 3:
            engine.kvd.hold()
            engine.kvd.abort("r1")
            raise StepFailed("aborted", "the request was aborted")

    engine.before_write = abort
    with pytest.raises(StepFailed, match="aborted"):
        engine.step(pooled, TEXT, 0, 8, last=True)
    others = engine.kvd.reserve("r2", 40 - len(pooled.blocks))
    with pytest.raises(KvdRefused, match="pool_full"):
        engine.kvd.reserve("r2", 1)
    engine.kvd.deliver()
    with pytest.raises(KvdRefused, match="pool_full"):
        engine.kvd.reserve("r2", 1)
    device.resume("save")
    all_ended(engine)
    assert set(engine.kvd.reserve("r2", 2)) == set(pooled.blocks) - set(others)


@pytest.mark.parametrize("stream", ["load", "save"])
@pytest.mark.parametrize("nth", [0, 3, LAYERS - 1])
def test_copies_that_fail_leave_no_step_open(make: Make, stream: str, nth: int) -> None:
    def hits(op: object) -> bool:
        return armed.is_set()

    armed = threading.Event()
    engine = make((Rule(Fail(moved=0.5), stream=stream, kind="copy", nth=nth, when=hits),))
    engine.prefill("r1", TEXT[:16])
    armed.set()
    with pytest.raises(StepFailed, match="injected"):
        engine.prefill("r2", TEXT[:24])
    engine.kvd.abort("r2")
    all_ended(engine)
    assert engine.prefill("r3", TEXT) == 16
    all_ended(engine)


@pytest.mark.parametrize("another", [False, True])
@pytest.mark.parametrize("at", [0, 2, LAYERS - 1])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_kvd_that_goes_away_in_the_middle_of_a_step(
    make: Make, another: bool, at: int, is_first: bool
) -> None:
    """The same one goes on where it was; another knows of no block, and nothing is taken for saved
    or loaded."""
    engine = make()
    if not is_first:
        engine.prefill("r0", TEXT[:16])
    pooled = engine.admit("r1", TEXT)
    start = pooled.hit_tokens
    engine.pool.extend(pooled, start + 8)
    gone = threading.Event()

    def go(layer: int) -> None:
        if layer == at:
            engine.kvd.go_away()
            gone.set()

    engine.before_write = go
    running = Running(lambda: engine.step(pooled, TEXT, start, start + 8, last=True))
    assert gone.wait(WAIT_S)
    engine.kvd.until_posted(se.Computed, 1)
    engine.kvd.come_back(another=another)
    code = running.wait()
    if another or code:
        assert code == "pool_lost"
        engine.kvd.abort("r1")
    else:
        engine.pool.commit(pooled, start + 8)
        engine.pool.end(pooled)
    all_ended(engine)
    engine.before_write = lambda layer: None
    assert engine.prefill("r3", TEXT) == (start if another or code else start + 8)
    all_ended(engine)


def test_a_step_that_gets_its_answer_after_its_deadline_is_closed(make: Make) -> None:
    engine = make()
    engine.prefill("r1", TEXT[:16])
    pooled = engine.admit("r2", TEXT)
    engine.pool.extend(pooled, 24)
    engine.kvd.hold()
    with pytest.raises(StepFailed, match="deadline_exceeded"):
        engine.step(pooled, TEXT, 16, 24, last=True, s=SOON_S)
    engine.kvd.deliver()
    engine.kvd.abort("r2")
    all_ended(engine)


def test_a_step_that_cannot_be_begun_is_not_left_open(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    engine.prefill("r1", TEXT[:16])
    pooled = engine.admit("r2", TEXT)
    engine.pool.extend(pooled, 24)
    with monkeypatch.context() as broken:
        broken.setattr(engine.kvd.slots, "open_step", partial(_raises, engine.kvd.slots.open_step))
        with pytest.raises(MemoryError):
            engine.step(pooled, TEXT, 16, 24, last=True)
    (loads,) = (kept for kept in engine.kvd.slots.opened if kept.loads[:1] and kept.number > 2)
    assert loads.closed
    engine.step(pooled, TEXT, 16, 24, last=True)
    engine.pool.end(pooled)
    all_ended(engine)


def _raises(opens: Callable[..., KeptStep], loads: object, saves: object, s: float) -> KeptStep:
    """Where saves are asked for."""
    if saves:
        raise MemoryError
    return opens(loads, saves, s)


# Threads --------------------------------------------------------------------------------------


def test_a_save_that_was_announced_again_is_not_lost_for_the_first_answer(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute hears of the second answer when the copy has ended already."""
    engine = make(shares_spans=True)
    engine.kvd.busy_saves = 1
    confirm, order = engine.kvd.slots.confirm, engine.pipeline._order

    def late(*args: Any) -> object:
        ticket = confirm(*args)
        assert isinstance(order, CopyOrder)
        assert order.wait_for_saves(WAIT_S)
        return ticket

    monkeypatch.setattr(engine.kvd.slots, "confirm", late)
    engine.prefill("r1", TEXT)
    assert engine.prefill("r2", TEXT) > 0


def test_two_threads_that_list_their_loads_do_not_exchange_them() -> None:
    first = StepRequest("r1", (0,), (1,), 4, 8)
    step = Step((first,), 1, 0)

    def make(request: StepRequest, have: int) -> LoadItem:
        return LoadItem(request.request, [have], 4)

    class Meddled(list[tuple[StepRequest, int]]):
        """While it is compared, another thread asks for something else, once."""

        others: list[list[tuple[StepRequest, int]]] = []

        def __ne__(self, other: object) -> bool:
            while self.others:
                step.load_items(self.others.pop(), make)
            return super().__ne__(other)

    step.load_items(Meddled([(first, 0)]), make)
    Meddled.others.append([(first, 9)])
    assert step.load_items([(first, 0)], make) == [LoadItem("r1", [0], 4)]
