"""The reference model's KV in the words of kvd: parts, blocks, ring, region."""

from __future__ import annotations

import torch

from engine_shim.reference.config import ModelConfig
from kvd.plan.ring import RingPlan, plan_ring
from kvd.wire.layout import BlockLayoutSpec, Part

MAIN = "main"
INDEXER = "indexer"


def parts_of(config: ModelConfig, layer: int) -> tuple[Part, ...]:
    """What one token has in one layer."""
    main = Part(MAIN, config.main_row_bytes)
    if layer in config.index_layers:
        return (main, Part(INDEXER, config.index_row_bytes))
    return (main,)


def block_layout(config: ModelConfig, block_tokens: int) -> BlockLayoutSpec:
    """A pool block of this model. All tensor-parallel ranks have the same rows: one shard.

    The seed names the weights: engines with other weights must not share blocks.
    """
    layers = [list(parts_of(config, layer)) for layer in range(config.num_layers)]
    dtype = str(config.dtype).removeprefix("torch.")
    return BlockLayoutSpec(f"reference-{config.seed}", dtype, block_tokens, layers)


def ring_plan(
    config: ModelConfig,
    *,
    max_tokens: int,
    block_tokens: int,
    num_shared: int,
    independent: tuple[int, ...] | str = (0,),
    lookahead: int = 1,
    spare_buffers: int = 1,
) -> RingPlan:
    """The ring of a prefill engine for requests of up to `max_tokens` tokens."""
    return plan_ring(
        [parts_of(config, layer) for layer in range(config.num_layers)],
        independent=independent,
        num_shared=num_shared,
        num_blocks=-(-max_tokens // block_tokens),
        block_tokens=block_tokens,
        spare_buffers=spare_buffers,
        lookahead=lookahead,
    )


def rows_tensor(
    view: memoryview, offset: int, num_rows: int, row_bytes: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows of mapped memory as a tensor [num_rows, row] of `dtype`, without a copy."""
    elements = row_bytes // dtype.itemsize
    flat = torch.frombuffer(view, dtype=dtype, count=num_rows * elements, offset=offset)
    return flat.view(num_rows, elements)
