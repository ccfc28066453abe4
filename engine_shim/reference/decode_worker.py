"""Puts a decode rank together: model, device, hot buffers, region, kvd."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from engine_shim.client import ClientOptions, KvdClient, KvdRefused, MemberIdentity
from engine_shim.device_cpu import CpuDevice
from engine_shim.device_memory import MemfdMemory
from engine_shim.reference import orders as od
from engine_shim.reference.block_ids import BlockIds
from engine_shim.reference.collective import Collective
from engine_shim.reference.config import ModelConfig
from engine_shim.reference.engine_decode import DecodeEngine
from engine_shim.reference.hot_cache import HotStore, region_layout
from engine_shim.reference.layouts import INDEXER
from engine_shim.reference.model import SparseModel
from engine_shim.reference.rank_group import RankGroup
from engine_shim.ring import resident_part
from engine_shim.steps import StepFailed
from kvd.wire.layout import ResidentPart


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """How a decode engine is set up; see `serve.py` for its command line.

    max_tokens:    longest sequence, new tokens included.
    num_requests:  sequences of that length that the region holds.
    hot_rows:      rows of a hot buffer in each layer, 0 for `default_hot_rows`.
    max_width:     positions of a decode step at most.
    kv_port:       base of the ports where kvd listens for producers, 0 for none.
    reads:         "native" or "torch", how selected rows are read; see `hot_cache`.
    """

    engine: str
    runtime_dir: str = ""
    max_tokens: int = 32768
    num_requests: int = 2
    block_tokens: int = 128
    hot_rows: int = 0
    max_width: int = 4
    kv_port: int = 0
    host: str = "127.0.0.1"
    transfer_deadline_s: float = 120.0
    reads: str = "native"


def default_hot_rows(config: ModelConfig) -> int:
    """Rows of a hot buffer in each layer where nothing else is said: twice the selection."""
    return 2 * config.index_topk


class DecodeWorker:
    """One rank, ready to decode; closes everything that it made."""

    def __init__(
        self,
        config: ModelConfig,
        options: DecodeOptions,
        collective: Collective,
        group: RankGroup,
        client_options: ClientOptions | None = None,
    ) -> None:
        """Attach to kvd, get the region, make the hot buffers.

        Raises: KvdRefused, DeviceError, ValueError; nothing is left then.
        """
        rank = collective.rank
        blocks = options.num_requests * -(-options.max_tokens // options.block_tokens)
        with ExitStack() as undo:
            self._device = CpuDevice()
            undo.callback(self._device.close, 5_000_000_000)
            self._device.bind_thread()
            resident, index = self._resident(config, options, blocks, undo)
            identity = MemberIdentity(
                engine=options.engine,
                member=f"rank{rank}",
                is_scheduler=rank == 0,
                rank=rank,
                tp_size=collective.size,
                memory_fd=resident.fd,
                memory_bytes=resident.nbytes,
                resident=(index,),
                kv_port=options.kv_port,
            )
            self.client = KvdClient(identity, options.runtime_dir, client_options)
            undo.callback(self.client.close)
            self.client.open()
            name = f"{options.engine}-kv"
            port = options.kv_port + rank if options.kv_port else 0
            self.engine = DecodeEngine(
                SparseModel(config, rank, collective),
                self.client,
                lambda: self._make_store(name, config, options, blocks, resident, collective),
                name,
                BlockIds(blocks),
                group,
                peer=f"{options.host}:{port}",
                transfer_deadline_s=options.transfer_deadline_s,
            )
            self._resident_bytes = config.token_bytes * blocks * options.block_tokens
            self._device_bytes = resident.nbytes + self.engine.store.hot.layout.num_bytes
            self._max_width = options.max_width
            self._undo = undo.pop_all()

    def _resident(
        self, config: ModelConfig, options: DecodeOptions, blocks: int, undo: ExitStack
    ) -> tuple[MemfdMemory, ResidentPart]:
        """Device memory of the indexer's rows, which stay there; `undo` frees it."""
        layers = list(config.index_layers)
        part, num_bytes = resident_part(
            INDEXER, config.index_row_bytes, layers, blocks, options.block_tokens, 0
        )
        memory = self._device.alloc(num_bytes, "indexer")
        undo.callback(memory.close)
        return memory, part

    def _make_store(
        self,
        region_name: str,
        config: ModelConfig,
        options: DecodeOptions,
        blocks: int,
        resident: MemfdMemory,
        collective: Collective,
    ) -> HotStore:
        """The engine's region, made by kvd, with hot buffers before it; again after a restart.

        Raises: KvdRefused, DeviceError; ValueError for steps that native operations cannot do.
        """
        region = self.client.region_create(
            region_name,
            config.num_layers,
            blocks,
            options.block_tokens,
            config.main_row_bytes,
            options.transfer_deadline_s,
        )
        return HotStore(
            config,
            self._device,
            region,
            region_layout(config, blocks, options.block_tokens),
            slots=options.hot_rows or default_hot_rows(config),
            num_buffers=options.num_requests,
            max_step_tokens=options.max_width,
            index_memory=resident,
            writes_region=collective.rank == 0,
            native=options.reads == "native",
            num_heads=config.num_heads // collective.size,
        )

    def ready(self) -> od.Ready:
        """What to say once it is."""
        return od.Ready(os.getpid(), self._device_bytes, self._resident_bytes)

    def handle(self, order: od.Order, say: od.Say) -> None:
        """Carry out one order."""
        match order:
            case od.Expect(request, num_tokens, num_new):
                say(od.Expecting(request, self.engine.expect(request, num_tokens, num_new)))
            case od.Decode():
                self._decode(order, say)
            case od.Drop(request):
                self.engine.drop(request)
                say(od.Figures({}))
            case od.Report():
                say(od.Figures(self._figures()))
            case _:
                raise StepFailed("order_refused", "a decode engine does not do this")

    def _decode(self, order: od.Decode, say: od.Say) -> None:
        if not 1 <= order.width <= self._max_width:
            raise StepFailed("order_refused", f"width is 1 to {self._max_width}")
        result = self.engine.decode(
            order.request,
            order.tokens,
            order.num_new,
            order.width,
            order.deadline_s,
            overlapped=order.overlapped,
        )
        self.client.stats(self._figures())
        done = result.decoded
        say(
            od.Decoded(
                order.request,
                done.tokens,
                done.num_steps,
                done.num_accepted,
                done.num_rejected,
                done.logits_digest,
                result.waited_s,
                result.seconds,
                result.figures.named(),
            )
        )

    def _figures(self) -> dict[str, float]:
        return self.engine.store.figures()

    def follow(self) -> None:
        """Be another rank until the engine ends."""
        self.engine.follow()

    def close(self) -> None:
        """Stop and give everything back."""
        self.engine.close()
        with suppress(KvdRefused):
            self.client.goodbye()
        self._undo.close()
