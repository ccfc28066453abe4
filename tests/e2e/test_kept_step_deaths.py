"""kill -9 of engine and kvd in the middle of a step whose blocks kvd keeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.kept_engine import KeptEngine
from tests.integration.held_kvd import HeldKvd
from tests.integration.live_kvd import until
from tests.unit.engine_shim.test_pipeline import BLOCK, LAYERS, TEXT

KNOWN = 4 * BLOCK
"""Tokens of the prompt that are committed before the step in question, which loads them."""

FULL = len(TEXT) // BLOCK * BLOCK


@pytest.fixture
def kvd() -> Iterator[HeldKvd]:
    with HeldKvd() as made:
        yield made


def settled(kvd: HeldKvd) -> None:
    """Nothing is held, filled or kept for anybody."""

    def is_settled() -> bool:
        status = kvd.status()
        assert status["invariants"]["ok"], status["invariants"]
        blocks = status["pool"]["blocks"]
        open_ = blocks["filling"], blocks["poisoned"], status["pool"]["pinned_blocks"]
        return not any((*open_, status["slots"]["held"]))

    until(is_settled)


def stopped(engine: KeptEngine, layer: int) -> None:
    """Its second prompt is at that layer of a step that loads and saves kept blocks."""
    assert engine.ask("first", TEXT[:KNOWN]) == {"hit": 0}
    assert engine.ask("dying", TEXT, layer) == {"at": layer, "kept": [True, True]}


@pytest.mark.parametrize("layer", [1, LAYERS - 1])
def test_the_engine_dies_in_a_kept_step(kvd: HeldKvd, layer: int) -> None:
    """What it kept is free; what it had committed is a hit of the next one, nothing else."""
    with KeptEngine(kvd.runtime_dir) as engine:
        stopped(engine, layer)
        blocks = kvd.status()["pool"]["blocks"]
        assert blocks["filling"] > 0
        engine.kill()
    settled(kvd)
    assert kvd.status()["pool"]["blocks"]["ready"] == KNOWN // BLOCK
    with KeptEngine(kvd.runtime_dir) as engine:
        assert engine.ask("next", TEXT) == {"hit": KNOWN}
        assert engine.ask("again", TEXT) == {"hit": FULL}
        settled(kvd)


@pytest.mark.parametrize("layer", [1, LAYERS - 1])
def test_kvd_dies_in_a_kept_step(kvd: HeldKvd, layer: int) -> None:
    """The request ends with a code; the engine goes on with what was committed."""
    with KeptEngine(kvd.runtime_dir) as engine:
        stopped(engine, layer)
        kvd.crash()
        kvd.start()
        engine.say({})
        assert engine.hear()["code"] in ("pool_lost", "unreachable")
        assert engine.ask("next", TEXT) == {"hit": KNOWN}
        assert engine.ask("again", TEXT) == {"hit": FULL}
        settled(kvd)


def test_kvd_is_away_when_a_kept_step_goes_on(kvd: HeldKvd) -> None:
    """Its copies end before the next life begins: none of them counts as saved."""
    with KeptEngine(kvd.runtime_dir) as engine:
        stopped(engine, 3)
        kvd.crash()
        engine.say({})
        kvd.start()
        assert engine.hear()["code"] in ("pool_lost", "unreachable")
        assert engine.ask("next", TEXT) == {"hit": KNOWN}
        settled(kvd)
    settled(kvd)
    assert kvd.status()["pool"]["blocks"]["ready"] == FULL // BLOCK
