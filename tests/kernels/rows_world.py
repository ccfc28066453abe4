"""Small worlds of rows: the native objects and their definition, each on memory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvd_kernels import rows_reference
from kvd_kernels.rows import BlockTables, Part, RowCopier, RowList

Octets = NDArray[np.uint8]


@dataclass(frozen=True)
class Shape:
    """What a world has. gap: bytes between what need not touch."""

    part_bytes: tuple[int, ...] = (48,)
    layers: int = 2
    requests: int = 3
    blocks: int = 12
    blocks_max: int = 4
    block_tokens: int = 4
    num_slots: int = 9
    scratch_rows: int = 3
    gap: int = 16

    @property
    def tokens_max(self) -> int:
        """Tokens that a request can have."""
        return self.blocks_max * self.block_tokens


@dataclass(frozen=True)
class Lists:
    """Rows of one call."""

    positions: list[int]
    slots: list[int]

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """As arrays, one item at least."""
        padded = [[*items, -1] for items in (self.positions, self.slots)]
        positions, slots = (np.array(items, np.int32) for items in padded)
        return positions, slots


@dataclass
class World:
    """memory: region and hot of each part in turn, as the native objects see them."""

    shape: Shape
    kernel: str = "auto"
    threads: int = 1
    seed: int = 1
    is_tracked: bool = False
    tracked: Octets | None = field(init=False, default=None)
    memory: list[Octets] = field(init=False)
    twin: list[Octets] = field(init=False)

    def __post_init__(self) -> None:
        draw = np.random.default_rng(self.seed)
        shape = self.shape
        sizes = [size for part in range(len(shape.part_bytes)) for size in self._sizes(part)]
        self.memory = [draw.integers(0, 256, size, np.uint8) for size in sizes]
        self.twin = [array.copy() for array in self.memory]
        table = np.full((shape.requests, shape.blocks_max), -1, np.int32)
        ids = draw.permutation(shape.blocks)[: table.size]
        table.ravel()[: len(ids)] = ids
        self.table = table
        self.marks = np.zeros((shape.requests, shape.layers), np.int64)
        self.twin_marks = self.marks.copy()
        twin_tracked = None
        if self.is_tracked:
            self.tracked = np.zeros((shape.requests, shape.layers, shape.tokens_max), np.uint8)
            twin_tracked = self.tracked.copy()
        self.tables = BlockTables(
            table,
            self.marks,
            block_tokens=shape.block_tokens,
            num_blocks=shape.blocks,
            rows=self.tracked,
        )
        self.copier = RowCopier(
            self.tables,
            self.parts(self.memory),
            num_slots=shape.num_slots,
            scratch_rows=shape.scratch_rows,
            kernel=self.kernel,
            threads=self.threads,
        )
        self.twin_tables = rows_reference.BlockTables(
            table, self.twin_marks, shape.block_tokens, shape.blocks, twin_tracked
        )
        self.reference = rows_reference.RowCopier(
            self.twin_tables, self.parts(self.twin), shape.num_slots, shape.scratch_rows
        )

    def _strides(self, part: int) -> tuple[int, int, int, int, int]:
        """Block, layer, slot, hot layer and hot request strides."""
        shape, row = self.shape, self.shape.part_bytes[part]
        block = shape.block_tokens * row + shape.gap
        slot = row + shape.gap
        hot_layer = shape.num_slots * slot + shape.gap
        hot_request = shape.layers * hot_layer + shape.scratch_rows * slot + shape.gap
        return block, shape.blocks * block + shape.gap, slot, hot_layer, hot_request

    def _sizes(self, part: int) -> tuple[int, int]:
        _, layer, _, _, hot_request = self._strides(part)
        return self.shape.gap + self.shape.layers * layer, hot_request * self.shape.requests

    def parts(self, memory: Sequence[Octets]) -> list[Part]:
        """The parts on such memory."""
        made = []
        for number, row_bytes in enumerate(self.shape.part_bytes):
            block, layer, slot, hot_layer, hot_request = self._strides(number)
            region, hot = memory[2 * number : 2 * number + 2]
            scratch = self.shape.layers * hot_layer
            made.append(
                Part(
                    region, self.shape.gap, layer, block, row_bytes,
                    hot, 0, hot_request, hot_layer, slot, scratch,
                )
            )  # fmt: skip
        return made

    def write(self, tokens: int) -> None:
        """Say that so many rows of every request are there."""
        self.marks[:] = self.twin_marks[:] = tokens

    def rows(self, lists: Lists, sources: Sequence[Octets] = ()) -> RowList:
        """Register lists."""
        positions, slots = lists.arrays()
        return RowList(positions, slots, sources)

    def same(self) -> bool:
        """Whether all memory and all watermarks are as the definition says."""
        pairs = zip(self.memory, self.twin, strict=True)
        same = all(np.array_equal(mine, other) for mine, other in pairs)
        return same and np.array_equal(self.marks, self.twin_marks)

    def unchanged(self) -> bool:
        """Whether all memory is as it was made."""
        return all(
            np.array_equal(mine, fresh)
            for mine, fresh in zip(self.memory, World(self.shape, seed=self.seed).twin, strict=True)
        )
