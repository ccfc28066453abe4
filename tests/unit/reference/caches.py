"""Caches for tests: one that checks the order of calls, one that hides a trap in every hole."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_shim.reference.cache import BlockTable, PagedView, ResidentCache
from engine_shim.reference.config import ModelConfig


class RecordingCache(ResidentCache):
    """A resident cache that keeps every call, and what was announced and gathered."""

    def __init__(self, config: ModelConfig, max_tokens: int) -> None:
        super().__init__(config, max_tokens)
        self.calls: list[tuple[str, int]] = []
        self.announced: dict[int, Tensor] = {}
        self.gathered: dict[int, list[Tensor]] = {}

    def begin_layer(self, layer: int) -> None:
        self.calls.append(("begin_layer", layer))

    def write(self, layer: int, positions: Tensor, main: Tensor, index: Tensor | None) -> None:
        self.calls.append(("write", layer))
        super().write(layer, positions, main, index)

    def end_write(self, layer: int) -> None:
        self.calls.append(("end_write", layer))

    def index_keys(self, layer: int, num_tokens: int) -> Tensor:
        self.calls.append(("index_keys", layer))
        return super().index_keys(layer, num_tokens)

    def selected(self, layer: int, positions: Tensor) -> None:
        self.calls.append(("selected", layer))
        self.announced[layer] = positions.clone()
        self.gathered.clear()

    def gather(self, layer: int, selected: Tensor) -> Tensor:
        self.calls.append(("gather", layer))
        self.gathered.setdefault(layer, []).append(selected.clone())
        return super().gather(layer, selected)

    def end_layer(self, layer: int) -> None:
        self.calls.append(("end_layer", layer))

    def truncate(self, num_tokens: int) -> None:
        self.calls.append(("truncate", num_tokens))
        super().truncate(num_tokens)

    def rows(self, layer: int) -> Tensor:
        """Return the main rows written in `layer`."""
        return self._main[layer, : self._num_tokens[layer]]


class PoisonedCache(ResidentCache):
    """A resident cache that hands out NaN wherever nothing valid stands."""

    def __init__(self, config: ModelConfig, max_tokens: int, poison: float = torch.nan) -> None:
        super().__init__(config, max_tokens)
        self._poison = poison
        self.num_poisoned = 0
        self._main.fill_(poison)
        for keys in self._index.values():
            keys.fill_(poison)

    def gather(self, layer: int, selected: Tensor) -> Tensor:
        padding = selected < 0
        self.num_poisoned += int(padding.sum())
        return super().gather(layer, selected).masked_fill(padding.unsqueeze(-1), self._poison)

    def truncate(self, num_tokens: int) -> None:
        super().truncate(num_tokens)
        self._main[:, num_tokens:] = self._poison
        for keys in self._index.values():
            keys[num_tokens:] = self._poison


class BlockCache:
    """Rows in blocks that lie anywhere, as offloaded caches keep them."""

    def __init__(self, config: ModelConfig, block_tokens: int, blocks: list[int]) -> None:
        self.table = BlockTable(block_tokens, max(blocks) + 1)
        self.table.append(blocks)
        num_rows = self.table.num_blocks * block_tokens
        self._main = [
            PagedView(
                torch.full((num_rows, config.row_dim), torch.nan, dtype=config.dtype), self.table
            )
            for _ in range(config.num_layers)
        ]
        self._index = {
            layer: PagedView(
                torch.full((num_rows, config.index_dim), torch.nan, dtype=config.dtype), self.table
            )
            for layer in config.index_layers
        }

    def begin_layer(self, layer: int) -> None: ...

    def write(self, layer: int, positions: Tensor, main: Tensor, index: Tensor | None) -> None:
        self._main[layer].write(positions, main)
        if index is not None:
            self._index[layer].write(positions, index)

    def end_write(self, layer: int) -> None: ...

    def index_keys(self, layer: int, num_tokens: int) -> Tensor:
        return self._index[layer].prefix(num_tokens)

    def selected(self, layer: int, positions: Tensor) -> None: ...

    def gather(self, layer: int, selected: Tensor) -> Tensor:
        return self._main[layer].gather(selected)

    def end_layer(self, layer: int) -> None: ...

    def truncate(self, num_tokens: int) -> None: ...
