"""Decode by native operations: what a cache offers beside `KvCache`, and every row resident.

A model that finds `NativeReads` in its cache scores, selects and attends by it, and does neither
`index_keys`, `selected` nor `gather`. Caches of one request with the same rows give the same bits,
whether rows are resident or in a host region (ordered form), however many positions a step has.
Arithmetic in torch adds in another order: its results differ by rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from engine_shim.reference.cache import ResidentCache
from engine_shim.reference.config import ModelConfig
from engine_shim.reference.indexer import IndexQueries
from engine_shim.sparse_ops import KeyRows, SparseOps, StepSizes
from kvd_kernels.residency import CHOSEN_MAX, QUERIES_MAX
from kvd_kernels.rows import NOTHING, BlockTables, Part, RowCopier

if TYPE_CHECKING:
    from kvd_kernels._rows import Memory

MAX_WIDTH: Final = 4
"""Positions of a decode step where nothing else is said."""


@runtime_checkable
class NativeReads(Protocol):
    """Reads of a step whose rows and index keys are written. T positions, H heads of this rank."""

    def choose(self, layer: int, queries: IndexQueries) -> None:
        """Select the rows that this layer and those that follow it read."""

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """Return the weighted latents [T, H, C] of scaled queries [T, H, C + r], float32."""


def can_read_natively(config: ModelConfig, width: int) -> bool:
    """Whether native operations have room for steps of so many positions."""
    return width <= QUERIES_MAX and config.index_topk <= CHOSEN_MAX


def step_sizes(
    config: ModelConfig, *, width: int, num_heads: int | None, context: int
) -> StepSizes:
    """What a decode step of a model has at most.

    Args:   width: positions; num_heads: of this rank, None for all; context: longest request.
    Raises: ValueError for what native operations cannot do.
    """
    element = str(config.dtype).removeprefix("torch.")
    return StepSizes(
        queries=width,
        selected=config.index_topk,
        context=context,
        heads=config.num_heads if num_heads is None else num_heads,
        row_floats=config.row_dim,
        value_floats=config.kv_lora_rank,
        index_heads=config.index_heads,
        index_floats=config.index_dim,
        element=element,
        index_element="fp8" if config.index_fp8 else element,
    )


class RowsAtHand:
    """Native reads of one request whose rows all stand in one memory, in blocks: nothing is missed.

    A row's place is its row in that memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        sizes: StepSizes,
        main: Memory,
        keys: Mapping[int, KeyRows],
        blocks: Sequence[int],
        block_tokens: int,
        num_blocks: int,
    ) -> None:
        """Register all.

        Args:   main: main rows, [layer][num_blocks * block_tokens][row].
                keys: of each indexer layer; layer_stride does not count.
                blocks: the request's, in token order.
        Raises: ValueError naming what does not fit.
        """
        self._config = config
        table = torch.tensor([list(blocks)], dtype=torch.int32)
        self._written = torch.zeros(1, config.num_layers, dtype=torch.int64)
        tables = BlockTables(
            table.numpy(), self._written.numpy(), block_tokens=block_tokens, num_blocks=num_blocks
        )
        row, slots = config.main_row_bytes, num_blocks * block_tokens
        block = block_tokens * row
        part = Part(main, 0, slots * row, block, row, main, 0, 0, slots * row, row)
        copier = RowCopier(tables, [part], num_slots=slots)
        # Index keys of different layers may lie anywhere: a set of operations for each.
        self._ops = {
            layer: SparseOps(sizes, copier, tables, replace(rows, layer_stride=0), threads=1)
            for layer, rows in keys.items()
        }
        within = torch.arange(block_tokens, dtype=torch.int32)
        self._places = (table[0].unsqueeze(1) * block_tokens + within).flatten().numpy()

    def choose(self, layer: int, queries: IndexQueries, num_written: int) -> None:
        """Select for the layers from an indexer layer on; num_written: rows that it has.

        Raises: as `SparseOps.score`.
        """
        ops, count = self._ops[layer], queries.query.shape[0]
        self._written[0, layer] = num_written
        ops.score(queries.query.numpy(), queries.weight.numpy(), 0, layer, queries.start)
        ops.items[0] = (0, count, 0)
        for query in range(count):
            length = queries.start + query + 1
            number = ops.step.top_k(query, length, ops.sizes.selected)
            ops.places[0, query, :number] = self._places[ops.selection[query, :number]]
            ops.places[0, query, number:] = NOTHING

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """Attend in the order of positions; see `NativeReads`."""
        ops = self._ops[self._config.index_layer_of(layer)]
        return torch.from_numpy(ops.attend(layer, queries.numpy(), ordered=True))


class NativeResidentCache(ResidentCache):
    """A resident cache that is read natively: what decode over hot buffers is compared with."""

    def __init__(
        self, rows: ResidentCache, width: int = MAX_WIDTH, num_heads: int | None = None
    ) -> None:
        """Take over a cache, with the rows that a prefill left in it; it is used no more.

        Args:   width: positions of a step at most. num_heads: of this rank; None for all.
        Raises: as `step_sizes`.
        """
        self._config, self._main, self._index = rows._config, rows._main, rows._index
        self._num_tokens = rows._num_tokens
        config, tokens = self._config, self._main.shape[1]
        row = config.index_row_bytes
        keys = {
            layer: KeyRows(index.view(torch.uint8).numpy(), 0, tokens * row, row)
            for layer, index in self._index.items()
        }
        sizes = step_sizes(config, width=width, num_heads=num_heads, context=tokens)
        main = self._main.view(torch.uint8).numpy()
        self._reads = RowsAtHand(config, sizes, main, keys, [0], tokens, 1)

    def choose(self, layer: int, queries: IndexQueries) -> None:
        """Select; see `NativeReads`. Raises: ValueError for rows that are not written."""
        self._check_written(layer, queries.start + queries.query.shape[0])
        self._reads.choose(layer, queries, self._num_tokens[layer])

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """Attend; see `NativeReads`."""
        return self._reads.attend(layer, queries)
