"""Fixed tiles: why a token's numbers do not depend on the company it was computed in.

A matrix product picks its kernel, and so the order of its additions, by the shapes it is given.
One token computed alone, in a chunk of 2048, or as one of four speculated positions would then
differ in the last bits. So every row-wise function of the model is only ever called on tiles of
exactly `size` rows, and the token at position p is always row `p % size` of its tile; rows of a
tile that are not part of the call are zero. A row of a product does not depend on the values of
the other rows, so what remains is a function of the token and its position alone: chunked prefill,
one token at a time and multi-position decode agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """Where rows [begin, end) of a call lie in one tile.

    begin, end: row range in the call.
    offset:     row of the tile at which `begin` lies.
    """

    begin: int
    end: int
    offset: int


def tiles(start: int, num_rows: int, size: int) -> Iterator[Tile]:
    """Yield the tiles that cover positions [start, start + num_rows), in order."""
    begin = 0
    while begin < num_rows:
        offset = (start + begin) % size
        end = min(num_rows, begin + size - offset)
        yield Tile(begin, end, offset)
        begin = end


def map_tiles(
    function: Callable[[Tensor, int], Tensor], rows: Tensor, start: int, size: int
) -> Tensor:
    """Apply a row-wise function to the rows at positions [start, start + T), tile by tile.

    Args:    function: takes a tile [size, ...] and the position of its first row, a multiple of
             size; returns [size, ...], row by row.
             rows: [T, ...] contiguous, T >= 1; row 0 is at position `start`.
    Returns: [T, ...] of what `function` returns.
    """
    results = []
    for tile in tiles(start, rows.shape[0], size):
        part = rows[tile.begin : tile.end]
        count = tile.end - tile.begin
        if count < size:
            part = rows.new_zeros((size, *rows.shape[1:]))
            part[tile.offset : tile.offset + count] = rows[tile.begin : tile.end]
        result = function(part, start + tile.begin - tile.offset)
        results.append(result if count == size else result[tile.offset : tile.offset + count])
    return torch.cat(results)
