"""Requests that wait for their reply: each caller sleeps on its own, whoever reads finds it here.

Not thread-safe by itself: the client's lock is held around every call but `Pending.wait`.
"""

from __future__ import annotations

import threading
from collections import Counter

from engine_shim.client.errors import KvdRefused
from kvd.wire.messages import Answered


class Pending:
    """One request under way."""

    def __init__(self, number: int, what: str) -> None:
        """number: its request_no; what: for the error when it is late."""
        self.number = number
        self.what = what
        self.reply: Answered | None = None
        self.error: KvdRefused | None = None
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        """Whether a reply or an error is there."""
        return self._over.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleep until it is over; False when that takes longer."""
        return self._over.wait(seconds)

    def end(self, reply: Answered | None, error: KvdRefused | None) -> None:
        """Wake the caller with one of both."""
        self.reply, self.error = reply, error
        self._over.set()


class RequestTable:
    """All requests under way, by number."""

    def __init__(self, limit: int) -> None:
        """limit: how many may be under way at once."""
        self._limit = limit
        self._next = 1
        self._open: dict[int, Pending] = {}
        self.outcomes: Counter[str] = Counter()
        """How requests ended: `ok` or the code."""
        self.replies_unknown = 0
        """Replies that nobody waits for any more, or never did."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def has_room(self) -> bool:
        """Whether one more may start."""
        return len(self._open) < self._limit

    def number(self) -> int:
        """The next request number; 0 is never given, it marks kvd's own questions."""
        number = self._next
        self._next += 1
        return number

    def issue(self, what: str) -> Pending:
        """Start a request; there must be room."""
        assert self.has_room
        pending = Pending(self.number(), what)
        self._open[pending.number] = pending
        return pending

    def is_open(self, number: int) -> bool:
        """Whether somebody still waits for this reply."""
        return number in self._open

    def answer(self, number: int, reply: Answered | None) -> None:
        """A reply came; None where what was asked for came by another way."""
        pending = self._open.pop(number, None)
        if pending is None:
            self.replies_unknown += 1
            return
        self.outcomes["ok"] += 1
        pending.end(reply, None)

    def refuse(self, number: int, error: KvdRefused) -> None:
        """A refusal came."""
        pending = self._open.pop(number, None)
        if pending is None:
            self.replies_unknown += 1
            return
        self.outcomes[error.code] += 1
        pending.end(None, error)

    def refuse_all(self, code: str, **context: object) -> None:
        """Nobody will be answered: the connection is gone."""
        for number in list(self._open):
            self.refuse(number, KvdRefused(code, **context))

    def give_up(self, pending: Pending) -> bool:
        """The caller waits no longer; False when the outcome came just now."""
        if self._open.pop(pending.number, None) is None:
            return False
        self.outcomes["deadline_exceeded"] += 1
        return True
