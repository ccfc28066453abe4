"""Ways to come between an engine of this tier and its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine_shim.device_cpu import CpuDevice
from engine_shim.steps import StepRequest
from engine_shim.testing import FaultyDevice, Rule
from engine_shim.vllm.messages import StepOrder
from engine_shim.vllm.worker import WorkerSide
from kvd.plan.layout import BlockLayout


def faulty_device(patch: pytest.MonkeyPatch, rules: Sequence[Rule]) -> None:
    """Engines made from now on copy late, or fail to, by these rules."""
    patch.setattr("engine_shim.vllm.connector.CpuDevice", lambda: FaultyDevice(CpuDevice(), rules))


def watch_steps(patch: pytest.MonkeyPatch, seen: Callable[[WorkerSide, StepOrder], None]) -> None:
    """Call `seen` at the begin of every step, before its loads."""
    begin = WorkerSide.begin

    def watched(worker: WorkerSide, order: StepOrder) -> None:
        seen(worker, order)
        begin(worker, order)

    patch.setattr(WorkerSide, "begin", watched)


def damage(worker: WorkerSide, request: StepRequest, at: int, layer: int, part: int = 0) -> None:
    """Change one byte of a block of a request in the pool, in a part of a layer."""
    pool = worker.client.pool
    assert pool is not None
    layout = BlockLayout(worker.plan.layout)
    offset = request.pool_blocks[at] * layout.stride + layout.spans(layer)[part].offset + 100
    old = pool.read_bytes(offset, 1)
    pool.write_bytes(offset, bytes([old[0] ^ 0x40]))


def gate_in_the_wrong_hook(patch: pytest.MonkeyPatch) -> None:
    """Ask a layer's gate where vLLM waits for loads: after it has written the new rows."""
    from engine_shim.vllm import adapter
    from engine_shim.vllm.connector import KvdConnector

    def wait_for_layer_load(self: Any, layer_name: str) -> None:
        worker = self._worker
        if worker is not None and worker.is_open:
            layer = self._layer_of[layer_name]
            self._before_layer(layer)
            worker.written(layer)

    patch.setattr(adapter, "add_layer_hooks", lambda *_: None)
    patch.setattr(KvdConnector, "wait_for_layer_load", wait_for_layer_load)
