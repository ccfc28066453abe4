"""Prefill of the reference engine over a long context, on rolling layer buffers.

Four layers, of which the first has a buffer of its own and three take turns in two; every chunk
loads all rows before it from kvd's pool again, layer by layer. One indexer with two heads selects.
The prompt is prefilled twice: the second time all but its last chunk comes out of the pool, and
must give the same next token and, of that chunk, the same rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from bench.daemon import OwnDaemon
from engine_shim.client import ClientOptions
from engine_shim.reference.bytes_tokenizer import VOCAB_SIZE
from engine_shim.reference.collective import SingleProcess
from engine_shim.reference.config import ModelConfig
from engine_shim.reference.engine_prefill import PrefillResult
from engine_shim.reference.index_rows import read_keys
from engine_shim.reference.indexer import IndexQueries
from engine_shim.reference.prefill_worker import PrefillOptions, PrefillWorker
from engine_shim.reference.rank_group import RankGroup
from kvd_kernels.residency import QUERIES_MAX, HotStep

SEED: Final = 20260101
BLOCK_TOKENS: Final = 128
CHUNK: Final = 8192
STEP_SECONDS: Final = 900.0
_STEPS: Final = 5  # so many times QUERIES_MAX queries are scored in one product
_KEY_TILE: Final = 8192


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Both passes; bytes of the layer buffers, of the pool's blocks, and what was loaded."""

    first: PrefillResult
    again: PrefillResult
    device_bytes: int
    resident_bytes: int
    loaded_bytes: int
    exposed_seconds: float
    load_seconds: float


def prefill_config(num_tokens: int) -> ModelConfig:
    """A small model: what is measured is the way of the rows."""
    return ModelConfig(
        num_layers=4,
        hidden=64,
        num_heads=2,
        nope_dim=16,
        v_dim=16,
        q_lora_rank=32,
        intermediate=128,
        index_layers=(0,),
        index_topk=128,
        index_heads=2,
        index_dim=32,
        max_positions=num_tokens,
        seed=SEED,
        query_group=32,
    )


class FastSelect:
    """`select_rows` for long prefixes: many queries in one product, and the native top-k.

    What a token selects may differ in rounding from the reference's own, which takes ten hours.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Make the arrays of scores for the longest prefix."""
        rows = _STEPS * QUERIES_MAX
        self._scores = torch.empty(rows, config.max_positions)
        self._steps = [
            HotStep(QUERIES_MAX, config.index_topk, scores=part.numpy())
            for part in torch.split(self._scores, QUERIES_MAX)
        ]

    def __call__(self, config: ModelConfig, queries: IndexQueries, keys: Tensor) -> Tensor:
        """See `select_rows`."""
        count, topk = queries.query.shape[0], config.index_topk
        selected = torch.full((count, topk), -1, dtype=torch.int64)
        known = read_keys(config, keys)
        for begin in range(0, count, len(self._scores)):
            end = min(count, begin + len(self._scores))
            part = IndexQueries(
                queries.start + begin, queries.query[begin:end], queries.weight[begin:end]
            )
            self._score(part, known)
            for row in range(end - begin):
                step, query = self._steps[row // QUERIES_MAX], row % QUERIES_MAX
                found = step.top_k(query, part.start + row + 1, topk)
                chosen = torch.frombuffer(step.selection, dtype=torch.int32)
                at = query * topk
                selected[begin + row, :found] = chosen[at : at + found]
        return selected

    def _score(self, queries: IndexQueries, keys: Tensor) -> None:
        count, heads, dim = queries.query.shape
        flat = queries.query.reshape(count * heads, dim)
        weight = queries.weight.unsqueeze(-1)
        for start in range(0, queries.start + count, _KEY_TILE):
            tile = keys[start : min(start + _KEY_TILE, queries.start + count)]
            per_head = (flat @ tile.t()).relu_().view(count, heads, -1).mul_(weight)
            torch.sum(per_head, 1, out=self._scores[:count, start : start + tile.shape[0]])


def run_prefill(num_tokens: int, progress: Callable[[int, int], None]) -> Prefilled:
    """Prefill twice.

    Raises: KvdRefused, StepFailed.
    """
    config = prefill_config(num_tokens)
    generator = random.Random(SEED)
    tokens = [generator.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
    pool = int(config.token_bytes * (num_tokens + 4 * CHUNK) * 1.02)
    settings = (f"pool.size={pool}B", "pool.headroom=0B", "release.compute_deadline=600s")
    with OwnDaemon(*settings) as daemon:
        options = PrefillOptions(
            engine="million",
            runtime_dir=str(daemon.runtime_dir),
            max_tokens=num_tokens,
            block_tokens=BLOCK_TOKENS,
            chunk=CHUNK,
            num_shared=2,
            spare_buffers=0,
            step_deadline_s=STEP_SECONDS,
        )
        worker = PrefillWorker(
            config,
            options,
            SingleProcess(),
            RankGroup.alone(),
            ClientOptions(deadline_s=STEP_SECONDS),
            FastSelect(config),
        )
        try:
            first = worker.engine.prefill("first", tokens, (), progress)
            again = worker.engine.prefill("again", tokens, (), progress)
            figures, ring = worker.pipeline.figures(), worker.pipeline.ring
            return Prefilled(
                first,
                again,
                ring.device_bytes,
                ring.resident_bytes,
                figures.loaded_bytes,
                figures.exposed_s,
                figures.load_s,
            )
        finally:
            worker.close()
