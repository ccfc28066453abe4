"""What the connector for vLLM costs in a step that neither saves nor loads anything.

Both sides of it in one process, without vLLM: a decode step of a resident engine, all hooks of all
layers called as vLLM calls them, with a real kvd.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Final

from bench.daemon import OwnDaemon
from bench.report import Better, Row, measure
from engine_shim.client import KvdClient, MemberIdentity
from engine_shim.device_cpu import CpuDevice
from engine_shim.vllm.engine_plan import MAIN, CacheSpec, EnginePlan, EnginePlanner, EngineShape
from engine_shim.vllm.options import ConnectorOptions
from engine_shim.vllm.scheduler import SchedulerSide
from engine_shim.vllm.shares import Scheduled
from engine_shim.vllm.worker import Rank, WorkerSide

TARGET_US: Final = 140.0
LAYERS: Final = 61
BLOCK_TOKENS: Final = 128
ROW_BYTES: Final = 256
PROMPT: Final = 1000
STEPS: Final = 200
REQUESTS: Final = (1, 16)
CLOSE_NS: Final = 5_000_000_000


def hook_rows(rounds: int) -> list[Row]:
    """Microseconds of a step, for a few numbers of requests."""
    rows = []
    for count in REQUESTS:
        with _sides() as (scheduler, worker):
            samples = [_steps(scheduler, worker, count) for _ in range(rounds)]
        rows.append(
            measure(
                f"hooks of a step that moves nothing, {LAYERS} layers",
                f"{count} request{'s' if count > 1 else ''}",
                samples,
                unit="us",
                target=TARGET_US,
                better=Better.LOWER,
            )
        )
    return rows


def _plan() -> EnginePlan:
    caches = [
        CacheSpec(f"layers.{at}.attn", at, MAIN, ROW_BYTES * BLOCK_TOKENS, True)
        for at in range(LAYERS)
    ]
    shape = EngineShape("bench", "uint8", BLOCK_TOKENS, 1, 4 * PROMPT, max(REQUESTS))
    planner = EnginePlanner(ConnectorOptions(offload="resident"), shape, caches)
    return planner.plan(512 << 20, 1)


@contextmanager
def _sides() -> Iterator[tuple[SchedulerSide, WorkerSide]]:
    plan, log = _plan(), logging.getLogger("bench")
    with ExitStack() as undo:
        daemon = undo.enter_context(OwnDaemon("pool.size=512MiB", "pool.huge_pages=off"))
        options = ConnectorOptions(offload="resident", runtime_dir=str(daemon.runtime_dir))
        device = CpuDevice()
        undo.callback(device.close, CLOSE_NS)
        memory = device.alloc(plan.device()[1], "slots")
        undo.callback(memory.close)
        rank = Rank("bench", 0, 1, 0, 0, True)
        worker = WorkerSide(
            plan, options, rank, device, memory, log, moved=lambda layer, slot: None
        )
        undo.callback(worker.close)
        identity = MemberIdentity("bench", "scheduler", is_scheduler=True, layout=plan.layout)
        client = KvdClient(identity, options.runtime_dir).open()
        scheduler = SchedulerSide(
            plan, options, client, log, chunk_tokens=2048, hashes_per_block=1, recompute=False
        )
        undo.callback(scheduler.close)
        yield scheduler, worker


def _steps(scheduler: SchedulerSide, worker: WorkerSide, count: int) -> float:
    """Decode steps of some requests; microseconds of one."""
    requests = [
        SimpleNamespace(
            request_id=f"r{at}", block_hashes=[], num_tokens=PROMPT, num_computed_tokens=PROMPT
        )
        for at in range(count)
    ]
    blocks = tuple(range(1, 2 + PROMPT // BLOCK_TOKENS))
    for request in requests:
        scheduler.matched_tokens(request, 0)
        scheduler.allocated(request, list(blocks), 0)
    _step(scheduler, worker, [Scheduled(r.request_id, 0, PROMPT, blocks, True) for r in requests])
    while not worker.pipeline.is_quiet:
        time.sleep(0.001)
    started = time.perf_counter_ns()
    for at in range(STEPS):
        _step(
            scheduler,
            worker,
            [Scheduled(r.request_id, PROMPT + at % 20, 1, (), False) for r in requests],
        )
    spent = time.perf_counter_ns() - started
    for request in requests:
        scheduler.finished(request, ok=True)
    return spent / STEPS / 1000


def _step(scheduler: SchedulerSide, worker: WorkerSide, shares: list[Scheduled]) -> None:
    worker.begin(scheduler.order(shares))
    for layer in range(LAYERS):
        if worker.is_open:
            worker.before_layer(layer)
        if worker.is_open:
            worker.written(layer)
        if worker.is_open:
            worker.computed(layer)
    worker.end()
    worker.take_bad_blocks()
    scheduler.reported(worker.take_report())
    scheduler.take_ends()
