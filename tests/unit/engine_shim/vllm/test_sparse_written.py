"""Which rows of the region are written: by block, whoever wrote them."""

from __future__ import annotations

import pytest
import torch

from engine_shim.hot import HoleError
from engine_shim.vllm.sparse_written import WrittenBlocks

LAYERS, BLOCKS, SIZE = 3, 8, 4
TABLE = torch.tensor([5, 2, 7])


def written(*ranges: tuple[int, int]) -> WrittenBlocks:
    """Rows of one request in layer 1."""
    made = WrittenBlocks(LAYERS, BLOCKS, SIZE)
    for start, end in ranges:
        made.add("r", 1, TABLE, start, end)
    return made


@pytest.mark.parametrize("end", range(1, 13))
def test_rows_that_are_written_can_be_read_and_no_others(end: int) -> None:
    made = written((0, end))
    made.require("r", 1, TABLE, end)
    with pytest.raises(HoleError, match=f"layer 1: position {end} is read but was never written"):
        made.require("r", 1, torch.tensor([5, 2, 7, 0]), end + 1)
    with pytest.raises(HoleError, match="layer 0: position 0"):
        made.require("r", 0, TABLE, end)


@pytest.mark.parametrize("cut", range(1, 12))
def test_chunks_add_up(cut: int) -> None:
    written((0, cut), (cut, 12)).require("r", 1, TABLE, 12)


def test_a_gap_is_refused_and_changes_nothing() -> None:
    made = written((0, 5))
    with pytest.raises(HoleError, match="position 5 is not written but 6 is"):
        made.add("r", 1, TABLE, 6, 9)
    made.add("r", 1, TABLE, 5, 6)
    with pytest.raises(HoleError, match="position 6"):
        made.require("r", 1, TABLE, 8)


def test_rows_that_are_written_again_stay_written() -> None:
    made = written((0, 11))
    made.add("r", 1, TABLE, 2, 3)
    made.require("r", 1, TABLE, 11)


def test_blocks_are_shared_and_void_once_given_out_anew() -> None:
    made = written((0, 8))
    other = torch.tensor([5, 2, 3])
    made.require("other", 1, other, 8)
    made.add("other", 1, other, 8, 9)
    made.clear([2, 6])
    made.clear([])
    with pytest.raises(HoleError, match="position 4 is read"):
        made.require("other", 1, other, 9)
    with pytest.raises(HoleError, match="position 4 is not written but 6 is"):
        made.add("r", 1, TABLE, 6, 7)
