"""A prefill engine on a pool that is too small: right tokens, and what it left out is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from engine_shim.reference import orders as od
from engine_shim.reference.demo.processes import EngineProcess, OwnDaemon
from engine_shim.reference.layouts import block_layout
from engine_shim.reference.serve import model_config
from kvd.plan.layout import BlockLayout
from tests.e2e.pair import BLOCK, CHUNK, MAX_TOKENS, ORDER_SECONDS, SIZES, resident, text, until

TOKENS = 900
BLOCKS = -(-TOKENS // BLOCK)
FIRST_CHUNKS = TOKENS // CHUNK * CHUNK // BLOCK
"""Blocks of all chunks but the last: those that the request itself loads again."""


class SmallPool:
    """A kvd whose pool has `blocks` blocks, and a prefill engine."""

    def __init__(self, blocks: int, undo: ExitStack) -> None:
        layout = BlockLayout(block_layout(model_config("tiny", 0, MAX_TOKENS), BLOCK))
        self.kvd = OwnDaemon(f"pool.size={-(-blocks * layout.stride // 1024)}KiB")
        undo.callback(self.kvd.close)
        self.kvd.start()
        self.engine = EngineProcess(
            "prefill", "prefill", "--runtime-dir", str(self.kvd.runtime_dir), *SIZES,
            "--buffers", "2",
        )  # fmt: skip
        undo.callback(self.engine.close)
        self.engine.wait_ready()
        assert self.status()["pool"]["blocks"]["total"] in range(blocks, blocks + 2)

    def status(self) -> dict[str, Any]:
        """What kvd tells."""
        _, status = self.kvd.get("/v1/status")
        return dict(status)

    def prefill(self, request: str, tokens: tuple[int, ...]) -> od.Prefilled:
        """One prompt whose next token is the resident run's."""
        done = self.engine.ask(od.Prefill(request, list(tokens)), ORDER_SECONDS)
        assert isinstance(done, od.Prefilled), done
        assert done.first_token == resident(tokens)[0][0]
        return done


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.slow
def test_the_last_chunk_goes_unsaved_when_it_does_not_fit(undo: ExitStack) -> None:
    pool = SmallPool(FIRST_CHUNKS + 1, undo)
    assert pool.prefill("r1", text(TOKENS)).hit_tokens == 0
    until(lambda: pool.status()["eviction"]["saves_shed"] == BLOCKS - FIRST_CHUNKS, pool.status)
    again = pool.prefill("r2", text(TOKENS))
    assert again.hit_tokens == FIRST_CHUNKS * BLOCK
    assert pool.status()["pool"]["pinned_blocks"] == 0


@pytest.mark.slow
def test_another_prompt_evicts_the_tail_of_the_last_first(undo: ExitStack) -> None:
    pool = SmallPool(2 * BLOCKS - 6, undo)
    pool.prefill("r1", text(TOKENS))
    pool.prefill("r2", text(TOKENS, skip=500))
    seen = pool.status()["eviction"]
    # The last block of a prompt is not full, so it has no key and is free again at the end.
    assert seen["evicted"] == 5
    assert seen["saves_shed"] == 0
    assert pool.prefill("r3", text(TOKENS)).hit_tokens == (BLOCKS - 1 - 5) * BLOCK
