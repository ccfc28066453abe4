"""The prefill pipeline with checksums: what it saves it can load, and damage stops it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from engine_shim.client import KvdRefused
from engine_shim.steps import CHECKSUM_MISMATCH, StepFailed
from kvd.wire.sum_layout import SumView
from tests.unit.engine_shim.test_pipeline import BLOCK, LAYERS, ROW, TEXT, Engine

STRIDE = LAYERS * BLOCK * ROW
FULL = len(TEXT) // BLOCK


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def build(mode: str, buffers: int = 2) -> Engine:
        made.append(Engine((), mode, buffers=buffers))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def damage(engine: Engine, block: int, layer: int, token: int = 0) -> None:
    assert engine.kvd.pool is not None
    at = block * STRIDE + (layer * BLOCK + token) * ROW + 5
    (byte,) = engine.kvd.pool.read_bytes(at, 1)
    engine.kvd.pool.write_bytes(at, bytes([byte ^ 0x80]))


def known(engine: Engine) -> dict[tuple[int, int], int]:
    """(layer, block) -> tokens of the spans that have a checksum."""
    sums = engine.kvd.sums
    assert sums is not None
    found = {}
    for layer in range(LAYERS):
        for block in range(40):
            entry = sums.get(layer, block)
            if entry is not None:
                found[layer, block] = entry.tokens
    return found


def mismatches(engine: Engine) -> int:
    return engine.kvd.machine.state.counters["checksum_mismatches"]


@pytest.mark.parametrize("chunk", [4, 5, 6, 8, 48])
@pytest.mark.parametrize("buffers", [1, 3])
def test_every_span_that_was_saved_has_one_and_every_load_agrees(
    make: Callable[..., Engine], chunk: int, buffers: int
) -> None:
    """Chunks that end within a block load it in part, and save it again from its first row."""
    engine = make("always", buffers=buffers)
    engine.prefill("r1", TEXT, chunk)
    count = -(-len(TEXT) // BLOCK)
    assert known(engine) == {
        (layer, block): min(BLOCK, len(TEXT) - block * BLOCK)
        for layer in range(LAYERS)
        for block in range(count)
    }
    assert engine.prefill("r2", TEXT, chunk) == FULL * BLOCK
    assert mismatches(engine) == 0


def test_sampled_has_one_for_every_eighth(make: Callable[..., Engine]) -> None:
    engine = make("sampled")
    engine.prefill("r1", TEXT)
    assert {(layer + block) % 8 for layer, block in known(engine)} == {0}
    assert engine.prefill("r2", TEXT) == FULL * BLOCK
    damage(engine, 3, 4)  # 3 + 4 has none: the model sees it, not the pipeline
    with pytest.raises(AssertionError, match="layer 4 token 12"):
        engine.prefill("r3", TEXT)
    engine.pipeline.abort_step()
    damage(engine, 3, 4)  # back again
    damage(engine, 3, 5)
    with pytest.raises(StepFailed, match=CHECKSUM_MISMATCH):
        engine.prefill("r4", TEXT)


@pytest.mark.parametrize("layer", [0, 3, LAYERS - 1])
@pytest.mark.parametrize(("block", "token"), [(0, 0), (2, 3)])
def test_damage_fails_the_step_and_is_gone_afterwards(
    make: Callable[..., Engine], layer: int, block: int, token: int
) -> None:
    engine = make("always")
    engine.prefill("r1", TEXT)
    damage(engine, block, layer, token)
    with pytest.raises(StepFailed) as caught:
        engine.prefill("r2", TEXT)
    assert caught.value.code == CHECKSUM_MISMATCH
    assert f"pool block {block}, layer {layer}: checksum " in caught.value.detail
    assert mismatches(engine) == 1
    engine.kvd.abort("r2")
    engine.pipeline.forget("r2")
    engine.kvd.wait_all_free()
    assert engine.prefill("r3", TEXT) == block * BLOCK
    assert engine.prefill("r4", TEXT) == FULL * BLOCK
    assert mismatches(engine) == 1


def test_damage_of_a_block_that_is_still_being_filled(make: Callable[..., Engine]) -> None:
    """A running request loads its own blocks again in every step."""
    engine = make("always", buffers=1)
    pooled = engine.admit("r1", TEXT)
    engine.pool.extend(pooled, 10)
    engine.step(pooled, TEXT, 0, 6, last=True)
    damage(engine, pooled.blocks[1], 2, 1)
    started = time.monotonic()
    with pytest.raises(StepFailed) as caught:
        engine.step(pooled, TEXT, 6, 10, last=True, s=30.0)
    assert caught.value.code == CHECKSUM_MISMATCH
    assert time.monotonic() - started < 10, "the loader waited for a slot of the failed step"
    assert mismatches(engine) == 1
    engine.kvd.abort("r1")
    engine.kvd.wait_blocks_free()


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_kvd_that_is_gone_when_checksums_are_read_holds_nobody_up(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Each layer whose load was asked for is let go at once, not at the step's deadline."""
    engine = make("always", buffers=2)
    pooled = engine.admit("r1", TEXT)
    engine.pool.extend(pooled, 10)
    engine.step(pooled, TEXT, 0, 6, last=True)
    span_sums, asked = engine.kvd.span_sums, 0

    def gone() -> SumView | None:
        nonlocal asked
        asked += 1
        if asked >= nth:
            raise KvdRefused("pool_lost", what="checksums")
        return span_sums()

    monkeypatch.setattr(engine.kvd, "span_sums", gone)
    started = time.monotonic()
    with pytest.raises(StepFailed) as caught:
        engine.step(pooled, TEXT, 6, 10, last=True, s=30.0)
    assert caught.value.code == "pool_lost"
    assert time.monotonic() - started < 10, "somebody waited for a load that never began"
    engine.kvd.wait_all_free()
    engine.kvd.abort("r1")
    engine.kvd.wait_blocks_free()


def test_off_has_none(make: Callable[..., Engine]) -> None:
    engine = make("off")
    engine.prefill("r1", TEXT)
    assert engine.kvd.sums is None
    damage(engine, 1, 1)
    with pytest.raises(AssertionError, match="layer 1 token 4"):
        engine.prefill("r2", TEXT)
    engine.pipeline.abort_step()
