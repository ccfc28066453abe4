"""The lightning indexer: which rows a query attends to.

Each token has one index key. A query at position p scores every token s <= p by

    score(s) = sum over index heads h of  weight[h] * relu(query[h] . key[s])

and reads the `index_topk` best ones, the lower position first among equal scores. A prefix that is
no longer than `index_topk` is read whole. The selection is a set: it is returned ascending, so
that the attention adds its rows in one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine_shim.reference.attention import query_latent
from engine_shim.reference.config import ModelConfig
from engine_shim.reference.index_rows import read_keys
from engine_shim.reference.ops import Rope, rms_norm
from engine_shim.reference.weights import LayerWeights

# Scores of this many queries are held at a time: 16 queries x 32 k positions are 2 MiB.
_QUERY_GROUP: Final = 16


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """Index queries of T tokens at positions [start, start + T), float32.

    query:  [T, index_heads, index_dim]
    weight: [T, index_heads]
    """

    start: int
    query: Tensor
    weight: Tensor


def project_index(
    config: ModelConfig, weights: LayerWeights, rope: Rope, hidden: Tensor, start: int
) -> Tensor:
    """Return index key, query and weight of one tile of hidden rows at [start, start + T).

    Returns: [T, index_dim + index_heads * index_dim + index_heads], in this order.
    Raises:  ValueError if the layer has no indexer.
    """
    indexer = weights.indexer
    if indexer is None:
        raise ValueError("the layer has no indexer; ask a layer of index_layers")
    normed = rms_norm(hidden, weights.attention_norm)
    key = rms_norm(normed @ indexer.key, indexer.key_norm) + indexer.key_bias
    query = query_latent(weights, hidden) @ indexer.query + indexer.query_bias
    per_head = query.view(-1, config.index_heads, config.index_dim)
    weight = normed @ indexer.head + indexer.head_bias
    return torch.cat(
        (_rotate(key, rope, start), _rotate(per_head, rope, start).flatten(1), weight), -1
    )


def split_index(config: ModelConfig, rows: Tensor, start: int) -> tuple[Tensor, IndexQueries]:
    """Cut what `project_index` made into keys [T, index_dim] and queries."""
    heads, dim = config.index_heads, config.index_dim
    key, query, weight = torch.split(rows, [dim, heads * dim, heads], -1)
    return key, IndexQueries(start, query.reshape(-1, heads, dim), weight.contiguous())


def _rotate(rows: Tensor, rope: Rope, start: int) -> Tensor:
    """Turn the first half of rows [T, ..., index_dim] by position."""
    rotated, plain = rows.chunk(2, -1)
    return torch.cat((rope(rotated, start), plain), -1)


def select_rows(config: ModelConfig, queries: IndexQueries, keys: Tensor) -> Tensor:
    """Return the positions each query reads.

    Args:    keys: [start + T, index_elements], the stored index keys of the whole prefix.
    Returns: [T, index_topk] int64, each row ascending; -1 after the last one of a short prefix.
    Raises:  ValueError if scores are not numbers: the keys are not what was written.
    """
    topk, start, count = config.index_topk, queries.start, queries.query.shape[0]
    whole = max(0, min(count, topk - start))
    selected = torch.empty(count, topk, dtype=torch.int64)
    selected[:whole] = _whole_prefixes(start, whole, topk)
    tiles = _key_tiles(config, keys) if whole < count else []
    for begin in range(whole, count, _QUERY_GROUP):
        end = min(count, begin + _QUERY_GROUP)
        group = IndexQueries(start + begin, queries.query[begin:end], queries.weight[begin:end])
        selected[begin:end] = _top_positions(_score(group, tiles), group.start, topk)
    return selected


def _whole_prefixes(start: int, count: int, topk: int) -> Tensor:
    """Select all of [0, p] for p in [start, start + count), each at most `topk` long."""
    columns = torch.arange(topk)
    last = torch.arange(start, start + count).unsqueeze(1)
    return torch.where(columns <= last, columns, -1)


def _key_tiles(config: ModelConfig, keys: Tensor) -> list[Tensor]:
    """Cut keys into float32 tiles of exactly `key_tile`, the last one padded with zeros.

    Tiles start at multiples of `size`, so a key is scored by the same kernel, at the same place,
    however long the prefix is.
    """
    size = config.key_tile
    tiles = [read_keys(config, tile) for tile in torch.split(keys, size)]
    missing = size - tiles[-1].shape[0]
    tiles[-1] = torch.nn.functional.pad(tiles[-1], (0, 0, 0, missing))
    return tiles


def _score(queries: IndexQueries, tiles: list[Tensor]) -> Tensor:
    """Return scores [Q, positions], -inf where the position is after the query."""
    count, size = queries.query.shape[0], tiles[0].shape[0]
    num_tiles = (queries.start + count - 1) // size + 1
    scores = torch.empty(count, num_tiles * size)
    weight = queries.weight.unsqueeze(1)
    for number, tile in enumerate(tiles[:num_tiles]):
        # One product per query, so that a query's shape does not depend on how many there are.
        per_head = torch.bmm(queries.query, tile.t().expand(count, -1, -1)).relu_()
        scores[:, number * size : (number + 1) * size] = torch.bmm(weight, per_head).squeeze(1)
    first = queries.start + 1
    future = torch.arange(first, scores.shape[1])
    own = torch.arange(queries.start, queries.start + count).unsqueeze(1)
    scores[:, first:].masked_fill_(future > own, -torch.inf)
    return scores


def _top_positions(scores: Tensor, start: int, topk: int) -> Tensor:
    """Return the `topk` best columns of each row, ascending; equal scores go to lower columns.

    Args: scores: [Q, N], row q with at least `topk` columns that are not -inf.
    """
    threshold = scores.topk(topk, sorted=False).values.amin(-1, keepdim=True)
    keep = scores >= threshold
    tied = (keep.sum(-1) > topk).nonzero()[:, 0]
    if tied.numel():
        above = scores[tied] > threshold[tied]
        equal = scores[tied] == threshold[tied]
        wanted = topk - above.sum(-1, keepdim=True)
        keep[tied] = above | (equal & (equal.cumsum(-1) <= wanted))
    columns = keep.nonzero()[:, 1]
    if columns.numel() != scores.shape[0] * topk:
        last = start + scores.shape[0] - 1
        raise ValueError(
            f"index scores of positions {start} to {last} are not numbers; "
            "check that the cache returns the index keys that were written"
        )
    return columns.view(scores.shape[0], topk)
