"""Flags that are set once, and seldom waited for."""

from __future__ import annotations

import threading


class Flag:
    """As `threading.Event`, but cheap to make: a step has three for each of its layers.

    What it takes to sleep is made when somebody does.
    """

    __slots__ = ("_event", "_is_set", "_lock")

    def __init__(self, lock: threading.Lock) -> None:
        """lock: shared with other flags; held for moments only."""
        self._lock = lock
        self._is_set = False
        self._event: threading.Event | None = None

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake whoever waits for it."""
        with self._lock:
            self._is_set = True
            event = self._event
        if event is not None:
            event.set()

    def wait(self, seconds: float) -> bool:
        """Sleep until it is set; whether it was."""
        if self._is_set:
            return True
        with self._lock:
            if self._event is None and not self._is_set:
                self._event = threading.Event()
            event = self._event
        return self._is_set or (event is not None and event.wait(seconds))
