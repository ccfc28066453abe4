"""Steps whose blocks kvd keeps: what is copied when, however late it answers, and that all ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine_shim.steps import StepFailed, StepRequest
from kvd.core import events as ev
from kvd.core import slot_events as se
from tests.unit.engine_shim.fake_kvd import MEMBER
from tests.unit.engine_shim.kept_rig import (
    SOON_S,
    WAIT_S,
    Make,
    Running,
    all_ended,
    copies,
    engines,
    first_chunk,
    grant,
)
from tests.unit.engine_shim.test_pipeline import BLOCK, LAYERS, TEXT


@pytest.fixture
def make() -> Iterator[Make]:
    with engines() as build:
        yield build


# Answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", [1, 2, LAYERS])
@pytest.mark.parametrize("steps", [0, 1, 2, 64])
def test_rows_are_right_whatever_kvd_grants(
    make: Make, monkeypatch: pytest.MonkeyPatch, buffers: int, steps: int
) -> None:
    grant(monkeypatch, steps)
    engine = make(buffers=buffers)
    engine.prefill("r1", TEXT)
    assert engine.prefill("r2", TEXT[:32] + "another end") == 32
    assert engine.prefill("r3", TEXT) == len(TEXT) // BLOCK * BLOCK
    said = engine.kvd.said
    named = [item for item in said if isinstance(item, se.Written | se.Acquired) and item.step]
    assert bool(named) == (steps > 0)
    all_ended(engine)


def test_a_layer_of_a_kept_step_is_copied_before_kvd_has_heard_of_it(make: Make) -> None:
    engine = make()
    engine.prefill("r1", TEXT[:16])
    loaded, saved = copies(engine, "load"), copies(engine, "save")
    pooled = engine.admit("r2", TEXT)
    engine.pool.extend(pooled, 24)
    engine.before_write = lambda layer: engine.kvd.hold() if layer == 0 else None
    heard = len(engine.kvd.said)
    running = Running(lambda: engine.step(pooled, TEXT, 16, 24, last=True))
    engine.kvd.until_posted(se.SaveEnded, LAYERS)
    assert not [item for item in engine.kvd.said[heard:] if isinstance(item, se.SaveEnded)]
    assert copies(engine, "load") - loaded == LAYERS
    assert copies(engine, "save") - saved == LAYERS
    assert running.wait() == ""
    engine.kvd.deliver()
    engine.before_write = lambda layer: None
    engine.pool.commit(pooled, 24)
    engine.pool.end(pooled)
    assert engine.prefill("r3", TEXT) == 24
    all_ended(engine)


@pytest.mark.parametrize("steps", [0, 64])
def test_nothing_is_copied_before_the_step_has_its_answer(
    make: Make, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """It comes after the first layers were written, or computed even."""
    grant(monkeypatch, steps)
    engine = make()
    engine.kvd.hold()
    running = first_chunk(engine, "r1")
    engine.kvd.until_posted(se.Written, LAYERS)
    assert copies(engine, "save") == 0
    engine.kvd.deliver()
    assert running.wait() == ""
    assert copies(engine, "save") == LAYERS
    assert engine.admit("r2", TEXT).hit_tokens == 8
    engine.kvd.abort("r2")
    all_ended(engine)


@pytest.mark.parametrize("steps", [0, 1, 64])
def test_nothing_is_loaded_before_the_step_has_its_answer(
    make: Make, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    engine = make()
    engine.prefill("r1", TEXT[:16])
    grant(monkeypatch, steps)
    loaded = copies(engine, "load")
    pooled = engine.admit("r2", TEXT)
    engine.pool.extend(pooled, 24)
    engine.kvd.hold()
    running = Running(lambda: engine.step(pooled, TEXT, 16, 24, last=True))
    engine.kvd.until_posted(se.StepOpened, 2)
    assert not running.ended.wait(SOON_S)
    assert copies(engine, "load") == loaded
    engine.kvd.deliver()
    assert running.wait() == ""
    engine.pool.end(pooled)
    all_ended(engine)


# Refusals of layers ---------------------------------------------------------------------------


def test_a_save_that_kvd_refuses_after_it_was_copied_is_lost(make: Make) -> None:
    """And with it the request, though it ended long before."""
    engine = make()
    engine.before_write = lambda layer: engine.kvd.hold() if layer == 0 else None
    pooled = engine.admit("r1", TEXT)
    engine.pool.extend(pooled, 16)
    engine.step(pooled, TEXT, 0, 8, last=False)
    engine.before_write = lambda layer: None
    engine.kvd.until_posted(se.SaveEnded, LAYERS)
    assert engine.pipeline._saver.lost.why("r1") is None
    engine.kvd.handle(ev.BlocksPoisoned(1, MEMBER, tuple(pooled.blocks)))
    engine.kvd.deliver()
    request = StepRequest("r1", engine.device_blocks[:4], tuple(pooled.blocks), 8, 16)
    engine.pipeline.begin_step([request], WAIT_S)
    engine.pipeline.abort_step()
    assert engine.pipeline.failed_requests["r1"].code == "block_poisoned"
    engine.kvd.abort("r1")
    all_ended(engine)


def test_nothing_is_loaded_for_a_step_and_a_layer_that_are_refused(make: Make) -> None:
    """Both were asked for before either had an answer."""
    engine = make()
    engine.prefill("r1", TEXT[:16])
    loaded = copies(engine, "load")
    pooled = engine.admit("r2", TEXT)
    engine.pool.extend(pooled, 24)
    engine.kvd.hold()
    running = Running(lambda: engine.step(pooled, TEXT, 16, 24, last=True))
    engine.kvd.until_posted(se.Acquired, 1)
    engine.kvd.handle(ev.BlocksPoisoned(1, MEMBER, tuple(pooled.blocks[:4])))
    engine.kvd.deliver()
    assert running.wait() == "block_poisoned"
    assert copies(engine, "load") == loaded
    engine.kvd.abort("r2")
    all_ended(engine)


@pytest.mark.parametrize("comes", ["while it runs", "after it"])
def test_a_load_that_kvd_refuses_after_it_was_copied_fails_the_step_or_the_next(
    make: Make, comes: str
) -> None:
    engine = make()
    engine.prefill("r1", TEXT[:16])
    pooled = engine.admit("r2", TEXT)
    engine.pool.extend(pooled, 32)

    def poison(layer: int) -> None:
        kvd = engine.kvd
        if layer == 0:
            kvd.hold()
        if layer == 3:
            kvd.until_posted(se.LoadEnded, 3)
            kvd.handle(ev.BlocksPoisoned(1, MEMBER, (pooled.blocks[0],)))
            if comes == "while it runs":
                kvd.deliver()

    engine.before_write = poison
    running = Running(lambda: engine.step(pooled, TEXT, 16, 24, last=False))
    if comes == "while it runs":
        assert running.wait() == "block_poisoned"
    else:
        assert running.wait() == "", "nobody has said anything yet"
        engine.kvd.deliver()
        request = StepRequest(
            "r2", engine.device_blocks[:8], tuple(pooled.blocks), 24, 32, optional=True
        )
        engine.pipeline.begin_step([request], WAIT_S)
        engine.pipeline.abort_step()
        assert engine.pipeline.failed_requests["r2"].code == "block_poisoned"
    engine.kvd.abort("r2")
    all_ended(engine)


def test_a_loss_that_is_heard_after_the_end_of_its_request_is_nobodys(make: Make) -> None:
    engine = make()
    engine.before_write = lambda layer: engine.kvd.hold() if layer == 0 else None
    pooled = engine.admit("r1", TEXT)
    engine.pool.extend(pooled, 8)
    engine.step(pooled, TEXT, 0, 8, last=False)
    engine.kvd.until_posted(se.SaveEnded, LAYERS)
    engine.kvd.abort("r1")
    engine.pipeline.forget("r1")
    engine.kvd.deliver()
    assert engine.pipeline._saver.lost.why("r1") is None
    all_ended(engine)


def test_the_end_of_one_request_after_a_step_takes_nothing_from_the_others(make: Make) -> None:
    """Its blocks are kept: what kvd hears of them later it takes for whom it is still wanted."""
    engine = make()
    texts = {"r1": TEXT, "r2": TEXT[::-1]}
    pooled = {name: engine.admit(name, text) for name, text in texts.items()}
    shares = []
    for at, (name, one) in enumerate(pooled.items()):
        engine.pool.extend(one, 6)
        own = engine.device_blocks[2 * at : 2 * at + 2]
        shares.append(StepRequest(name, own, tuple(one.blocks), 0, 6))

    def compute() -> None:
        engine.device.bind_thread()
        engine.pipeline.begin_step(shares, WAIT_S)
        for layer in range(LAYERS):
            engine.pipeline.before_write(layer)
            if layer == 1:
                engine.kvd.hold()
            engine.pipeline.written(layer)
            engine.pipeline.computed(layer)
        engine.pipeline.end_step(wait_saves=False, wait_armed=True)
        engine.kvd.abort("r1")

    running = Running(compute)
    assert running.wait() == ""
    engine.kvd.until_posted(se.SaveEnded, LAYERS - 1)
    engine.kvd.deliver()
    assert engine.pipeline._saver.lost.why("r2") is None
    engine.pool.commit(pooled["r2"], 4)
    engine.pool.end(pooled["r2"])
    engine.kvd.wait_all_free()
    assert engine.admit("r3", texts["r2"]).hit_tokens == 4
    engine.kvd.abort("r3")
    all_ended(engine)


def test_a_save_into_a_span_that_is_still_saved_fails_its_request(make: Make) -> None:
    """As out of a slot that was rebound since: the step keeps the blocks, kvd refuses the layer."""
    engine = make()
    engine.kvd.busy_saves = 1
    with pytest.raises(StepFailed, match="span_busy"):
        engine.prefill("r1", TEXT[:8])
    assert engine.pipeline._saver.lost.why("r1") is not None
    engine.kvd.abort("r1")
    all_ended(engine)
