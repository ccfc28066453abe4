"""The answer to slot events, for whoever waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Calls = deque[Callable[[], None]]
"""What is to be called by whoever settled a ticket, once the lock is free."""


class Ticket:
    """The acknowledgement of the items that were posted together."""

    def __init__(
        self,
        lock: threading.Lock,
        count: int,
        calls: Calls | None = None,
        push: Callable[[], None] | None = None,
    ) -> None:
        """lock: the client's; count: items; push: sends riding ones, called with the lock held."""
        self._lock = lock
        self._calls: Calls = deque() if calls is None else calls
        self._push = push
        self._left = count
        self._code = ""
        self._gave_up = ""
        self._waiter: threading.Event | None = None
        self._then: list[Callable[[], None]] = []

    @property
    def is_settled(self) -> bool:
        """Whether kvd has seen all items, or never will."""
        return self._left == 0

    @property
    def code(self) -> str:
        """The first refusal so far, '' for none."""
        return self._code

    def settle(self, code: str) -> None:
        """One item is acknowledged; the lock is held."""
        self._code = self._code or code
        self._left -= 1
        if self._left == 0:
            self._wake()

    def give_up(self, code: str) -> None:
        """Let whoever waits go; the items stay to be acknowledged. The lock is held."""
        self._gave_up = code
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.set()
        self._calls.extend(self._then)
        self._then.clear()

    def then(self, call: Callable[[], None], *, rides: bool = False) -> None:
        """Call it once a `wait` would not sleep: now, or in the thread that hears the answer.

        The lock is not held then. It must not wait for anything that kvd answers.

        Args: rides: there is no haste; nothing is sent for it.
        """
        with self._lock:
            if self._left and not self._gave_up:
                if self._push is not None and not rides:
                    self._push()
                self._then.append(call)
                return
        call()

    def resume(self) -> None:
        """Waiting makes sense again; the lock is held."""
        self._gave_up = ""
        if self._waiter is not None and self._waiter.is_set():
            self._waiter = None  # whoever slept on it has left

    def wait(self, seconds: float) -> str:
        """Sleep until all items are acknowledged.

        Returns: '' when kvd took them all, the first refusal otherwise; `deadline_exceeded` when it
            takes longer, `unreachable` or `closed` when nobody will acknowledge.
        """
        with self._lock:
            if self._left == 0:
                return self._code
            if self._gave_up:
                return self._gave_up
            if self._push is not None:
                self._push()
            if self._waiter is None:
                self._waiter = threading.Event()
            waiter = self._waiter
        waiter.wait(seconds)
        with self._lock:
            if self._left == 0:
                return self._code
            return self._gave_up or "deadline_exceeded"
