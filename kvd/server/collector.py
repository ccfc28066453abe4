"""Garbage collection that never stops the loop for long.

Python's own schedule walks every live object now and then: with a full story and a large pool that
is tens of milliseconds in which no gate opens. Almost nothing here is cyclic, so the automatic
collector is off. Instead, once some thousand objects were made, these alone are looked at, and
what survived is set aside for good (reference counting still frees it): each look costs the same
fraction of a millisecond, whatever else is alive. Cycles that outlive their first look are swept
by a full collection, but only after the node was idle for a while.
"""

from __future__ import annotations

import gc
import time
from typing import Final

YOUNG_OBJECTS: Final = 5_000
"""New objects before they are looked at; at some 30 ns each."""

FULL_EVERY: Final = 600.0
IDLE_BEFORE_FULL: Final = 30.0
"""Seconds."""


class Collector:
    """Decides what is collected, and when."""

    def __init__(self) -> None:
        """Take over from the automatic collector."""
        gc.disable()
        gc.collect()
        gc.freeze()
        now = time.monotonic()
        self._full_at = now + FULL_EVERY
        self._busy_at = now
        self._seen = 0

    def young(self) -> None:
        """Look at what was made lately, if it has become much; called after every callback."""
        if gc.get_count()[0] >= YOUNG_OBJECTS:
            gc.collect(0)
            gc.freeze()

    def tick(self, work_done: int) -> None:
        """Sweep everything when nobody waits for it.

        Args: work_done: any number that rises with the node's work.
        """
        self.young()
        now = time.monotonic()
        if work_done != self._seen:
            self._seen, self._busy_at = work_done, now
        if now >= self._full_at and now - self._busy_at >= IDLE_BEFORE_FULL:
            self._full_at = now + FULL_EVERY
            gc.unfreeze()
            gc.collect()
            gc.freeze()

    def close(self) -> None:
        """Give the automatic collector back."""
        gc.unfreeze()
        gc.enable()
