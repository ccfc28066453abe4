"""Which rows of the region are written, by the engine's block ids.

Rows belong to blocks, not to requests: with the engine's prefix cache several requests read the
blocks that one of them wrote. Rows of a block come without gaps, so a count for each layer and
block is enough. A block that the engine gives out anew has none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine_shim.hot import HoleError


class WrittenBlocks:
    """Counts of rows by [layer, block]."""

    def __init__(self, num_layers: int, num_blocks: int, block_tokens: int) -> None:
        """No row is written."""
        self._rows = torch.zeros(num_layers, num_blocks, dtype=torch.int32)
        self._size = block_tokens

    def clear(self, blocks: Sequence[int]) -> None:
        """Blocks are given out anew: what is in them is of somebody else."""
        if blocks:
            self._rows[:, torch.tensor(blocks)] = 0

    def add(self, request: str, layer: int, table: torch.Tensor, start: int, end: int) -> None:
        """Take note that rows [start, end) of a request are written.

        Args:   table: [blocks] int64, of the request.
        Raises: HoleError for a row before `start` that is not written; nothing changes then.
        """
        rows, size = self._rows[layer], self._size
        first, last = start // size, (end - 1) // size
        before = start - first * size
        known = int(rows[table[first]])
        if known < before:
            raise HoleError(request, layer, first * size + known, f"is not written but {start} is")
        rows[table[first:last]] = size
        at = table[last]
        rows[at] = max(int(rows[at]), end - last * size)

    def require(self, request: str, layer: int, table: torch.Tensor, end: int) -> None:
        """Raise HoleError unless rows [0, end) of a request are written."""
        rows, size = self._rows[layer], self._size
        count = -(-end // size)
        wanted = torch.full((count,), size, dtype=torch.int32)
        wanted[-1] = end - (count - 1) * size
        known = rows[table[:count]]
        lacking = (known < wanted).nonzero()
        if len(lacking):
            block = int(lacking[0])
            position = block * size + int(known[block])
            raise HoleError(request, layer, position, "is read but was never written")
