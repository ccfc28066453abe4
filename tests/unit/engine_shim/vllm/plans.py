"""Engines to plan for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine_shim.vllm.engine_plan import (
    INDEXER,
    MAIN,
    CacheSpec,
    EnginePlan,
    EnginePlanner,
    EngineShape,
)
from engine_shim.vllm.options import ConnectorOptions

TOKENS = 4
PAGE = 4096
SHAPE = EngineShape("tiny", "uint8", TOKENS, 1, max_len=32, max_seqs=4)


def main(
    layer: int, row: int = 64, *, rows: bool = True, is_draft: bool = False, tokens: int = TOKENS
) -> CacheSpec:
    """A layer's main cache with rows of so many bytes."""
    return CacheSpec(f"layers.{layer}.attn", layer, MAIN, row * tokens, rows, is_draft)


def indexer(layer: int, row: int = 16) -> CacheSpec:
    """A layer's cache of indexer keys, declared before or after the main one."""
    return CacheSpec(f"layers.{layer}.indexer", layer, INDEXER, row * TOKENS, False)


def mains(count: int) -> list[CacheSpec]:
    """Equal main caches."""
    return [main(layer) for layer in range(count)]


def planner(
    caches: Sequence[CacheSpec], shape: EngineShape = SHAPE, **options: object
) -> EnginePlanner:
    """A planner with some options; rolling, unless they say otherwise."""
    given = {"offload": "rolling", **options}
    return EnginePlanner(ConnectorOptions(**given), shape, caches)  # type: ignore[arg-type]


def plan(
    caches: Sequence[CacheSpec],
    *,
    blocks: int = 40,
    pool_blocks: int = 1000,
    shape: EngineShape = SHAPE,
    **options: object,
) -> EnginePlan:
    """Plan with device memory for so many blocks without sharing."""
    made = planner(caches, shape, **options)
    return made.plan(device_bytes(made, blocks), pool_blocks)


def device_bytes(made: EnginePlanner, blocks: int) -> int:
    """Memory that holds just so many blocks when every layer has a buffer of its own."""
    return blocks * made.resident_block_bytes + made.num_layers * (PAGE + 64)


def shaped(**changes: object) -> EngineShape:
    """The shape with something changed."""
    return replace(SHAPE, **changes)  # type: ignore[arg-type]


def slots_of(made: EnginePlan) -> list[tuple[int, ...]]:
    """The layers of each buffer, spares left out."""
    return [slot.layers for slot in made.ring.slots if slot.layers]
