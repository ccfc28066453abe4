"""The reference model: forward of one chunk of one request, its KV rows behind `KvCache`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from engine_shim.reference.attention import attend, make_queries, make_rows, project_output
from engine_shim.reference.cache import KvCache
from engine_shim.reference.collective import Collective, SingleProcess
from engine_shim.reference.config import ModelConfig
from engine_shim.reference.index_rows import store_keys
from engine_shim.reference.indexer import IndexQueries, project_index, select_rows, split_index
from engine_shim.reference.native_reads import NativeReads
from engine_shim.reference.ops import Rope, rms_norm
from engine_shim.reference.tiles import map_tiles, tiles
from engine_shim.reference.weights import LayerWeights, make_weights

Select = Callable[[ModelConfig, IndexQueries, Tensor], Tensor]
"""See `indexer.select_rows`."""


class SparseModel:
    """One rank of a model with sparse latent attention.

    Guarantees, on one machine and one torch build:

    * a token's rows and logits depend on the tokens up to it and nothing else: not on chunk
      boundaries, on how many positions a step decodes, on the number of ranks or of threads; and on
      where native decode began (`NativeReads`), which rounds otherwise than torch;
    * all ranks compute the same main and index rows, bit for bit.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp_rank: int = 0,
        collective: Collective | None = None,
        select: Select = select_rows,
    ) -> None:
        """Make the weights of one rank.

        Args:   tp_rank: this rank; must be the collective's.
                collective: the ranks of the engine; None for a single one.
                select: which rows queries read; another one need not keep to the guarantees.
        Raises: ValueError naming what does not fit.
        """
        ranks = SingleProcess() if collective is None else collective
        if tp_rank != ranks.rank:
            raise ValueError(f"tp_rank is {tp_rank} but the collective has rank {ranks.rank}")
        if config.num_heads % ranks.size:
            raise ValueError(
                f"num_heads is {config.num_heads}; give a multiple of the {ranks.size} ranks"
            )
        per_rank = config.num_heads // ranks.size
        self.config = config
        self._select = select
        self._collective = ranks
        self._heads = slice(tp_rank * per_rank, (tp_rank + 1) * per_rank)
        self._weights = make_weights(config, self._heads)
        # The last tile may reach past the last position.
        table_size = config.max_positions + config.query_tile
        self._rope = Rope(config.rope_dim, table_size)
        self._index_rope = Rope(config.index_dim // 2, table_size)

    def forward(
        self, tokens: Tensor, start: int, cache: KvCache, all_positions: bool = False
    ) -> Tensor:
        """Compute the tokens at positions [start, start + T) and leave their rows in the cache.

        Args:    tokens: [T] int64, T >= 1.
                 start: position of the first one; the cache holds the rows of [0, start).
                 all_positions: give logits of all T positions, not of the last one alone.
        Returns: logits, float32: [T, vocab], or [1, vocab].
        Raises:  ValueError naming the argument, before anything is written.
        """
        self._check(tokens, start)
        hidden = self._weights.embedding[tokens]
        native = cache if isinstance(cache, NativeReads) else None
        selected = torch.empty(0, self.config.index_topk, dtype=torch.int64)
        for layer, weights in enumerate(self._weights.layers):
            cache.begin_layer(layer)
            queries = self._write_rows(layer, weights, hidden, start, cache)
            if queries is not None and native is not None:
                native.choose(layer, queries)
            elif queries is not None:
                keys = cache.index_keys(layer, start + tokens.shape[0])
                selected = self._select(self.config, queries, keys)
                cache.selected(layer, selected)
            if native is not None:
                share = self._native_attention(layer, weights, hidden, start, native)
            else:
                share = self._attention(layer, weights, hidden, start, selected, cache)
            cache.end_layer(layer)
            hidden = hidden + self._collective.all_reduce(share)
            hidden = hidden + self._mlp(weights, hidden, start)
        if all_positions:
            return self._logits(hidden, start)
        return self._logits(hidden[-1:], start + tokens.shape[0] - 1)

    def _check(self, tokens: Tensor, start: int) -> None:
        config = self.config
        if tokens.dim() != 1 or tokens.dtype != torch.int64 or not tokens.numel():
            raise ValueError(f"tokens is {list(tokens.shape)} {tokens.dtype}; give [T] int64")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= config.vocab:
            raise ValueError(f"tokens go from {low} to {high}; give 0 to {config.vocab - 1}")
        if start < 0 or start + tokens.shape[0] > config.max_positions:
            raise ValueError(
                f"positions go from {start} to {start + tokens.shape[0] - 1}; "
                f"give 0 to {config.max_positions - 1} (max_positions - 1)"
            )

    def _write_rows(
        self, layer: int, weights: LayerWeights, hidden: Tensor, start: int, cache: KvCache
    ) -> IndexQueries | None:
        """Store the chunk's rows; return its index queries on layers with an indexer."""
        config = self.config

        def rows(tile: Tensor, base: int) -> Tensor:
            return make_rows(config, weights, self._rope, tile, base)

        def index_rows(tile: Tensor, base: int) -> Tensor:
            return project_index(config, weights, self._index_rope, tile, base)

        main = map_tiles(rows, hidden, start, config.query_tile).to(config.dtype)
        keys: Tensor | None = None
        queries: IndexQueries | None = None
        if weights.indexer is not None:
            projected = map_tiles(index_rows, hidden, start, config.query_tile)
            keys, queries = split_index(config, projected, start)
            keys = store_keys(config, keys)
        cache.write(layer, torch.arange(start, start + hidden.shape[0]), main, keys)
        cache.end_write(layer)
        return queries

    def _attention(
        self,
        layer: int,
        weights: LayerWeights,
        hidden: Tensor,
        start: int,
        selected: Tensor,
        cache: KvCache,
    ) -> Tensor:
        """Return this rank's share of the attention output of the chunk: [T, hidden]."""
        config, count = self.config, hidden.shape[0]
        # A step of a few positions that crosses a tile's edge still gathers once.
        spans = [(tile.begin, tile.end) for tile in tiles(start, count, config.query_tile)]
        if count <= config.query_group:
            spans = [(0, count)]
        group = min(count, config.query_group)
        # One buffer for all groups: fresh memory for each would cost more than the arithmetic.
        scratch = hidden.new_empty(group, config.index_topk, config.row_dim)
        shares = []
        for begin, end in spans:
            queries = self._queries(weights, hidden[begin:end], start + begin)
            latents = []
            for first in range(begin, end, group):
                last = min(end, first + group)
                part = selected[first:last]
                rows = scratch[: last - first].copy_(cache.gather(layer, part))
                latents.append(attend(config, queries[first - begin : last - begin], rows, part))
            shares.append(self._output(weights, torch.cat(latents), start + begin))
        return torch.cat(shares)

    def _native_attention(
        self, layer: int, weights: LayerWeights, hidden: Tensor, start: int, cache: NativeReads
    ) -> Tensor:
        """Return this rank's share of the attention output of a few positions: [T, hidden]."""
        config = self.config
        queries = self._queries(weights, hidden, start)[:, self._heads]
        # The heads of other ranks are zero: the product behind this has the shape of all.
        latents = hidden.new_zeros(hidden.shape[0], config.num_heads, config.kv_lora_rank)
        latents[:, self._heads] = cache.attend(layer, queries)
        return self._output(weights, latents, start)

    def _queries(self, weights: LayerWeights, hidden: Tensor, start: int) -> Tensor:
        """Return the queries [T, num_heads, row_dim] of rows [T, hidden]."""

        def queries(tile: Tensor, base: int) -> Tensor:
            return make_queries(self.config, weights, self._rope, tile, base, self._heads)

        return map_tiles(queries, hidden, start, self.config.query_tile)

    def _output(self, weights: LayerWeights, latents: Tensor, start: int) -> Tensor:
        """Return this rank's share [T, hidden] of the output of latents [T, num_heads, C]."""

        def output(tile: Tensor, _base: int) -> Tensor:
            return project_output(weights, tile, self._heads)

        return map_tiles(output, latents, start, self.config.query_tile)

    def _mlp(self, weights: LayerWeights, hidden: Tensor, start: int) -> Tensor:
        """Return the MLP's output [T, hidden]; every rank computes all of it."""

        def mlp(tile: Tensor, _base: int) -> Tensor:
            normed = rms_norm(tile, weights.mlp_norm)
            gated = silu(normed @ weights.mlp_gate) * (normed @ weights.mlp_up)
            return gated @ weights.mlp_down

        return map_tiles(mlp, hidden, start, self.config.query_tile)

    def _logits(self, hidden: Tensor, start: int) -> Tensor:
        """Return logits [T, vocab] of rows [T, hidden]."""

        def unembed(tile: Tensor, _base: int) -> Tensor:
            return rms_norm(tile, self._weights.final_norm) @ self._weights.unembedding

        return map_tiles(unembed, hidden, start, self.config.query_tile)
