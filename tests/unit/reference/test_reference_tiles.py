"""Tiles: which rows are computed together, and where each one stands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine_shim.reference.tiles import Tile, map_tiles, tiles

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("start", "num_rows", "expected"),
    [
        (0, 1, [Tile(0, 1, 0)]),
        (0, 4, [Tile(0, 4, 0)]),
        (3, 1, [Tile(0, 1, 3)]),
        (3, 2, [Tile(0, 1, 3), Tile(1, 2, 0)]),
        (6, 9, [Tile(0, 2, 2), Tile(2, 6, 0), Tile(6, 9, 0)]),
        (8, 4, [Tile(0, 4, 0)]),
    ],
)
def test_tiles_start_at_multiples_of_their_size(
    start: int, num_rows: int, expected: list[Tile]
) -> None:
    assert list(tiles(start, num_rows, 4)) == expected


@pytest.mark.parametrize("start", range(5))
@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 9])
def test_every_call_gets_a_whole_tile_with_each_row_in_its_place(start: int, num_rows: int) -> None:
    seen: list[tuple[Tensor, int]] = []

    def function(tile: Tensor, base: int) -> Tensor:
        seen.append((tile.clone(), base))
        return tile * 10

    positions = torch.arange(start, start + num_rows).float()
    rows = (positions + 1).unsqueeze(1).expand(-1, 2).contiguous()
    assert torch.equal(map_tiles(function, rows, start, 4), rows * 10)
    for tile, base in seen:
        assert base % 4 == 0
        inside = (torch.arange(base, base + 4).float() + 1).unsqueeze(1).expand(-1, 2)
        in_call = (inside > start) & (inside <= start + num_rows)
        assert torch.equal(tile, torch.where(in_call, inside, 0.0))
