"""Decode of the reference engine over a long context whose rows a seeded generator wrote.

The region is one that kvd made. The same tokens are decoded twice: with a hot buffer, and with
every selected row read from the region afresh (`FreshCache`); they must agree in every bit.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bench.daemon import OwnDaemon
from engine_shim.client import ClientOptions, KvdClient, MemberIdentity
from engine_shim.device_cpu import CpuDevice
from engine_shim.device_memory import MemfdMemory, mapping_of
from engine_shim.reference.bytes_tokenizer import VOCAB_SIZE
from engine_shim.reference.cache import BlockTable, KvCache, PagedView
from engine_shim.reference.config import ModelConfig
from engine_shim.reference.generate import Decoded, decode
from engine_shim.reference.hot_cache import HotStore, NativeHotCache, region_layout
from engine_shim.reference.index_rows import store_keys
from engine_shim.reference.indexer import IndexQueries
from engine_shim.reference.layouts import rows_tensor
from engine_shim.reference.model import SparseModel
from engine_shim.reference.native_reads import NativeReads, RowsAtHand, step_sizes
from engine_shim.sparse_ops import KeyRows
from kvd.plan.layout import RegionLayout
from kvd_kernels.host import Mapping

BLOCK_TOKENS = 128
SEED = 20260101
_GENERATED_ROWS = 16384
_REGION_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Case:
    """num_tokens: length of the context at the end; num_new: of these, decoded."""

    num_tokens: int
    num_new: int
    slots: int
    num_layers: int = 5
    topk: int = 2048

    def config(self) -> ModelConfig:
        """One indexer, whose selection all layers follow."""
        return ModelConfig(
            num_layers=self.num_layers,
            index_layers=(0,),
            index_topk=self.topk,
            index_dim=128,
            index_fp8=True,
            max_positions=self.num_tokens,
            key_tile=4096,
            seed=SEED,
        )


@dataclass(slots=True)
class Outcome:
    """What a case gave; `figures` are those of the hot buffers."""

    device_bytes: int
    resident_bytes: int
    hot: Decoded
    fresh: Decoded
    hot_seconds: list[float] = field(default_factory=list)
    fresh_seconds: list[float] = field(default_factory=list)
    fill_seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether tokens and logits agree in every bit."""
        same = self.hot.tokens == self.fresh.tokens
        return same and self.hot.logits_digest == self.fresh.logits_digest


class FreshCache:
    """A cache that reads every row from the region whenever it is selected, in any kind of read."""

    def __init__(
        self, region: list[Tensor], index: Tensor, table: BlockTable, reads: RowsAtHand
    ) -> None:
        """region: rows of each layer; index: stored index keys of the one indexer layer.

        reads: native, of the same.
        """
        self._main = [PagedView(rows, table) for rows in region]
        self._index = PagedView(index, table)
        self._reads = reads
        self._written = 0

    def begin_layer(self, layer: int) -> None:
        """Do nothing."""

    def write(self, layer: int, positions: Tensor, main: Tensor, index: Tensor | None) -> None:
        """Store the step's rows in the region."""
        self._main[layer].write(positions, main)
        if index is not None:
            self._index.write(positions, index)
            self._written = int(positions[-1]) + 1

    def end_write(self, layer: int) -> None:
        """Do nothing."""

    def choose(self, layer: int, queries: IndexQueries) -> None:
        """Select natively."""
        self._reads.choose(layer, queries, self._written)

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """Attend to rows of the region."""
        return self._reads.attend(layer, queries)

    def index_keys(self, layer: int, num_tokens: int) -> Tensor:
        """Stored index keys of positions [0, num_tokens)."""
        return self._index.prefix(num_tokens)

    def selected(self, layer: int, positions: Tensor) -> None:
        """Do nothing."""

    def gather(self, layer: int, selected: Tensor) -> Tensor:
        """Rows by position."""
        return self._main[layer].gather(selected)

    def end_layer(self, layer: int) -> None:
        """Do nothing."""

    def truncate(self, num_tokens: int) -> None:
        """Do nothing: what was written is written again."""


class Natively(KvCache, NativeReads, Protocol):
    """A cache that can be read natively."""


class Timed:
    """Another cache, with the time at which each step's first layer began."""

    def __init__(self, cache: Natively) -> None:
        self._cache = cache
        self.starts: list[float] = []
        # Looked for by name, which `__getattr__` is not asked for by every Python.
        self.choose, self.attend = cache.choose, cache.attend

    def begin_layer(self, layer: int) -> None:
        """See `KvCache`."""
        if layer == 0:
            self.starts.append(time.perf_counter())
        self._cache.begin_layer(layer)

    def __getattr__(self, name: str) -> object:
        return getattr(self._cache, name)


def run_case(case: Case) -> Outcome:
    """Decode with and without a hot buffer.

    Raises: KvdRefused when the region cannot be had.
    """
    config = case.config()
    blocks = -(-case.num_tokens // BLOCK_TOKENS)
    layout = region_layout(config, blocks, BLOCK_TOKENS)
    with ExitStack() as undo:
        room = f"regions.size_max={layout.num_bytes + (64 << 20)}B"
        daemon = undo.enter_context(OwnDaemon("pool.size=64MiB", "pool.headroom=0B", room))
        options = ClientOptions(deadline_s=_REGION_SECONDS)
        client = KvdClient(MemberIdentity("million", "rank0"), str(daemon.runtime_dir), options)
        undo.enter_context(client)
        region = client.region_create(
            "million", layout.num_layers, blocks, BLOCK_TOKENS, layout.row_bytes, _REGION_SECONDS
        )
        index = MemfdMemory(blocks * BLOCK_TOKENS * config.index_row_bytes, "indexer")
        undo.callback(index.close)
        started = time.perf_counter()
        order = list(range(blocks))
        random.Random(SEED).shuffle(order)
        _fill(region, layout, index, config)
        filled = time.perf_counter() - started
        outcome = _decode_both(case, config, region, layout, index, order)
        outcome.fill_seconds = filled
        return outcome


def _decode_both(
    case: Case,
    config: ModelConfig,
    region: Mapping,
    layout: RegionLayout,
    index: MemfdMemory,
    order: Sequence[int],
) -> Outcome:
    model = SparseModel(config)
    generator = random.Random(SEED)
    known = case.num_tokens - case.num_new
    tokens = [generator.randrange(VOCAB_SIZE) for _ in range(known)]
    device = CpuDevice()
    device.bind_thread()
    store = HotStore(
        config,
        device,
        region,
        layout,
        slots=case.slots,
        num_buffers=1,
        max_step_tokens=1,
        index_memory=index,
    )
    cache = store.open("million", order)
    assert isinstance(cache, NativeHotCache)
    cache.landed(known - 1)
    timed = Timed(cache)
    hot = decode(model, timed, tokens, case.num_new)  # type: ignore[arg-type]
    figures = store.figures()
    device_bytes = store.hot.layout.num_bytes + index.nbytes
    cache.close()
    store.close()
    del cache, timed.choose, timed.attend
    fresh_timed, fresh = _decode_afresh(model, region, layout, index, order, tokens, case)
    return Outcome(
        device_bytes,
        config.token_bytes * case.num_tokens,
        hot,
        fresh,
        _differences(timed.starts),
        _differences(fresh_timed.starts),
        figures=figures,
    )


def _decode_afresh(
    model: SparseModel,
    region: Mapping,
    layout: RegionLayout,
    index: MemfdMemory,
    order: Sequence[int],
    tokens: Sequence[int],
    case: Case,
) -> tuple[Timed, Decoded]:
    config = model.config
    table = BlockTable(layout.block_tokens, layout.num_blocks)
    table.append(order)
    keys, row = index_rows(config, index), config.index_row_bytes
    sizes = step_sizes(config, width=1, num_heads=None, context=case.num_tokens)
    key_rows = KeyRows(keys.view(torch.uint8).numpy(), 0, layout.block_tokens * row, row)
    reads = RowsAtHand(
        config,
        sizes,
        region.view(),
        {0: key_rows},
        order,
        layout.block_tokens,
        layout.num_blocks,
    )
    cache = Timed(FreshCache(region_rows(config, region, layout), keys, table, reads))
    return cache, decode(model, cache, tokens, case.num_new)  # type: ignore[arg-type]


def region_rows(config: ModelConfig, region: Mapping, layout: RegionLayout) -> list[Tensor]:
    """Rows of each layer of a region: [num_blocks * block_tokens, row_dim]."""
    view, rows = region.view(), layout.num_blocks * layout.block_tokens
    return [
        rows_tensor(view, layer * layout.layer_bytes, rows, layout.row_bytes, config.dtype)
        for layer in range(layout.num_layers)
    ]


def index_rows(config: ModelConfig, memory: MemfdMemory) -> Tensor:
    """Stored index keys: [num_blocks * block_tokens, index_elements]."""
    view = mapping_of("index", memory).view()
    rows = len(view) // config.index_row_bytes
    return rows_tensor(view, 0, rows, config.index_row_bytes, config.index_storage)


def _fill(region: Mapping, layout: RegionLayout, index: MemfdMemory, config: ModelConfig) -> None:
    """Write main rows of +-[0.5, 1) and normal index keys; equal seeds give equal bytes."""
    generator = np.random.Generator(np.random.SFC64(SEED))
    for rows in region_rows(config, region, layout):
        bits = rows.view(torch.int16).numpy().view(np.uint16)
        for start in range(0, len(bits), _GENERATED_ROWS):
            part = bits[start : start + _GENERATED_ROWS]
            raw = np.frombuffer(generator.bytes(part.nbytes), np.uint16).reshape(part.shape)
            # bfloat16: sign and mantissa at random, the exponent that of numbers below 1.
            np.bitwise_or(np.bitwise_and(raw, 0x807F), 0x3F00, out=part)
    keys = index_rows(config, index)
    for start in range(0, keys.shape[0], _GENERATED_ROWS):
        drawn = generator.standard_normal((len(keys[start : start + _GENERATED_ROWS]), 128), "f4")
        keys[start : start + _GENERATED_ROWS] = store_keys(config, torch.from_numpy(drawn))


def _differences(starts: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(starts)]
