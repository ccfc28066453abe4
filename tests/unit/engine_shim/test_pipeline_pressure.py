"""Under pressure: loads before saves, and saves that nobody needs are left out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from engine_shim.client import KvdRefused
from engine_shim.steps import StepRequest, Target
from engine_shim.testing import Delay, FaultyDevice, Hang, Rule
from tests.unit.engine_shim.test_pipeline import BLOCK, LAYERS, MS, TEXT, Engine

Make = Callable[..., Engine]

SLOW_SAVES = (Rule(Delay(20 * MS), stream="save", kind="copy"),)
WAIT_S = 10.0


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Engine] = []

    def build(rules: Sequence[Rule] = (), **options: Any) -> Engine:
        made.append(Engine(rules, **options))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def test_a_save_lets_a_load_end_first(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second chunk's first load hangs; the save of layer 0 is handed over meanwhile."""
    monkeypatch.setattr("engine_shim.copy_order.HOLD_SECONDS", WAIT_S)
    engine = make((Rule(Hang(), stream="load", kind="copy", nth=0),))
    device, order = engine.device, engine.pipeline._order
    assert isinstance(device, FaultyDevice)
    asked = threading.Event()
    wait = order.wait_for_loads

    def wait_for_loads(seconds: float) -> bool:
        if order._loads_begun:
            asked.set()
        return wait(seconds)

    def load_is_there(layer: int) -> None:
        if layer == 0 and engine.start:
            with order._changed:
                assert order._changed.wait_for(lambda: order._loads_begun, WAIT_S)

    monkeypatch.setattr(order, "wait_for_loads", wait_for_loads)
    engine.before_write = load_is_there
    worker = threading.Thread(target=engine.prefill, args=("r1", TEXT[:16]))
    worker.start()
    assert asked.wait(WAIT_S)
    saves = [entry for entry in device.journal() if _is_copy(entry, "save")]
    device.resume("load")
    worker.join(WAIT_S)
    assert len(saves) == LAYERS, "of the first chunk, and none of the second"
    lines = [(entry.op.stream, entry.what) for entry in device.journal() if entry.op.kind == "copy"]
    later = lines[lines.index(("load", "resumed")) :]
    assert later.count(("save", "submitted")) == LAYERS


def _is_copy(entry: object, stream: str) -> bool:
    op, what = entry.op, entry.what  # type: ignore[attr-defined]
    return bool(op.stream == stream and op.kind == "copy" and what == "submitted")


def test_the_last_chunk_goes_unsaved_when_the_pool_is_full(make: Make) -> None:
    engine = make()
    engine.kvd.reserve("other", 38)
    assert engine.prefill("r1", TEXT[:16], optional=True) == 0
    assert engine.pool.shed_blocks == 2
    engine.kvd.wait_all_free()
    assert engine.admit("r2", TEXT[:17]).hit_tokens == 8, "the first chunk, which was needed"


def test_a_chunk_that_will_be_loaded_again_is_not_shed(make: Make) -> None:
    engine = make()
    engine.kvd.reserve("other", 39)
    with pytest.raises(KvdRefused, match="pool_full"):
        engine.prefill("r1", TEXT[:16], optional=True)
    assert engine.pool.shed_blocks == 0


def test_a_chunk_larger_than_the_pool_is_an_error_all_the_same(make: Make) -> None:
    engine = make()
    pooled = engine.admit("r1", TEXT)
    with pytest.raises(KvdRefused, match="reserve_too_large"):
        engine.pool.extend(pooled, 41 * BLOCK, optional=True)


def test_saves_are_shed_when_too_many_are_open(make: Make) -> None:
    engine = make(SLOW_SAVES, saves_max=1, buffers=5)
    assert engine.prefill("r1", TEXT[:16], optional=True) == 0
    assert engine.unsaved == ("r1",)
    figures = engine.pipeline.figures()
    assert figures.shed_blocks == 2
    assert figures.saved_bytes < 2 * figures.loaded_bytes + 16 * LAYERS * 64
    engine.kvd.wait_all_free()
    assert engine.admit("r2", TEXT[:17]).hit_tokens == 8
    engine.kvd.abort("r2")
    pool = engine.kvd.machine.state.pool
    assert pool is not None
    assert len(pool.blocks.free) == 38, "what was not committed is free again"


def test_saves_that_are_needed_are_never_shed(make: Make) -> None:
    engine = make(SLOW_SAVES, saves_max=0, buffers=5)
    assert engine.prefill("r1", TEXT[:16]) == 0
    assert engine.pipeline.figures().shed_blocks == 0
    assert engine.prefill("r2", TEXT[:17], optional=True) == 16


def test_of_two_requests_in_a_step_only_the_optional_one_is_shed(make: Make) -> None:
    engine = make(saves_max=0)
    pooled = [engine.admit(name, name * 4 + TEXT) for name in ("a", "b")]
    requests = []
    for at, one in enumerate(pooled):
        engine.pool.extend(one, 8)
        device_blocks = tuple(range(2 * at, 2 * at + 2))
        blocks = tuple(one.blocks)
        requests.append(StepRequest(one.request, device_blocks, blocks, 0, 8, optional=at == 1))
    engine.pipeline.begin_step(requests, WAIT_S)
    for layer in range(LAYERS):
        engine.pipeline.before_write(layer)
        engine.pipeline.written(layer)
        engine.pipeline.computed(layer)
    assert engine.pipeline.end_step(wait_saves=True) == ("b",)
    assert engine.pipeline.figures().saved_bytes == 8 * LAYERS * 64
    for one in pooled:
        engine.pool.commit(one, 8)
        engine.pool.end(one)
    engine.kvd.wait_all_free()
    assert engine.admit("c", "aaaa" + TEXT).hit_tokens == 8
    assert engine.admit("d", "bbbb" + TEXT).hit_tokens == 0, "committed by mistake, never ready"


def test_what_a_target_reads_is_not_optional() -> None:
    with pytest.raises(ValueError, match="r1 is optional, but has targets"):
        StepRequest("r1", (0,), (0,), 0, 4, (Target("t", "peer"),), optional=True)


def test_saves_of_blocks_that_another_rank_loads_are_announced_again(
    make: Callable[..., Engine],
) -> None:
    """The slot is not let go before its saves are armed: what was saved is right, and found."""
    engine = make(shares_spans=True)
    engine.kvd.busy_saves = 7
    assert engine.prefill("r1", TEXT) == 0
    assert engine.kvd.busy_saves == 0
    assert engine.prefill("r2", TEXT) == len(TEXT) // BLOCK * BLOCK
    engine.kvd.wait_all_free()
