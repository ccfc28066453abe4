"""Requests of which rows are not where, or what, the engine takes them for."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from engine_shim.steps import StepFailed


class LostRows:
    """Why rows of a request cannot be used; shared by the compute thread and the copy threads.

    What became of a copy may be heard when its request has ended: of such nothing is kept.
    """

    def __init__(self) -> None:
        """Nothing is lost."""
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._lost: dict[str, StepFailed] = {}

    def expect(self, requests: Iterable[str]) -> None:
        """A step of these requests begins."""
        with self._lock:
            self._known.update(requests)

    def lose(self, requests: Iterable[str], failure: StepFailed) -> None:
        """Rows of these requests are lost, for this reason."""
        with self._lock:
            self._lost.update({name: failure for name in requests if name in self._known})

    def why(self, request: str) -> StepFailed | None:
        """Why rows of the request are lost, None when none are."""
        if not self._lost:
            return None
        with self._lock:
            return self._lost.get(request)

    def forget(self, request: str) -> None:
        """The request has ended."""
        with self._lock:
            self._known.discard(request)
            self._lost.pop(request, None)
