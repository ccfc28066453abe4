"""Where rows live: the resident cache, block tables and views through them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine_shim.reference.cache import BlockTable, PagedView, ResidentCache
from engine_shim.reference.config import tiny

pytestmark = pytest.mark.engine


def _rows(start: int, end: int, width: int) -> Tensor:
    """Return rows [end - start, width] that say their position."""
    return torch.arange(start, end).unsqueeze(1).expand(-1, width).to(torch.bfloat16)


def _written(num_tokens: int) -> ResidentCache:
    cache = ResidentCache(tiny(), 8)
    cache.write(0, torch.arange(num_tokens), _rows(0, num_tokens, 576), _rows(0, num_tokens, 32))
    return cache


def test_resident_cache_needs_room() -> None:
    with pytest.raises(ValueError, match="max_tokens is 0"):
        ResidentCache(tiny(), 0)


def test_resident_cache_refuses_a_gap() -> None:
    with pytest.raises(ValueError, match="position 4 is written but 3 is the first one missing"):
        _written(3).write(0, torch.arange(4, 6), _rows(4, 6, 576), None)


def test_resident_cache_refuses_rows_past_its_end() -> None:
    with pytest.raises(ValueError, match="max_tokens is 8 but position 8 is written"):
        _written(8).write(0, torch.arange(8, 9), _rows(8, 9, 576), None)


def test_resident_cache_refuses_to_read_what_was_not_written() -> None:
    cache = _written(3)
    with pytest.raises(ValueError, match="position 3 is read but only 3 positions are written"):
        cache.gather(0, torch.tensor([[0, 3]]))
    with pytest.raises(ValueError, match="layer 2: position 0 is read"):
        cache.index_keys(2, 1)


def test_resident_cache_refuses_to_read_voided_rows() -> None:
    cache = _written(6)
    cache.truncate(4)
    assert cache.gather(0, torch.tensor([[3]])).shape == (1, 1, 576)
    with pytest.raises(ValueError, match="position 4 is read but only 4"):
        cache.gather(0, torch.tensor([[4]]))
    with pytest.raises(ValueError, match="position 4 is read but only 4"):
        cache.index_keys(0, 5)


def test_resident_cache_refuses_a_negative_length() -> None:
    with pytest.raises(ValueError, match="num_tokens is -1"):
        _written(6).truncate(-1)


def test_resident_cache_returns_rows_by_position() -> None:
    cache = _written(6)
    rows = cache.gather(0, torch.tensor([[5, 0], [2, -1]]))
    assert rows.shape == (2, 2, 576)
    assert rows[:, :, 0].flatten()[:3].tolist() == [5, 0, 2]
    assert cache.index_keys(0, 4)[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("block_tokens", "num_blocks"), [(0, 4), (4, 0)])
def test_table_needs_blocks(block_tokens: int, num_blocks: int) -> None:
    with pytest.raises(ValueError, match="is 0; give 1 or more"):
        BlockTable(block_tokens, num_blocks)


@pytest.mark.parametrize("block", [-1, 4])
def test_table_refuses_a_block_outside_and_stays_as_it_was(block: int) -> None:
    table = BlockTable(4, 4)
    with pytest.raises(ValueError, match=f"block is {block}; give 0 to 3"):
        table.append([1, block])
    assert table.num_tokens == 0


def test_table_refuses_positions_past_its_blocks() -> None:
    table = BlockTable(4, 4)
    table.append([2])
    with pytest.raises(ValueError, match="position is 4 but the table has blocks for 4 tokens"):
        table.rows(torch.tensor([3, 4]))
    with pytest.raises(ValueError, match="num_tokens is 5"):
        table.prefix(5)


def test_view_refuses_rows_of_another_size() -> None:
    with pytest.raises(ValueError, match=r"rows is \[15, 2\]; give \[16, row\]"):
        PagedView(torch.zeros(15, 2), BlockTable(4, 4))


def test_view_refuses_to_write_padding() -> None:
    table = BlockTable(4, 4)
    table.append([1])
    rows = torch.zeros(16, 2)
    with pytest.raises(ValueError, match="position is -1; write at 0 or more"):
        PagedView(rows, table).write(torch.tensor([-1]), torch.ones(1, 2))
    assert not rows.any()


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 11, 12])
def test_view_follows_the_blocks(num_tokens: int) -> None:
    blocks, block_tokens = [3, 0, 2], 4
    table = BlockTable(block_tokens, 5)
    table.append(blocks[:1])
    table.append(blocks[1:])
    rows = torch.full((20, 2), -7.0)
    view = PagedView(rows, table)
    values = torch.arange(num_tokens).float().unsqueeze(1).expand(-1, 2)
    view.write(torch.arange(num_tokens), values)
    for position in range(num_tokens):
        row = blocks[position // block_tokens] * block_tokens + position % block_tokens
        assert rows[row].tolist() == [position, position]
    assert int((rows[:, 0] == -7.0).sum()) == 20 - num_tokens
    assert torch.equal(view.prefix(num_tokens), values)
    picked = torch.tensor([[num_tokens - 1, 0, -1]])
    assert view.gather(picked)[0, :2, 0].tolist() == [num_tokens - 1, 0]
    assert view.gather(picked).shape == (1, 3, 2)


def test_padding_stands_for_the_first_position() -> None:
    table = BlockTable(2, 4)
    table.append([2, 0])
    assert table.rows(torch.tensor([[-1, 3], [0, 1]])).tolist() == [[4, 1], [4, 5]]


def test_views_of_one_table_do_not_share_rows() -> None:
    table = BlockTable(2, 2)
    table.append([1, 0])
    first, second = PagedView(torch.zeros(4, 1), table), PagedView(torch.zeros(4, 1), table)
    first.write(torch.tensor([0]), torch.ones(1, 1))
    assert not second.prefix(4).any()
    assert first.prefix(4).flatten().tolist() == [1, 0, 0, 0]
