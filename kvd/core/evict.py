"""Which ready, unpinned block goes first when room is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """Keeps the evictable blocks in some order. Only unpinned ready blocks are ever in it."""

    def admit(self, block: int) -> None:
        """The block became evictable just now (it was used until now)."""

    def withdraw(self, block: int) -> None:
        """The block is pinned or gone; a block that is not in the policy is no error."""

    def victim(self) -> int | None:
        """The block to evict next, still in the policy; None when there is none."""

    def __len__(self) -> int:
        """How many blocks could be evicted."""

    def __iter__(self) -> Iterator[int]:
        """Evictable blocks, first victim first."""


class LruPolicy:
    """Least recently used first. A dict keeps insertion order; admit puts at the end."""

    def __init__(self) -> None:
        self._order: dict[int, None] = {}

    def admit(self, block: int) -> None:
        """See `EvictionPolicy`."""
        self._order.pop(block, None)
        self._order[block] = None

    def withdraw(self, block: int) -> None:
        """See `EvictionPolicy`."""
        self._order.pop(block, None)

    def victim(self) -> int | None:
        """See `EvictionPolicy`."""
        return next(iter(self._order), None)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)
