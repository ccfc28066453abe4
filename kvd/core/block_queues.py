"""Queues of blocks in flat arrays: a block is in one of them or in none; every step is O(1).

A queue is a ring of links through its head, which is node `total + queue`. There is no object for
a block: nine bytes of each are its two neighbours and the number of its queue.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

NOWHERE = 0
"""In `BlockQueues.home`: the block is in no queue; else it is 1 + the queue's number."""


class BlockQueues:
    """`count` queues over the blocks 0 .. total - 1."""

    def __init__(self, total: int, count: int) -> None:
        """All are empty."""
        self.total = total
        self.home = bytearray(total)
        self.sizes = [0] * count
        heads = range(total, total + count)
        self._after = array("i", [0]) * total + array("i", heads)
        self._before = array("i", self._after)

    def push(self, queue: int, block: int) -> None:
        """Put a block that is in no queue at the end of one."""
        after, before = self._after, self._before
        head = self.total + queue
        last = before[head]
        after[last] = before[head] = block
        before[block] = last
        after[block] = head
        self.home[block] = queue + 1
        self.sizes[queue] += 1

    def drop(self, block: int) -> None:
        """Take a block out of its queue; one that is in none is no error."""
        home = self.home[block]
        if not home:
            return
        after, before = self._after, self._before
        left, right = before[block], after[block]
        after[left] = right
        before[right] = left
        self.home[block] = NOWHERE
        self.sizes[home - 1] -= 1

    def push_range(self, queue: int, start: int, stop: int) -> None:
        """Put blocks start .. stop - 1, at least one, none in a queue, at the end of one."""
        after, before = self._after, self._before
        head = self.total + queue
        last = before[head]
        row = array("i", range(start - 1, stop + 1))
        after[start:stop] = row[2:]
        before[start:stop] = row[:-2]
        after[last] = start
        before[start] = last
        before[head] = stop - 1
        after[stop - 1] = head
        self.home[start:stop] = bytes([queue + 1]) * (stop - start)
        self.sizes[queue] += stop - start

    def drop_all(self, blocks: list[int]) -> None:
        """Take several blocks out of their queues, e.g. those of a hit."""
        for block in blocks:
            self.drop(block)

    def mark_all(self, marks: bytearray, blocks: list[int]) -> bool:
        """Set marks[block] to 1 for several blocks; whether any of them is in a queue."""
        for block in blocks:
            marks[block] = 1
        return any(self.home[block] for block in blocks)

    def first(self, queue: int) -> int | None:
        """The block that has been in the queue longest."""
        block = self._after[self.total + queue]
        return block if block < self.total else None

    def blocks(self, queue: int) -> Iterator[int]:
        """All of a queue, longest first; it must not change meanwhile."""
        block = self._after[self.total + queue]
        while block < self.total:
            yield block
            block = self._after[block]
