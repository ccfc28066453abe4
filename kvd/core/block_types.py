"""Words for blocks of the pool: their states, their shape, and what a change of them is."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

from kvd.core.ids import RequestKey, StepId


class BlockState(IntEnum):
    """State of a block; the values are those of the block headers."""

    RESET = 0
    FILLING = 1
    READY = 2
    POISONED = 3


RESET: Final = int(BlockState.RESET)
FILLING: Final = int(BlockState.FILLING)
READY: Final = int(BlockState.READY)
POISONED: Final = int(BlockState.POISONED)
"""The same numbers: comparing with a member of an enum takes twice as long, at every block."""


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


class OpenCopy(NamedTuple):
    """A save or load of many blocks that has not ended; of a save, the counts it announced.

    step: that keeps the blocks, None where the copy itself does.
    """

    span: int
    blocks: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    step: StepId | None = None


@dataclass(slots=True)
class OpenStep:
    """What a step keeps: blocks that are saved into, and blocks that are loaded.

    copies: its saves and loads that have not ended.
    """

    targets: frozenset[int]
    sources: frozenset[int]
    copies: int = 0
    closed: bool = False


@dataclass(slots=True)
class Marks:
    """Spans that a step has saved into all of its targets, and that are not in their `Fill`s yet.

    Entered one by one they cost more than all else that a layer asks of kvd, since the books of the
    blocks are far apart in memory.
    """

    step: StepId
    blocks: tuple[int, ...]
    tokens: tuple[int, ...]
    spans: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Fill:
    """A filling block: its owner, and how far each span is.

    tokens:  per span, token count that the last ended save made valid, 0 for none; of a span that
             is being saved it means nothing. To be read behind `BlockBooks.settle`.
    want:    token count of the commit, 0 before it came.
    least:   of a shard, the smallest of its counts, as far as anybody asked since the last save:
             each chunk of a prompt loads all that was saved before it.
    """

    owner: RequestKey
    tokens: list[int]
    key: BlockKey | None = None
    want: int = 0
    orphan_deadline: int = 0
    least: dict[int, int] | None = field(default=None, compare=False)

    def is_complete(self) -> bool:
        """Committed, and every span holds exactly the committed tokens."""
        want = self.want
        return want > 0 and all(have == want for have in self.tokens)

    def lose_key(self) -> None:
        """Another block has the key: no earlier commit of this one counts any more."""
        self.key = None
        self.want = 0
