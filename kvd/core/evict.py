"""Which ready, unpinned block goes first when room is needed: the interface, and the plain answer.

The table tells a policy what becomes of blocks and of keys; the policy keeps the order. Blocks of a
chain are admitted last one first (`kvd.core.pool_ops`): without the head of a chain nobody finds
its tail, so the tail must be the older one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

from kvd.core.block_queues import BlockQueues


class PolicyFigures(NamedTuple):
    """What a policy has seen, in blocks, and what it holds now.

    admitted:   blocks that became ready.
    found:      blocks that look-ups found again.
    evicted:    blocks that made room.
    ghost_hits: of those admitted, keys that were evicted not long before; 0 if it keeps no memory.
    new, used:  evictable blocks never found, or found again; all are new where it makes no
                difference.
    new_room:   how many new blocks it keeps before it evicts used ones.
    """

    name: str
    admitted: int
    found: int
    evicted: int
    ghost_hits: int
    new: int
    used: int
    new_room: int


NO_FIGURES: Final = PolicyFigures("", 0, 0, 0, 0, 0, 0, 0)
"""Of a pool that has no blocks yet."""


class EvictionPolicy(Protocol):
    """Keeps the evictable blocks in some order. Only unpinned ready blocks are ever in it."""

    name: str

    def born(self, block: int, namespace: int, block_hash: bytes) -> None:
        """The block is ready with this key. It is not evictable before `admit`."""

    def found(self, blocks: list[int]) -> None:
        """Ready blocks were asked for again; those that are evictable become the youngest."""

    def admit(self, block: int) -> None:
        """The block became evictable just now (it was used until now)."""

    def admit_range(self, start: int, stop: int) -> None:
        """Blocks start .. stop - 1 became evictable, in that order; none of them was before."""

    def withdraw(self, block: int) -> None:
        """The block is pinned or gone; a block that is not in the policy is no error."""

    def withdraw_all(self, blocks: list[int]) -> None:
        """The same for several, e.g. those of a hit."""

    def victim(self) -> int | None:
        """The block to evict next, still in the policy; None when there is none."""

    def evict(self, block: int, namespace: int, block_hash: bytes) -> None:
        """The victim, with this key, is evicted: it leaves, and its key may be remembered."""

    def figures(self) -> PolicyFigures:
        """What it has seen and holds."""

    def __len__(self) -> int:
        """How many blocks could be evicted."""

    def __iter__(self) -> Iterator[int]:
        """Evictable blocks, first victim first."""


class LruPolicy:
    """Least recently used first."""

    name = "lru"

    def __init__(self, total: int, queues: type[BlockQueues] = BlockQueues) -> None:
        """Nothing is evictable. total: blocks of the pool, less than 2^31."""
        self._queue = queues(total, 1)
        self._admitted = 0
        self._found = 0
        self._evicted = 0

    def born(self, block: int, namespace: int, block_hash: bytes) -> None:
        """See `EvictionPolicy`."""
        self._admitted += 1

    def found(self, blocks: list[int]) -> None:
        """See `EvictionPolicy`."""
        self._found += len(blocks)
        home = self._queue.home
        for block in blocks:
            if home[block]:
                self.admit(block)

    def admit(self, block: int) -> None:
        """See `EvictionPolicy`."""
        self._queue.drop(block)
        self._queue.push(0, block)

    def admit_range(self, start: int, stop: int) -> None:
        """See `EvictionPolicy`."""
        self._queue.push_range(0, start, stop)

    def withdraw(self, block: int) -> None:
        """See `EvictionPolicy`."""
        self._queue.drop(block)

    def withdraw_all(self, blocks: list[int]) -> None:
        """See `EvictionPolicy`."""
        self._queue.drop_all(blocks)

    def victim(self) -> int | None:
        """See `EvictionPolicy`."""
        return self._queue.first(0)

    def evict(self, block: int, namespace: int, block_hash: bytes) -> None:
        """See `EvictionPolicy`."""
        self._queue.drop(block)
        self._evicted += 1

    def figures(self) -> PolicyFigures:
        """See `EvictionPolicy`."""
        held = len(self)
        return PolicyFigures(
            self.name, self._admitted, self._found, self._evicted, 0, held, 0, held
        )

    def __len__(self) -> int:
        return self._queue.sizes[0]

    def __iter__(self) -> Iterator[int]:
        return self._queue.blocks(0)
