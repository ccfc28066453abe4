"""Garbage collection that never stops the loop for long.

Python's own schedule walks every live object now and then: with a full story and a large pool that
is tens of milliseconds in which no gate opens. Almost nothing here is cyclic, so: the automatic
collector is off; young objects are looked at once a second, and what survived is set aside for
good (reference counting still frees it). Cycles that live longer than a second and then die are
swept by a full collection, but only after the node was idle for a while.
"""

from __future__ import annotations

import gc
import time
from typing import Final

YOUNG_EVERY: Final = 1.0
FULL_EVERY: Final = 600.0
IDLE_BEFORE_FULL: Final = 30.0
"""Seconds."""


class Collector:
    """Called on every tick; decides what to collect."""

    def __init__(self) -> None:
        """Take over from the automatic collector."""
        gc.disable()
        gc.collect()
        gc.freeze()
        now = time.monotonic()
        self._young_at = now + YOUNG_EVERY
        self._full_at = now + FULL_EVERY
        self._busy_at = now
        self._seen = 0

    def tick(self, work_done: int) -> None:
        """Collect what is due.

        Args: work_done: any number that rises with the node's work.
        """
        now = time.monotonic()
        if work_done != self._seen:
            self._seen, self._busy_at = work_done, now
        if now >= self._full_at and now - self._busy_at >= IDLE_BEFORE_FULL:
            self._full_at = now + FULL_EVERY
            gc.unfreeze()
            gc.collect()
            gc.freeze()
        elif now >= self._young_at:
            self._young_at = now + YOUNG_EVERY
            gc.collect(1)
            gc.freeze()

    def close(self) -> None:
        """Give the automatic collector back."""
        gc.unfreeze()
        gc.enable()
