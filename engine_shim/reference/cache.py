"""Where a request's KV rows live: the contract between the model and a cache, and two parts of it.

One cache object serves one request. In every forward the model makes these calls, layer by layer
in ascending order:

    begin_layer -> write -> end_write -> [index_keys -> selected] -> gather ... -> end_layer
                                          (indexer layers only)

* `begin_layer` may block: once it returns, the layer's buffer may be written.
* After `end_write` the step's rows are final, so saves and remote reads may start.
* `selected` tells, before any row is gathered, which rows this layer and the layers that follow
  its selection will read in this step: what is missing can be fetched for the whole group.
* After `end_layer` the compute is done with the buffer.

Positions are token positions in the request, from 0. A forward may write rows it wrote before
(the last prompt token, when decoding starts); they hold the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine_shim.reference.config import ModelConfig


class KvCache(Protocol):
    """Where a step's rows live. T tokens of the step, Q queries, K = index_topk, R = row_dim."""

    def begin_layer(self, layer: int) -> None:
        """Wait until the layer's buffer may be written."""

    def write(self, layer: int, positions: Tensor, main: Tensor, index: Tensor | None) -> None:
        """Store the step's rows.

        Args: positions: [T] int64, ascending and without gaps.
              main:  [T, R] in the config's dtype.
              index: [T, index_elements] as stored; None on layers without an indexer.
        """

    def end_write(self, layer: int) -> None:
        """Take note that the step's rows of this layer are final."""

    def index_keys(self, layer: int, num_tokens: int) -> Tensor:
        """Return the index keys of positions [0, num_tokens): [num_tokens, index_elements].

        The model reads the result before its next call and does not write into it.
        """

    def selected(self, layer: int, positions: Tensor) -> None:
        """Learn what the indexer of `layer` chose for it and the layers that follow it.

        Args: positions: [T, K] int64, each row ascending, then -1 as padding.
        """

    def gather(self, layer: int, selected: Tensor) -> Tensor:
        """Return rows by position.

        Args:    selected: [Q, K] int64; consecutive rows of what was announced, at most
                 `query_group`: a step of so few tokens gathers once per layer.
        Returns: [Q, K, R]; what stands at -1 is undefined, the model masks it. The model copies
                 the result before its next call and does not write into it: it may be a buffer
                 that the next call uses again.
        """

    def end_layer(self, layer: int) -> None:
        """Take note that the compute of this layer is done with the buffer."""

    def truncate(self, num_tokens: int) -> None:
        """Void the rows at positions >= num_tokens: they belong to rejected drafts."""


class ResidentCache:
    """The whole cache as plain tensors: what every offloaded cache is compared with.

    Reading a row that was never written, or was voided, raises ValueError.
    """

    def __init__(self, config: ModelConfig, max_tokens: int) -> None:
        """Allocate rows for `max_tokens` tokens in all layers."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; give 1 or more")
        self._config = config
        layers, dtype = config.num_layers, config.dtype
        self._main = torch.zeros(layers, max_tokens, config.row_dim, dtype=dtype)
        self._index = {
            layer: torch.zeros(max_tokens, config.index_elements, dtype=config.index_storage)
            for layer in config.index_layers
        }
        self._num_tokens = [0] * layers

    def begin_layer(self, layer: int) -> None:
        """Do nothing: every layer has a buffer of its own."""

    def write(self, layer: int, positions: Tensor, main: Tensor, index: Tensor | None) -> None:
        """Store the step's rows, or raise ValueError for a gap or past the end."""
        start, end = int(positions[0]), int(positions[-1]) + 1
        if start > self._num_tokens[layer]:
            raise ValueError(
                f"layer {layer}: position {start} is written but {self._num_tokens[layer]} is the "
                "first one missing; write positions without gaps"
            )
        if end > self._main.shape[1]:
            raise ValueError(
                f"max_tokens is {self._main.shape[1]} but position {end - 1} is written; "
                "give the cache more tokens"
            )
        self._main[layer, start:end] = main
        if index is not None:
            self._index[layer][start:end] = index
        self._num_tokens[layer] = max(end, self._num_tokens[layer])

    def end_write(self, layer: int) -> None:
        """Do nothing: rows are where they stay."""

    def index_keys(self, layer: int, num_tokens: int) -> Tensor:
        """Return a view of the first `num_tokens` index keys."""
        self._check_written(layer, num_tokens)
        return self._index[layer][:num_tokens]

    def selected(self, layer: int, positions: Tensor) -> None:
        """Do nothing: no row is missing."""

    def gather(self, layer: int, selected: Tensor) -> Tensor:
        """Return a copy of the selected rows; row 0 stands for -1."""
        self._check_written(layer, int(selected.max()) + 1)
        flat = self._main[layer].index_select(0, selected.clamp(min=0).flatten())
        return flat.view(*selected.shape, -1)

    def end_layer(self, layer: int) -> None:
        """Do nothing: the buffer is never reused."""

    def truncate(self, num_tokens: int) -> None:
        """Void the rows at positions >= num_tokens."""
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}; give 0 or more")
        self._num_tokens = [min(count, num_tokens) for count in self._num_tokens]

    def _check_written(self, layer: int, num_tokens: int) -> None:
        if num_tokens > self._num_tokens[layer]:
            raise ValueError(
                f"layer {layer}: position {num_tokens - 1} is read but only "
                f"{self._num_tokens[layer]} positions are written"
            )


class BlockTable:
    """One request's blocks, in token order: position -> row of a dense tensor of blocks.

    Row = table[position // block_tokens] * block_tokens + position % block_tokens. The products
    are made once per block, so a lookup is one gather. Layers with the same blocks share a table.
    """

    def __init__(self, block_tokens: int, num_blocks: int) -> None:
        """Make an empty table into a tensor of `num_blocks` blocks of `block_tokens` rows."""
        for name, value in (("block_tokens", block_tokens), ("num_blocks", num_blocks)):
            if value < 1:
                raise ValueError(f"{name} is {value}; give 1 or more")
        self.block_tokens = block_tokens
        self.num_blocks = num_blocks
        self._rows = torch.empty(0, dtype=torch.int64)

    @property
    def num_tokens(self) -> int:
        """Tokens that the table has blocks for."""
        return self._rows.shape[0]

    def append(self, blocks: Sequence[int]) -> None:
        """Add blocks after the last one; a block outside the tensor raises and adds none."""
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block is {block}; give 0 to {self.num_blocks - 1}")
        firsts = torch.tensor(list(blocks), dtype=torch.int64) * self.block_tokens
        rows = firsts.unsqueeze(1) + torch.arange(self.block_tokens)
        self._rows = torch.cat((self._rows, rows.flatten()))

    def rows(self, positions: Tensor) -> Tensor:
        """Return the row of each position: int64, any shape; -1 becomes the row of position 0."""
        if positions.numel() and int(positions.max()) >= self.num_tokens:
            raise ValueError(
                f"position is {int(positions.max())} but the table has blocks for "
                f"{self.num_tokens} tokens; append the missing blocks"
            )
        return self._rows[positions.clamp(min=0)]

    def prefix(self, num_tokens: int) -> Tensor:
        """Return the rows of positions [0, num_tokens): [num_tokens] int64."""
        if num_tokens > self.num_tokens:
            raise ValueError(
                f"num_tokens is {num_tokens} but the table has blocks for {self.num_tokens}; "
                "append the missing blocks"
            )
        return self._rows[:num_tokens]


class PagedView:
    """One request's rows of one layer and part, in a dense tensor of blocks.

    rows:  [num_blocks * block_tokens, row] any dtype; shared, never reallocated here.
    table: the request's blocks.
    """

    def __init__(self, rows: Tensor, table: BlockTable) -> None:
        """Look at `rows` through `table`; ValueError if their sizes do not fit."""
        expected = table.num_blocks * table.block_tokens
        if rows.dim() != 2 or rows.shape[0] != expected:
            raise ValueError(
                f"rows is {list(rows.shape)}; give [{expected}, row]: "
                f"{table.num_blocks} blocks of {table.block_tokens} tokens"
            )
        self._rows = rows
        self._table = table

    def write(self, positions: Tensor, values: Tensor) -> None:
        """Store values [T, row] at positions [T] int64."""
        if positions.numel() and int(positions.min()) < 0:
            raise ValueError(f"position is {int(positions.min())}; write at 0 or more")
        self._rows.index_copy_(0, self._table.rows(positions), values)

    def gather(self, selected: Tensor) -> Tensor:
        """Return a copy of the rows at [Q, K] int64 as [Q, K, row]; undefined at -1."""
        flat = self._rows.index_select(0, self._table.rows(selected).flatten())
        return flat.view(*selected.shape, -1)

    def prefix(self, num_tokens: int) -> Tensor:
        """Return a copy of the rows at positions [0, num_tokens): [num_tokens, row]."""
        return self._rows.index_select(0, self._table.prefix(num_tokens))
