"""A condition variable that costs nothing to notify while nobody waits."""

from __future__ import annotations

import threading


class Condition(threading.Condition):
    """As `threading.Condition`, for changes that come far more often than anybody waits for one."""

    def __init__(self, lock: threading.Lock | None = None) -> None:
        """lock: to be shared, None for one of its own, which may be taken again by its holder.

        `lock` is taken at once by `with`; by way of the condition that costs two calls more.
        """
        self.lock = threading.RLock() if lock is None else lock
        super().__init__(self.lock)
        self._waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        """As `threading.Condition.wait`."""
        self._waits += 1
        try:
            return super().wait(timeout)
        finally:
            self._waits -= 1

    def notify(self, n: int = 1) -> None:
        """As `threading.Condition.notify`; the lock is held."""
        if self._waits:
            super().notify(n)

    def notify_all(self) -> None:
        """As `threading.Condition.notify_all`; the lock is held."""
        if self._waits:
            super().notify(self._waits)
