"""Stub engines of both modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from engine_shim.vllm.engine_plan import EnginePlan
from tests.unit.engine_shim.vllm.plans import main, mains, plan
from tests.unit.engine_shim.vllm.rig import FakeClient
from tests.unit.engine_shim.vllm.stub_engine import StubEngine

TEXT = "the quick brown fox jumps over the lazy dog"
OTHER = "pack my box with five dozen liquor jugs now"
MODES = {"rolling": {"num_shared": 2}, "resident": {"offload": "resident"}}

Make = Callable[..., StubEngine]


def plan_of(mode: str, blocks: int, drafts: int = 0) -> EnginePlan:
    caches = [*mains(4), *(main(4 + at, is_draft=True) for at in range(drafts))]
    made = plan(caches, **MODES[mode])  # type: ignore[arg-type]
    return made.with_blocks(blocks + 1)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[FakeClient] = []

    def build(
        mode: str = "rolling",
        *,
        blocks: int = 40,
        pool: int = 40,
        drafts: int = 0,
        kvd: FakeClient | None = None,
        **more: object,
    ) -> StubEngine:
        planned = plan_of(mode, blocks, drafts)
        if kvd is None:
            kvd = FakeClient(planned, pool)
            made.append(kvd)
        return StubEngine(planned, kvd, **more)  # type: ignore[arg-type]

    yield build
    for client in made:
        client.close()


def assert_all_let_go(engine: StubEngine) -> None:
    assert not engine.kvd.known, "requests that have ended"
    assert not engine.kvd.pinned
    assert len(engine.free) == engine.plan.num_blocks - 1
    assert not engine.side._names
    assert not engine.side._parting
