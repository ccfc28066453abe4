"""A worker side on CPU memory, with hooks called as vLLM calls them, and real bytes.

A row names its request's text up to the token, and the layer. Every layer's attention reads all
rows back.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from engine_shim.device_cpu import CpuDevice
from engine_shim.requests import PooledRequest, RequestPool
from engine_shim.steps import StepRequest
from engine_shim.testing import FaultyDevice, Rule
from engine_shim.vllm import worker as worker_module
from engine_shim.vllm.engine_plan import EnginePlan
from engine_shim.vllm.messages import StepOrder, StepReport
from engine_shim.vllm.options import ConnectorOptions
from engine_shim.vllm.worker import Rank, WorkerSide
from tests.unit.engine_shim.vllm.plans import TOKENS, main, plan
from tests.unit.engine_shim.vllm.rig import FakeClient

ROW = 64
LAYERS = 5
BLOCKS = 16
DEADLINE_S = 10.0


def row_of(text: str, layer: int, token: int) -> bytes:
    """The row depends on the whole prefix, as KV does."""
    return hashlib.sha512(f"{text[: token + 1]}/{layer}".encode()).digest()


def toy_plan(*, drafts: int = 0, opaque: bool = False, **options: object) -> EnginePlan:
    """A small engine; rolling on two buffers unless the options say otherwise."""
    base = LAYERS - drafts
    caches = [main(at, ROW, rows=not opaque, is_draft=at >= base) for at in range(LAYERS)]
    given: dict[str, Any] = {"num_shared": 2, **options}
    return plan(caches, **given).with_blocks(BLOCKS)


class Engine:
    """Prefills one request after another; `gate` says where a layer's gate is asked."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        rules: Sequence[Rule] = (),
        planned: EnginePlan | None = None,
        *,
        deadline_s: float = DEADLINE_S,
        checksums: str = "off",
    ) -> None:
        self.plan = planned or toy_plan()
        self.kvd = FakeClient(self.plan, 40, checksums)
        patch.setattr(worker_module, "KvdClient", lambda *_: self.kvd)
        self.device = FaultyDevice(CpuDevice(), rules)
        self.device.bind_thread()
        self.memory = self.device.alloc(self.plan.device()[1], "slots")
        self.moves: list[tuple[int, int]] = []
        with ExitStack() as undo:
            undo.callback(self.device.close, 5_000_000_000)
            undo.callback(self.memory.close)
            self.worker = WorkerSide(
                self.plan,
                ConnectorOptions(deadline_s=deadline_s),
                Rank("engine", 0, 1, 0, 0, True),
                self.device,
                self.memory,
                logging.Logger("toy", logging.CRITICAL),
                moved=lambda layer, slot: self.moves.append((layer, slot)),
            )
            undo.pop_all()
        self.pool = RequestPool(self.kvd, TOKENS)
        self.gate = "before"
        self.skipped: tuple[int, ...] = ()
        self.again: tuple[int, ...] = ()
        self.before_layer: Callable[[int], None] = lambda layer: None
        self.wrong: list[str] = []

    def admit(self, name: str, text: str) -> PooledRequest:
        """Begin a request for a text; one token for each character."""
        keys = [
            hashlib.sha256(text[: (at + 1) * TOKENS].encode()).digest()
            for at in range(len(text) // TOKENS)
        ]
        return self.pool.admit(name, keys, len(text))

    def request(self, pooled: PooledRequest, start: int, end: int, first: int = 1) -> StepRequest:
        """Its share of a step; its device blocks begin at `first`."""
        self.pool.extend(pooled, end)
        count = -(-end // TOKENS)
        blocks = tuple(range(first, first + count))
        return StepRequest(pooled.request, blocks, tuple(pooled.blocks[:count]), start, end)

    def step(self, *shares: tuple[StepRequest, str], **order: object) -> StepReport | None:
        """One forward pass over the requests with their texts, and what is reported of it."""
        requests = tuple(request for request, _ in shares)
        self.wrong = []
        self.worker.begin(StepOrder(requests, **order))  # type: ignore[arg-type]
        writes = True
        for layer in (*range(LAYERS), *self.again):
            if layer in self.skipped:
                continue
            self.before_layer(layer)
            if self.gate == "before":
                writes = self.worker.before_layer(layer) and writes
            for request, text in shares if writes else ():
                for token in range(request.num_computed, request.end):
                    self.memory.write_bytes(
                        self.at(layer, request, token), row_of(text, layer, token)
                    )
            if self.gate == "after":
                writes = self.worker.before_layer(layer) and writes
            self.worker.written(layer)
            for request, text in shares if writes else ():
                self._attend(layer, request, text)
            self.worker.computed(layer)
        self.worker.end()
        return self.worker.take_report()

    def _attend(self, layer: int, request: StepRequest, text: str) -> None:
        for token in range(request.end):
            found = self.memory.read_bytes(self.at(layer, request, token), ROW)
            if found != row_of(text, layer, token):
                self.wrong.append(f"{request.request} layer {layer} token {token}")

    def at(self, layer: int, request: StepRequest, token: int) -> int:
        """Where the row lies now."""
        slot_of = self.worker.pipeline.ring.slot_of
        name = self.plan.names[layer][0][1]
        offset, page = self.plan.placements(slot_of)[name]
        return offset + request.device_blocks[token // TOKENS] * page + token % TOKENS * ROW

    def prefill(self, name: str, text: str, chunk: int = 6) -> int:
        """All chunks of a request; every row must be right. Returns the tokens that were found."""
        pooled = self.admit(name, text)
        for start in range(pooled.hit_tokens, len(text), chunk):
            end = min(start + chunk, len(text))
            assert self.step((self.request(pooled, start, end), text)) is None
            assert not self.wrong
            self.pool.commit(pooled, end)
        self.kvd.wait_all_free()
        self.pool.end(pooled)
        return pooled.hit_tokens

    def close(self) -> None:
        """End everything."""
        self.worker.close()
        self.memory.close()
        self.device.close(5_000_000_000)
        FakeClient.close(self.kvd)
