"""A prefill rank on a kvd of its own, whose model computes nothing: what the shim itself costs."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from bench.daemon import OwnDaemon
from engine_shim.client import KvdClient, MemberIdentity
from engine_shim.copy_plan import CopyPlan
from engine_shim.device_cpu import CpuDevice
from engine_shim.layer_rows import LayerRows
from engine_shim.pipeline import PrefillPipeline
from engine_shim.ring import device_layout
from engine_shim.steps import StepRequest
from kvd.plan.layout import BlockLayout
from kvd.plan.ring import plan_ring
from kvd.wire.layout import BlockLayoutSpec, Part
from kvd_kernels.host import Mapping, copy_spans

BLOCK_TOKENS = 128
STEP_S = 60.0
CLOSE_NS = 5_000_000_000
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """What is moved: `sets` groups of blocks take turns, so that each is cold when it comes.

    block_bytes: of one layer in one block.
    buffers:     slots that the layers share.
    """

    block_bytes: int
    layers: int = 8
    blocks: int = 64
    sets: int = 1
    buffers: int = 4
    lookahead: int = 3
    checksums: str = "off"

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a step."""
        return self.block_bytes * self.blocks

    @property
    def step_bytes(self) -> int:
        """Bytes of all layers of a step."""
        return self.layer_bytes * self.layers

    @property
    def pool_mib(self) -> int:
        """Pool that holds all sets."""
        return self.step_bytes * self.sets // MIB + 64


def _nothing() -> None:
    """Compute nothing."""


class Rig:
    """A real kvd process, a client, a pipeline with slots in a memfd; `with` starts and ends it."""

    def __init__(self, shape: Shape) -> None:
        """Nothing is started before it is entered."""
        self.shape = shape
        self._undo = ExitStack()
        self._at = 0

    def __enter__(self) -> Self:
        """Start kvd and the pipeline, and save every block once."""
        with ExitStack() as undo:
            self._start(undo)
            self._undo = undo.pop_all()
        for _ in range(self.shape.sets):
            self.save()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End everything."""
        self._undo.close()

    def _start(self, undo: ExitStack) -> None:
        shape = self.shape
        self.daemon = undo.enter_context(
            OwnDaemon(
                f"pool.size={shape.pool_mib}MiB",
                "pool.huge_pages=prefer",
                f"pool.checksums={shape.checksums}",
            )
        )
        parts = [[Part("main", shape.block_bytes // BLOCK_TOKENS)] for _ in range(shape.layers)]
        spec = BlockLayoutSpec("bench", "uint8", BLOCK_TOKENS, parts)
        self.ring = plan_ring(
            [tuple(layer) for layer in parts],
            independent=(),
            num_shared=shape.buffers,
            num_blocks=shape.blocks,
            block_tokens=BLOCK_TOKENS,
            spare_buffers=0,
            lookahead=min(shape.lookahead, max(1, shape.layers - 1)),
        )
        device = CpuDevice()
        undo.callback(device.close, CLOSE_NS)
        layout, size = device_layout(self.ring)
        self.memory = device.alloc(size, "slots")
        undo.callback(self.memory.close)
        self.memory.mapping.populate(0, size)
        identity = MemberIdentity(
            engine="bench",
            member="rank0",
            is_scheduler=True,
            rank=0,
            contributes=True,
            layout=spec,
            num_slots=len(self.ring.slots),
            device=layout,
            memory_fd=self.memory.fd,
            memory_bytes=size,
        )
        self.client = KvdClient(identity, str(self.daemon.runtime_dir))
        undo.callback(self.client.close)
        self.client.open()
        self.rows = LayerRows(layout, BlockLayout(spec), 0)
        self.pipeline = PrefillPipeline(
            self.client, device, self.ring, self.memory, layout, BlockLayout(spec)
        )
        undo.callback(self.pipeline.close)
        self._blocks = [
            tuple(self.client.reserve(f"set{at}", shape.blocks)) for at in range(shape.sets)
        ]
        pool = self.client.pool
        assert pool is not None
        self.pool: Mapping = pool
        pool.populate(0, pool.size)

    def turn(self) -> int:
        """The set whose turn it is."""
        self._at = (self._at + 1) % self.shape.sets
        return self._at

    def request(self, at: int, *, loads: bool) -> StepRequest:
        """A step that only loads, or only saves, all blocks of a set."""
        tokens = self.shape.blocks * BLOCK_TOKENS
        ids = tuple(range(self.shape.blocks))
        return StepRequest(f"set{at}", ids, self._blocks[at], tokens if loads else 0, tokens)

    def save(self) -> float:
        """Save a step and wait for it; GB/s."""
        return self._step(loads=False)

    def load(self) -> float:
        """Load a step and wait for it; GB/s."""
        return self._step(loads=True)

    def alone(self, run: Callable[[], float]) -> Callable[[], float]:
        """The same, begun when kvd has heard all of what came before."""

        def when_heard() -> float:
            self.client.flush()
            return run()

        return when_heard

    def _step(self, *, loads: bool) -> float:
        request = self.request(self.turn(), loads=loads)
        started = time.perf_counter_ns()
        self.run(request)
        return self.shape.step_bytes / (time.perf_counter_ns() - started)

    def run(self, request: StepRequest, compute: Callable[[], object] = _nothing) -> None:
        """One step through all layers; what slots hold of the request is forgotten before."""
        self.pipeline.forget(request.request)
        self.pipeline.begin_step([request], STEP_S)
        for layer in range(self.shape.layers):
            self.pipeline.before_write(layer)
            self.pipeline.written(layer)
            compute()
            self.pipeline.computed(layer)
        self.pipeline.end_step(wait_saves=True)

    def spans(self, request: StepRequest, *, loads: bool) -> array[int]:
        """What the pipeline copies in such a step, as one list."""
        plan = CopyPlan()
        for layer, slot in enumerate(self.ring.slot_of):
            if loads:
                self.rows.add_load(plan, layer, slot, request, 0, None)
            else:
                self.rows.add_save(plan, layer, slot, request, "off")
        return plan.plain.buffer

    def bare(self, kernel: str, threads: int, *, loads: bool) -> float:
        """The same copies by a kernel alone, no kvd in it; GB/s.

        The threads share each layer, as a slot holds one at a time. Were one half of the layers
        each thread's, both would read the same slots at the same time: what no two layers can do,
        and nearly half as fast again where these then come out of the cache.
        """
        spans = self.spans(self.request(self.turn(), loads=loads), loads=loads)
        ends = (self.memory.mapping, self.pool) if loads else (self.pool, self.memory.mapping)
        return copy_rate(*ends, spans, kernel, threads, parts=self.shape.layers)


def copy_rate(
    dst: Mapping,
    src: Mapping,
    spans: Sequence[int],
    kernel: str,
    threads: int = 1,
    parts: int = 1,
) -> float:
    """GB/s of so many threads that share each of so many equal parts of the spans among them."""
    shares = [array("Q") for _ in range(threads)]
    size = len(spans) // parts
    for start in range(0, len(spans), size):
        part = spans[start : start + size]
        for at in range(0, len(part), 3):
            shares[at * threads // len(part)].extend(part[at : at + 3])
    started = time.perf_counter_ns()
    helpers = [
        threading.Thread(target=copy_spans, args=(dst, src, share), kwargs={"kernel": kernel})
        for share in shares[1:]
    ]
    for helper in helpers:
        helper.start()
    copy_spans(dst, src, shares[0], kernel=kernel)
    for helper in helpers:
        helper.join()
    return sum(spans[2::3]) / (time.perf_counter_ns() - started)
