"""The checksums of the pool, as long as it has a layout and `pool.checksums` is not off."""

from __future__ import annotations

import os
from collections.abc import Callable

from kvd.core.effects import FormatPool, WriteSums
from kvd.core.errors import LocalError
from kvd.memory.inheritance import Inheritance
from kvd.memory.sum_area import SumArea
from kvd.wire.sum_layout import SumShape


class SumKeeper:
    """Owns the checksum area; `note` says what became of that of the last life."""

    def __init__(self, mode: str) -> None:
        """mode: pool.checksums."""
        self._is_wanted = mode != "off"
        self.area: SumArea | None = None
        self.note = ""

    @property
    def fd(self) -> int:
        """The area's file, -1 without one."""
        return self.area.fd if self.area is not None else -1

    def adopt(self, found: Inheritance) -> bool:
        """Take over what is known of an adopted pool; of other blocks nothing is. Is there an area?

        Raises: LocalError(memory_short).
        """
        old_fd, found.sums_fd = found.sums_fd, -1
        try:
            shape = _shape_of(found) if self._is_wanted else None
            if shape is not None:
                self.area = self._copied(old_fd, shape) or SumArea(shape)
        finally:
            if old_fd >= 0:
                os.close(old_fd)
        return self.area is not None

    def _copied(self, old_fd: int, shape: SumShape) -> SumArea | None:
        try:
            return SumArea.adopt(old_fd, shape) if old_fd >= 0 else None
        except ValueError as error:
            self.note = f"its checksums were dropped: {error}"
            return None

    def format(self, effect: FormatPool, close: Callable[[Callable[[], None]], object]) -> bool:
        """An area for a new layout, nothing known; who mapped the old one keeps that. Is there one?

        Without memory for one nothing is verified, and the status says so: a pool without
        checksums is better than none.

        Args: close: closes the old one elsewhere, since unmapping may take long.
        """
        old, self.area = self.area, None
        if old is not None:
            close(old.close)
        if self._is_wanted:
            try:
                self.area = SumArea(SumShape(effect.total, effect.num_spans, effect.digest))
            except LocalError as error:
                self.note = f"the pool has no checksums: {error.what}"
        return self.area is not None

    def write(self, effect: WriteSums) -> None:
        """Record what a save wrote."""
        if self.area is not None:
            self.area.store(effect.span, effect.blocks, effect.tokens, effect.sums)

    def close(self) -> None:
        """Give it back."""
        if self.area is not None:
            self.area.close()
            self.area = None


def _shape_of(found: Inheritance) -> SumShape | None:
    record = found.record.last
    pool = record.pool if record is not None else None
    if found.table is None or pool is None:
        return None
    block = found.table.superblock
    return SumShape(block.block_count, pool.num_layers * pool.num_shards, block.layout_digest)
