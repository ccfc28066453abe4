"""Adaptive replacement: blocks that were found again are kept apart from those that never were.

Two queues, each by last use: *new* blocks, which nobody has looked up since they were stored, and
*used* ones. A long document that is read once runs through the first and leaves the second alone.
How many new blocks are kept is learned: when a key comes back whose block was evicted from the new
ones, they had too little room; when it was evicted from the used ones, these had.

What differs from the textbook: pinned blocks are in no queue, so a use shows when the pin goes; new
blocks keep at least a sixteenth of the pool, else the first turn of a conversation is gone before
the second comes (a point of hit rate on conversations); and the memory of evicted keys is longer,
twice the pool for each queue, which on all traces of `bench.eviction` cost nothing and won up to a
point.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvd.core.block_queues import BlockQueues
from kvd.core.evict import PolicyFigures
from kvd.core.ghosts import Ghosts, fingerprint

NEW: Final = 0
USED: Final = 1
FLOOR: Final = 16
"""New blocks keep 1/16 of the pool."""

FINE: Final = 16
"""Parts of a block in which the room for new ones is counted."""

GHOSTS: Final = 2
"""Keys remembered for each queue, in pools."""


class ArcPolicy:
    """`kvd.core.evict.EvictionPolicy` that a scan does not empty."""

    name = "arc"

    def __init__(self, total: int, queues: type[BlockQueues] = BlockQueues) -> None:
        """Nothing is evictable. total: blocks of the pool, less than 2^31."""
        self._total = total
        self._queues = queues(total, 2)
        self._is_used = bytearray(total)
        self._ghosts = (Ghosts(GHOSTS * total), Ghosts(GHOSTS * total))
        self._floor = self._room = max(FINE, FINE * total // FLOOR)
        self._admitted = 0
        self._found = 0
        self._ghost_hits = 0
        self._evicted = 0

    def born(self, block: int, namespace: int, block_hash: bytes) -> None:
        """See `EvictionPolicy`."""
        print_ = fingerprint(namespace, block_hash)
        self._admitted += 1
        of_new, of_used = self._ghosts
        if of_new.take(print_):
            step = max(FINE, FINE * len(of_used) // (1 + len(of_new)))
            self._room = min(FINE * self._total, self._room + step)
        elif of_used.take(print_):
            step = max(FINE, FINE * len(of_new) // (1 + len(of_used)))
            self._room = max(self._floor, self._room - step)
        else:
            self._is_used[block] = 0
            return
        self._is_used[block] = 1
        self._ghost_hits += 1

    def found(self, blocks: list[int]) -> None:
        """See `EvictionPolicy`."""
        self._found += len(blocks)
        if self._queues.mark_all(self._is_used, blocks):
            for block in blocks:
                if self._queues.home[block]:
                    self.admit(block)

    def admit(self, block: int) -> None:
        """See `EvictionPolicy`."""
        self._queues.drop(block)
        self._queues.push(self._is_used[block], block)

    def admit_range(self, start: int, stop: int) -> None:
        """See `EvictionPolicy`. They come from an earlier life of kvd: all count as new."""
        self._is_used[start:stop] = bytes(stop - start)
        self._queues.push_range(NEW, start, stop)

    def withdraw(self, block: int) -> None:
        """See `EvictionPolicy`."""
        self._queues.drop(block)

    def withdraw_all(self, blocks: list[int]) -> None:
        """See `EvictionPolicy`."""
        self._queues.drop_all(blocks)

    def victim(self) -> int | None:
        """See `EvictionPolicy`."""
        queues = self._queues
        new, used = queues.sizes
        return queues.first(NEW if new and (FINE * new > self._room or not used) else USED)

    def evict(self, block: int, namespace: int, block_hash: bytes) -> None:
        """See `EvictionPolicy`."""
        queue = self._queues.home[block] - 1
        self._queues.drop(block)
        self._ghosts[queue].add(fingerprint(namespace, block_hash))
        self._evicted += 1

    def figures(self) -> PolicyFigures:
        """See `EvictionPolicy`."""
        new, used = self._queues.sizes
        return PolicyFigures(
            self.name,
            self._admitted,
            self._found,
            self._evicted,
            self._ghost_hits,
            new,
            used,
            self._room // FINE,
        )

    def __len__(self) -> int:
        return sum(self._queues.sizes)

    def __iter__(self) -> Iterator[int]:
        """See `EvictionPolicy`. As things are: each eviction may also change what is learned."""
        new, used = self._queues.blocks(NEW), self._queues.blocks(USED)
        num_new, num_used = self._queues.sizes
        while num_new or num_used:
            if num_new and (FINE * num_new > self._room or not num_used):
                num_new -= 1
                yield next(new)
            else:
                num_used -= 1
                yield next(used)
