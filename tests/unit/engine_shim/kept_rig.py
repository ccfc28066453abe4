"""Engines whose steps kvd keeps, and whether all of it has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine_shim.steps import StepFailed
from engine_shim.testing import FaultyDevice
from kvd.core import slot_events as se
from tests.unit.engine_shim.test_pipeline import LAYERS, TEXT, Engine

Make = Callable[..., Engine]

WAIT_S = 10.0
SOON_S = 0.05


class Running:
    """A call on another thread."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.ended = threading.Event()
        self.failure: StepFailed | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except StepFailed as failure:
            self.failure = failure
        self.ended.set()

    def wait(self) -> str:
        """Wait for its end; the code that it failed with."""
        self._thread.join()
        return self.failure.code if self.failure is not None else ""


@contextmanager
def engines() -> Iterator[Make]:
    """Makes engines with a slot for each layer; they are closed at the end."""
    made: list[Engine] = []

    def build(*args: Any, **options: Any) -> Engine:
        made.append(Engine(*args, **{"buffers": LAYERS, **options}))
        return made[-1]

    yield build
    for engine in made:
        engine.kvd.deliver()
        engine.close()


def grant(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """So many steps may be open at a time: 1 is what is loaded, or saved where nothing is."""
    monkeypatch.setattr("kvd.core.steps.STEPS_MAX", steps)


def copies(engine: Engine, stream: str) -> int:
    """Copies that were submitted."""
    assert isinstance(engine.device, FaultyDevice)
    journal = [(one.op.stream, one.op.kind, one.what) for one in engine.device.journal()]
    return journal.count((stream, "copy", "submitted"))


def all_ended(engine: Engine) -> None:
    """Nothing is kept: each step was closed once, behind all its copies."""
    kvd = engine.kvd
    kvd.wait_all_free()
    assert kvd.machine.state.pool is not None
    assert kvd.machine.state.pool.blocks.steps == {}
    opened = [item.number for item in kvd.said if isinstance(item, se.StepOpened)]
    closed = [item.number for item in kvd.said if isinstance(item, se.StepClosed)]
    refused = {kept.number for kept in kvd.slots.opened if kept.is_refused}
    assert sorted(closed) == [number for number in opened if number not in refused]
    assert all(kept.copies == 0 and kept.closed for kept in kvd.slots.opened)


def first_chunk(engine: Engine, name: str, end: int = 8, *, s: float = WAIT_S) -> Running:
    """Compute tokens [0, end) of a new request in another thread, until all is saved."""
    pooled = engine.admit(name, TEXT)
    assert pooled.hit_tokens == 0
    engine.pool.extend(pooled, end)

    def compute() -> None:
        engine.device.bind_thread()
        engine.step(pooled, TEXT, 0, end, last=True, s=s)
        engine.pool.commit(pooled, end)
        engine.pool.end(pooled)

    return Running(compute)
