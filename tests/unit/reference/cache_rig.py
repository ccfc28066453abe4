"""A hot store on a device of its own, prompts, drafts, and what is right after a prompt."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import torch

from engine_shim.device_cpu import CpuDevice
from engine_shim.device_memory import MemfdMemory
from engine_shim.reference.cache import ResidentCache
from engine_shim.reference.config import ModelConfig, tiny
from engine_shim.reference.generate import Decoded, decode, prefill
from engine_shim.reference.hot_cache import (
    HotCache,
    HotStore,
    NativeHotCache,
    region_layout,
)
from engine_shim.reference.model import SparseModel
from engine_shim.reference.native_reads import NativeResidentCache
from engine_shim.testing import FaultyDevice, Rule

SECOND = 1_000_000_000
CONFIG = tiny()
TOPK = CONFIG.index_topk
BLOCK = 8
NUM_BLOCKS = 40
HOT = 32
WIDTH = 4
NEW = 12
LENGTHS = sorted(
    {1, 2, *(it + off for it in (BLOCK, TOPK, HOT, 2 * HOT) for off in (-1, 0, 1)), 150}
)


class Rig:
    """A store on a device of its own, and what it stands on."""

    def __init__(
        self,
        slots: int = HOT,
        rules: Sequence[Rule] = (),
        *,
        track_rows: bool = False,
        native: bool = False,
        config: ModelConfig = CONFIG,
        timeout_ns: int = 10 * SECOND,
        width: int = WIDTH,
    ) -> None:
        self.width = width
        self.config, self.native, self.timeout_ns = config, native, timeout_ns
        self.layout = region_layout(config, NUM_BLOCKS, BLOCK)
        self.device = FaultyDevice(CpuDevice(), rules)
        self.region = MemfdMemory(self.layout.num_bytes, "region")
        size = len(config.index_layers) * NUM_BLOCKS * BLOCK * config.index_row_bytes
        self.index = MemfdMemory(size, "index")
        self.store = self.make_store(slots, track_rows=track_rows)
        self.free = random.Random(slots).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.blocks: dict[str, list[int]] = {}

    def make_store(
        self, slots: int, *, track_rows: bool = False, writes_region: bool = True
    ) -> HotStore:
        return HotStore(
            self.config,
            self.device,
            self.region.mapping,
            self.layout,
            slots=slots,
            num_buffers=2,
            max_step_tokens=self.width,
            index_memory=self.index,
            track_rows=track_rows,
            writes_region=writes_region,
            native=self.native,
            timeout_ns=self.timeout_ns,
        )

    def open(
        self, name: str, num_tokens: int, source: ResidentCache | None, *, ordered: bool = True
    ) -> HotCache:
        """Open a request on scattered blocks, with the rows of `source`."""
        self.blocks[name] = [
            self.free.pop() for _ in range(0, num_tokens + NEW + self.width, BLOCK)
        ]
        cache = self.store.open(name, self.blocks[name], ordered=ordered)
        if source is not None:
            land(cache, source, num_tokens, self.config)
        return cache

    def end(self, name: str, cache: HotCache) -> None:
        """Close a request; its blocks may be another's next."""
        cache.close()
        self.free.extend(self.blocks.pop(name))

    def close(self) -> None:
        self.store.close()
        self.index.close()
        self.region.close()
        self.device.close(10 * SECOND)


def land(
    cache: HotCache, source: ResidentCache, num_tokens: int, config: ModelConfig = CONFIG
) -> None:
    """Hand the rows of a prompt over."""
    positions = torch.arange(num_tokens)
    for layer in range(config.num_layers):
        main = source.gather(layer, positions.unsqueeze(0))[0]
        has_index = layer in config.index_layers
        index = source.index_keys(layer, num_tokens) if has_index else None
        cache.land(layer, positions, main, index)


def native(cache: HotCache) -> NativeHotCache:
    """The same cache, which is native."""
    assert isinstance(cache, NativeHotCache)
    return cache


class HalfRight:
    """Drafts that are right for a while: what comes, with a token in so many changed."""

    def __init__(self, coming: Sequence[int], wrong_each: int = 3) -> None:
        self.coming, self.wrong_each = list(coming), wrong_each

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        drafts = self.coming[len(tokens) : len(tokens) + count]
        return [
            (draft + 1) % 256 if (len(tokens) + at) % self.wrong_each == 0 else draft
            for at, draft in enumerate(drafts)
        ]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Make a prompt of random bytes."""
    draw = random.Random(f"{seed}/{length}")
    return [draw.randrange(256) for _ in range(length)]


class Truth:
    """What decoding over a resident cache gives, one token a step; kept for all tests.

    native: the resident rows are read natively.
    """

    def __init__(self, model: SparseModel, *, native: bool = False) -> None:
        self.model, self.native = model, native
        self._caches: dict[tuple[int, ...], ResidentCache] = {}
        self._decoded: dict[tuple[int, ...], Decoded] = {}

    def rows(self, prompt: list[int]) -> ResidentCache:
        """A resident cache with the rows of the prompt and no others."""
        key = tuple(prompt)
        if key not in self._caches:
            self._caches[key] = ResidentCache(self.model.config, len(prompt) + NEW + WIDTH)
            prefill(self.model, self._caches[key], prompt, chunk=32)
        self._caches[key].truncate(len(prompt))
        return self._caches[key]

    def decoded(self, prompt: list[int]) -> Decoded:
        """What comes after the prompt."""
        key = tuple(prompt)
        if key not in self._decoded:
            rows = self.rows(prompt)
            if self.native:
                # Its rows are written into those of the prompt: the last one is not what it was.
                rows = NativeResidentCache(copy.deepcopy(rows))
            self._decoded[key] = decode(self.model, rows, prompt, NEW)
        return self._decoded[key]
