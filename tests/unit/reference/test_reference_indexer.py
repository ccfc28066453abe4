"""Which rows a query reads: exact top-k, ties, short prefixes, tile edges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine_shim.reference.config import tiny
from engine_shim.reference.indexer import IndexQueries, project_index, select_rows
from engine_shim.reference.ops import Rope
from engine_shim.reference.weights import make_weights

pytestmark = pytest.mark.engine

CONFIG = replace(tiny(), index_topk=8, key_tile=16)


def _queries(start: int, count: int, seed: int = 0) -> IndexQueries:
    generator = torch.Generator().manual_seed(seed)
    shape = (512, CONFIG.index_heads, CONFIG.index_dim)
    query = torch.randn(shape, generator=generator)[start : start + count]
    weight = torch.randn(shape[:2], generator=generator)[start : start + count]
    return IndexQueries(start, query.contiguous(), weight.contiguous())


def _keys(num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(512, CONFIG.index_dim, generator=generator)[:num_tokens].bfloat16()


def _naive(queries: IndexQueries, keys: Tensor) -> list[list[int]]:
    """Return the selections by sorting float64 scores."""
    chosen = []
    for number in range(queries.query.shape[0]):
        visible = keys[: queries.start + number + 1].double()
        heads = (visible @ queries.query[number].double().T).relu()
        score = (heads @ queries.weight[number].double()).tolist()
        order = sorted(range(len(score)), key=lambda seen: (-score[seen], seen))
        chosen.append(sorted(order[: CONFIG.index_topk]))
    return chosen


def _lists(selected: Tensor) -> list[list[int]]:
    return [[position for position in row if position >= 0] for row in selected.tolist()]


def test_keys_that_are_not_numbers_are_refused() -> None:
    keys = _keys(40)
    keys[:] = torch.nan
    with pytest.raises(ValueError, match="index scores of positions 30 to 39 are not numbers"):
        select_rows(CONFIG, _queries(30, 10), keys)


def test_a_layer_without_indexer_has_no_index_rows() -> None:
    weights = make_weights(CONFIG, slice(0, 4)).layers[1]
    with pytest.raises(ValueError, match="the layer has no indexer"):
        project_index(CONFIG, weights, Rope(16, 8), torch.zeros(8, 64), 0)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("start", [0, 1, 7, 8, 9, 15, 16, 17, 31, 100])
def test_selection_is_the_naive_one(start: int, count: int) -> None:
    queries, keys = _queries(start, count), _keys(start + count)
    assert _lists(select_rows(CONFIG, queries, keys)) == _naive(queries, keys)


def test_short_prefixes_are_read_whole_and_padded_at_the_end() -> None:
    selected = select_rows(CONFIG, _queries(0, 10), _keys(10))
    assert selected.shape == (10, 8)
    for position in range(8):
        assert selected[position].tolist() == [*range(position + 1), *[-1] * (7 - position)]
    assert int((selected[8:] < 0).sum()) == 0


def test_equal_scores_go_to_lower_positions() -> None:
    keys = _keys(64)
    keys[10:50] = keys[10]
    queries = _queries(60, 4)
    agreeing = keys[10].float().expand(4, CONFIG.index_heads, -1).contiguous() * 100
    queries = IndexQueries(60, agreeing, torch.ones_like(queries.weight))
    assert _lists(select_rows(CONFIG, queries, keys)) == [list(range(10, 18))] * 4


def test_ties_of_one_query_leave_the_others_alone() -> None:
    queries, keys = _queries(100, 16), _keys(116)
    queries.weight[5] = 0.0
    selected = _lists(select_rows(CONFIG, queries, keys))
    assert selected[5] == list(range(8))
    assert selected == _naive(queries, keys)


def test_a_query_never_reads_what_comes_after_it() -> None:
    keys = _keys(80)
    first = select_rows(CONFIG, _queries(40, 8), keys[:48])
    later = select_rows(CONFIG, _queries(40, 40), keys)
    assert torch.equal(first, later[:8])
    assert bool((first <= torch.arange(40, 48).unsqueeze(1)).all())
