"""Flags that are set once, and seldom waited for."""

from __future__ import annotations

import threading


class Flag:
    """As `threading.Event`, but cheap to make: a step has three for each of its layers.

    What it takes to sleep is made when somebody does: a lock that is taken until the flag is set.
    Who gets it then lets it go again, for the next one that waits.
    """

    __slots__ = ("_bar", "_is_set", "_lock")

    def __init__(self, lock: threading.Lock) -> None:
        """lock: shared with other flags; held for moments only."""
        self._lock = lock
        self._is_set = False
        self._bar: threading.Lock | None = None

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake whoever waits for it."""
        with self._lock:
            self._is_set = True
            bar, self._bar = self._bar, None
        if bar is not None:
            bar.release()

    def wait(self, seconds: float) -> bool:
        """Sleep until it is set; whether it was."""
        if self._is_set:
            return True
        with self._lock:
            if self._is_set:
                return True
            if self._bar is None:
                self._bar = threading.Lock()
                self._bar.acquire()
            bar = self._bar
        if bar.acquire(timeout=seconds):
            bar.release()
        return self._is_set
