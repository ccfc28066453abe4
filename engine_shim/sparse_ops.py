"""One decode step of one request on native operations: scores, selection, attention.

All arrays are made once and registered; a step writes numbers into them and calls. Whose rows they
are, and which of them are resident, is the caller's: `hot_steps` has hot buffers before a region,
the reference engine's resident cache has every row at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvd_kernels.residency import CHOSEN_MAX, QUERIES_MAX, HotStep
from kvd_kernels.rows import NOTHING, BlockTables, IndexScorer, RowCopier, SparseAttention

if TYPE_CHECKING:
    from kvd_kernels._rows import Memory

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

QUERY_SCALE: Final = 1.0
"""Queries come scaled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """What a step has at most.

    queries:      positions of a step, 1 to 14.
    selected:     rows that a query reads, 1 to 4096.
    context:      tokens of the longest request.
    heads:        query heads of this rank. row_floats: elements of a main row; the first
    value_floats  of them are its value.
    index_heads, index_floats: heads of the indexer, elements of a key.
    element:      how main rows are stored, "float32" or "bfloat16".
    index_element: how index keys are stored; also "fp8", a float32 scale behind each key.

    Raises: ValueError naming the field.
    """

    queries: int
    selected: int
    context: int
    heads: int
    row_floats: int
    value_floats: int
    index_heads: int
    index_floats: int
    element: str
    index_element: str

    def __post_init__(self) -> None:
        """Check what the operations cannot do at all."""
        for name, most in (("queries", QUERIES_MAX), ("selected", CHOSEN_MAX)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ValueError(f"{name} is {value}; native operations take 1 to {most}")


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Where index keys stand: `memory` is bytes, a key is at layer * layer_stride + block *
    block_stride + row in block * row_bytes. Layers are indexer layers, counted from 0.
    """

    memory: Memory
    layer_stride: int
    block_stride: int
    row_bytes: int


class SparseOps:
    """The arrays of a step, and the operations on them. One thread at a time.

    P queries, K selected rows, M = P * K misses, H heads, R elements of a row, L of its value:

        index_queries [P, index_heads, index_floats], index_weights [P, index_heads] float32, in
        scores        [P, context] float32
        step          the selection; see `HotStep`. selection [P, K] int32: its positions
        queries       [1, P, H, R] float32, in
        places        [1, P, K], items [1, 3], miss_positions, miss_slots [1, M] int32, in; see
                      `SparseAttention`
        output        [1, P, H, L] float32, out
    """

    def __init__(
        self,
        sizes: StepSizes,
        copier: RowCopier,
        key_tables: BlockTables,
        keys: KeyRows,
        *,
        threads: int = 2,
    ) -> None:
        """Make and register the arrays.

        Args:   copier: over the main rows, in all layers.
                key_tables: where the blocks of index keys are, and how many keys were written.
                threads: 2 has one that copies missing rows while others are attended to.
        Raises: ValueError naming what does not fit.
        """
        most, k = sizes.queries, sizes.selected
        self.sizes: Final = sizes
        keys_of = (most, sizes.index_heads, sizes.index_floats)
        self.index_queries: Final[Floats] = np.zeros(keys_of, np.float32)
        self.index_weights: Final[Floats] = np.zeros((most, sizes.index_heads), np.float32)
        self.scores: Final[Floats] = np.zeros((most, sizes.context), np.float32)
        shape = (1, most, sizes.heads)
        self.queries: Final[Floats] = np.zeros((*shape, sizes.row_floats), np.float32)
        self.places: Final[Ints] = np.full((1, most, k), NOTHING, np.int32)
        self.items: Final[Ints] = np.zeros((1, 3), np.int32)
        self.miss_positions: Final[Ints] = np.zeros((1, most * k), np.int32)
        self.miss_slots: Final[Ints] = np.zeros((1, most * k), np.int32)
        self.output: Final[Floats] = np.zeros((*shape, sizes.value_floats), np.float32)
        self.step: Final = HotStep(most, k, scores=self.scores)
        self.selection: Final[Ints] = np.asarray(self.step.selection)
        self._scorer = IndexScorer(
            key_tables,
            keys.memory,
            queries=self.index_queries,
            weights=self.index_weights,
            scores=self.scores,
            layer_stride=keys.layer_stride,
            block_stride=keys.block_stride,
            row_bytes=keys.row_bytes,
            element=sizes.index_element,
        )
        self.attention: Final = SparseAttention(
            copier,
            queries=self.queries,
            places=self.places,
            items=self.items,
            positions=self.miss_positions,
            slots=self.miss_slots,
            output=self.output,
            element=sizes.element,
            scale=QUERY_SCALE,
            threads=threads,
        )

    def score(self, queries: Floats, weights: Floats, request: int, layer: int, start: int) -> None:
        """Fill the scores of queries at positions from `start` on.

        A query that selects its whole prefix has none: nothing depends on them.

        Args:   queries: [T, index_heads, index_floats]; weights: [T, index_heads], float32.
                request, layer: in the tables of the index keys.
        Raises: ValueError for scores that are not numbers: the keys are not what was written.
                HoleError for a key that was never written.
        """
        count = queries.shape[0]
        self.index_queries[:count] = queries
        self.index_weights[:count] = weights
        for query in range(count):
            length = start + query + 1
            if length <= self.sizes.selected:
                continue
            self._scorer.score(query, request, layer, length)
            # NaN stays NaN in a sum, which reads the scores once and keeps nothing.
            if np.isnan(self.scores[query, :length].sum()):
                raise ValueError(
                    f"index scores of position {start + query} are not numbers; check that the "
                    "cache returns the index keys that were written"
                )

    def attend(self, layer: int, queries: Floats, *, ordered: bool) -> Floats:
        """Attend to `places` for the request of `items`.

        Args:    queries: [T, H, R] float32, scaled.
                 ordered: missing rows are copied first, then all are attended to in the order of
                 the selection; otherwise rows that are there come first.
        Returns: [T, H, L] float32, a view that the next call overwrites.
        Raises:  as `SparseAttention.attend`; nothing has changed then.
        """
        count = queries.shape[0]
        self.queries[0, :count] = queries
        self.attention.attend(layer, 1, ordered=ordered)
        return self.output[0, :count]
