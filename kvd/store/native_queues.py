"""Queues of evictable blocks whose bulk steps are native."""

from __future__ import annotations

from kvd.core.block_queues import BlockQueues
from kvd_kernels.host import link_range, mark_blocks, unlink_blocks


class NativeQueues(BlockQueues):
    """`kvd.core.block_queues.BlockQueues` that lets many blocks go at once.

    A look-up finds and pins a thousand blocks within the time of a round trip.
    """

    def drop_all(self, blocks: list[int]) -> None:
        """See `BlockQueues`."""
        left = unlink_blocks(self._after, self._before, self.home, blocks)
        for queue, count in enumerate(left):
            self.sizes[queue] -= count

    def push_range(self, queue: int, start: int, stop: int) -> None:
        """See `BlockQueues`."""
        link_range(self._after, self._before, self.home, queue, start, stop)
        self.sizes[queue] += stop - start

    def mark_all(self, marks: bytearray, blocks: list[int]) -> bool:
        """See `BlockQueues`."""
        return mark_blocks(marks, self.home, blocks)
