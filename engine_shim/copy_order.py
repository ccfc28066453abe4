"""What the copy threads know of each other: loads go before saves, and saves are counted.

Compute waits for loads, and for saves only when it comes back to their slot. So a save whose turn
has come lets the loads that are under way end first, where both would share the way to the pool.
Loads that begin later do not overtake it: they may be waiting for its very slot.
"""

from __future__ import annotations

from typing import Final

from engine_shim.conditions import Condition

HOLD_SECONDS: Final = 0.1
"""Longest time that a save waits for loads: one that hangs must not keep the slots of others."""


class CopyOrder:
    """Shared by the loader, the saver and the compute thread of one pipeline."""

    def __init__(self) -> None:
        """Nothing is copied."""
        self._changed = Condition()
        self._loads_begun = 0
        self._loads_ended = 0
        self._saves_open = 0

    @property
    def saves_open(self) -> int:
        """Saves that were handed over and have not ended."""
        return self._saves_open

    @property
    def may_save(self) -> bool:
        """Whether a save would not wait for any load now."""
        return self._loads_ended >= self._loads_begun

    def load_begins(self) -> None:
        """A load has its slot and will be copied now."""
        with self._changed.lock:
            self._loads_begun += 1
            self._changed.notify_all()

    def load_ended(self) -> None:
        """The oldest load has ended, or never came to its copy; loads end in their order."""
        with self._changed.lock:
            self._loads_ended += 1
            self._changed.notify_all()

    def save_begins(self) -> None:
        """A save is handed over."""
        with self._changed.lock:
            self._saves_open += 1
            self._changed.notify_all()

    def save_ended(self) -> None:
        """A save has ended, or never came to its copy."""
        with self._changed.lock:
            self._saves_open -= 1
            self._changed.notify_all()

    def wait_for_saves(self, seconds: float) -> bool:
        """Wait until every save that was handed over has ended; returns whether they have."""
        with self._changed.lock:
            return self._changed.wait_for(lambda: not self._saves_open, seconds)

    def wait_for_loads(self, seconds: float) -> bool:
        """Let the loads that have begun by now end; returns whether they have.

        seconds: as long as there is; never more than `HOLD_SECONDS` are waited.
        """
        with self._changed.lock:
            before = self._loads_begun
            return self._changed.wait_for(
                lambda: self._loads_ended >= before, min(seconds, HOLD_SECONDS)
            )
