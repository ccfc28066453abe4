"""Puts a prefill rank together: model, device, ring, memory, kvd."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from engine_shim.client import ClientOptions, KvdClient, KvdRefused, MemberIdentity
from engine_shim.device_cpu import CpuDevice
from engine_shim.pipeline import PipelineOptions, PrefillPipeline
from engine_shim.reference import orders as od
from engine_shim.reference.collective import Collective
from engine_shim.reference.config import ModelConfig
from engine_shim.reference.engine_prefill import PrefillEngine
from engine_shim.reference.hashing import hash_probe
from engine_shim.reference.indexer import select_rows
from engine_shim.reference.layouts import block_layout, ring_plan
from engine_shim.reference.model import Select, SparseModel
from engine_shim.reference.rank_group import RankGroup
from engine_shim.reference.ring_cache import SlotTensors
from engine_shim.ring import device_layout
from engine_shim.steps import StepFailed
from kvd.plan.layout import BlockLayout
from kvd.plan.ring import RingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOptions:
    """How a prefill engine is set up; see `serve.py` for its command line.

    max_tokens:  longest prompt; every layer buffer has room for it.
    num_shared:  buffers that the rotating layers share.
    independent: layers with a buffer of their own, or "all".
    """

    engine: str
    runtime_dir: str = ""
    max_tokens: int = 32768
    block_tokens: int = 128
    chunk: int = 2048
    num_shared: int = 3
    independent: tuple[int, ...] | str = (0,)
    lookahead: int = 1
    spare_buffers: int = 1
    step_deadline_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("max_tokens", "block_tokens", "chunk", "num_shared"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more")
        if self.chunk % self.block_tokens:
            raise ValueError(
                f"chunk is {self.chunk}; give a multiple of block_tokens ({self.block_tokens})"
            )


def plan(config: ModelConfig, options: PrefillOptions) -> RingPlan:
    """The ring of an engine with these options."""
    return ring_plan(
        config,
        max_tokens=options.max_tokens,
        block_tokens=options.block_tokens,
        num_shared=options.num_shared,
        independent=options.independent,
        lookahead=options.lookahead,
        spare_buffers=options.spare_buffers,
    )


class PrefillWorker:
    """One rank, ready to prefill; closes everything that it made."""

    def __init__(
        self,
        config: ModelConfig,
        options: PrefillOptions,
        collective: Collective,
        group: RankGroup,
        client_options: ClientOptions | None = None,
        select: Select = select_rows,
    ) -> None:
        """Attach to kvd and start the pipeline; select: see `SparseModel`.

        Raises: KvdRefused, DeviceError, ValueError; nothing is left then.
        """
        rank, size = collective.rank, collective.size
        self.ring = plan(config, options)
        layout, num_bytes = device_layout(self.ring)
        blocks = block_layout(config, options.block_tokens)
        with ExitStack() as undo:
            self._device = CpuDevice()
            undo.callback(self._device.close, 5_000_000_000)
            self._device.bind_thread()
            memory = self._device.alloc(num_bytes, "slots")
            undo.callback(memory.close)
            identity = MemberIdentity(
                engine=options.engine,
                member=f"rank{rank}",
                is_scheduler=rank == 0,
                rank=rank,
                tp_size=size,
                contributes=rank == 0,
                hash_probe=hash_probe(),
                layout=blocks,
                num_slots=len(self.ring.slots),
                device=layout,
                memory_fd=memory.fd,
                memory_bytes=num_bytes,
            )
            self.client = KvdClient(identity, options.runtime_dir, client_options)
            undo.callback(self.client.close)
            self.client.open()
            self._view = memory.mapping.view()
            undo.callback(self._view.release)
            tensors = SlotTensors(config, layout, self._view)
            pipeline = PrefillPipeline(
                self.client,
                self._device,
                self.ring,
                memory,
                layout,
                BlockLayout(blocks),
                PipelineOptions(shard=0, contributes=rank == 0, shares_spans=size > 1),
            )
            self.pipeline = pipeline
            model = SparseModel(config, rank, collective, select)
            self.engine = PrefillEngine(
                model,
                self.client,
                pipeline,
                tensors,
                group,
                chunk=options.chunk,
                step_deadline_s=options.step_deadline_s,
            )
            self._undo = undo.pop_all()

    def ready(self) -> od.Ready:
        """What to say once it is."""
        ring = self.pipeline.ring
        return od.Ready(os.getpid(), ring.device_bytes, ring.resident_bytes, ring.why)

    def handle(self, order: od.Order, say: od.Say) -> None:
        """Carry out one order."""
        match order:
            case od.Prefill(request, tokens, targets):

                def progress(done: int, total: int) -> None:
                    say(od.Progress(request, done, total))

                result = self.engine.prefill(request, tokens, targets, progress)
                self.client.stats(
                    {
                        "spare_left": float(self.pipeline.figures().spares_left),
                        "saves_shed": float(self.engine.shed_blocks),
                    }
                )
                say(
                    od.Prefilled(
                        request,
                        result.num_tokens,
                        result.hit_tokens,
                        result.num_steps,
                        result.seconds,
                        result.first_token,
                        list(result.transfers),
                    )
                )
            case od.Report():
                say(od.Figures(self._figures()))
            case _:
                raise StepFailed("order_refused", "a prefill engine does not do this")

    def _figures(self) -> dict[str, float]:
        figures = self.pipeline.figures()
        return {
            "loaded_bytes": float(figures.loaded_bytes),
            "saved_bytes": float(figures.saved_bytes),
            "exposed_s": figures.exposed_s,
            "load_s": figures.load_s,
            "save_s": figures.save_s,
            "spares_left": float(figures.spares_left),
            "saves_shed": float(self.engine.shed_blocks),
        }

    def follow(self) -> None:
        """Be another rank until the engine ends."""
        self.engine.follow()

    def close(self) -> None:
        """Stop, say goodbye, give everything back."""
        self.engine.close()
        with suppress(KvdRefused):
            self.client.goodbye()
        self._undo.close()
