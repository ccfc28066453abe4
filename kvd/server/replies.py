"""Who waits for which answer: handles of the machine to requests of sessions."""

from __future__ import annotations

from collections.abc import Callable

from kvd.core.errors import KvdError
from kvd.core.results import Result

Answerer = Callable[[Result | KvdError], None]


class ReplyBook:
    """Gives every request a handle and answers it exactly once."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._waiting: dict[int, Answerer] = {}
        self._next = 1

    def expect(self, answerer: Answerer) -> int:
        """A new handle; `answerer` is called once with its result or error."""
        handle = self._next
        self._next += 1
        self._waiting[handle] = answerer
        return handle

    def answer(self, handle: int, result: Result) -> None:
        """The machine has a result."""
        answerer = self._waiting.pop(handle, None)
        if answerer is not None:
            answerer(result)

    def refuse(self, handle: int, error: KvdError) -> None:
        """The machine refused."""
        answerer = self._waiting.pop(handle, None)
        if answerer is not None:
            answerer(error)

    def refuse_all(self, error: KvdError) -> None:
        """Nobody waits any more: kvd stops."""
        for handle in list(self._waiting):
            self.refuse(handle, error)

    def __len__(self) -> int:
        return len(self._waiting)
