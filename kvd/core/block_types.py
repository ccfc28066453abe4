"""Words for blocks of the pool: their states, their shape, and what a change of them is."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class BlockState(IntEnum):
    """State of a block; the values are those of the block headers."""

    RESET = 0
    FILLING = 1
    READY = 2
    POISONED = 3


class CommitStatus(IntEnum):
    """What a commit achieved."""

    PENDING = 0
    READY = 1
    DUPLICATE = 2


@dataclass(frozen=True, slots=True)
class BlockShape:
    """How blocks of the pool divide: spans are (layer, shard)."""

    block_tokens: int
    num_layers: int
    num_shards: int = 1

    @property
    def num_spans(self) -> int:
        """Spans that must be saved before a block is ready."""
        return self.num_layers * self.num_shards

    def span(self, layer: int, shard: int) -> int:
        """Index of a span."""
        return layer * self.num_shards + shard


BlockKey = tuple[int, bytes]
"""(namespace, 32-byte hash)"""


@dataclass(slots=True)
class Changes:
    """What a call did that the world outside the table must learn."""

    ready: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    poisoned: list[int] = field(default_factory=list)
