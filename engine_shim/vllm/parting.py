"""Blocks of attempts that have ended, until no rank can save into them any more.

The end of a request and the announcements of its saves come to kvd by different connections: an
end that comes first would let a save of a step under way be refused, and with it the whole step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from logging import Logger
from typing import Final

from engine_shim.client import KvdRefused
from engine_shim.requests import PooledRequest, RequestPool


@dataclass(frozen=True, slots=True)
class Parting:
    """Blocks of an attempt that has ended.

    last_step: number of its last step: a rank may save into them until it is reported.
    done:      tokens of them that are right and may be found by others, -1 for none.
    """

    name: str
    pooled: PooledRequest | None
    last_step: int
    done: int


UNHEARD: Final = frozenset({"busy", "deadline_exceeded", "unreachable"})
"""Refusals after which kvd may still keep the blocks: it is told again."""


class Partings:
    """All of them, in the order in which they ended."""

    def __init__(self, pool: RequestPool, logger: Logger) -> None:
        """Nobody has ended."""
        self._pool = pool
        self._log = logger
        self._waiting: list[Parting] = []
        self._untold: deque[Parting] = deque()

    def __bool__(self) -> bool:
        """Whether blocks are held only because steps are under way."""
        return bool(self._waiting)

    def add(self, one: Parting) -> None:
        """An attempt has ended; `settle` lets it go."""
        self._waiting.append(one)

    def settle(self, steps_done: int) -> list[str]:
        """Let go of those whose last step is reported; returns the names of all that are new.

        A kvd that is away and comes back with the same pool keeps all pins: it is told then.
        """
        now = [one for one in self._waiting if one.last_step <= steps_done]
        self._waiting = [one for one in self._waiting if one.last_step > steps_done]
        self._untold.extend(one for one in now if one.pooled is not None)
        while self._untold and self._is_told(self._untold[0]):
            self._untold.popleft()
        return [one.name for one in now]

    def _is_told(self, one: Parting) -> bool:
        pooled = one.pooled
        assert pooled is not None
        try:
            if one.done < 0:
                self._pool.abort(pooled)
                return True
            try:
                self._pool.commit(pooled, one.done)
            finally:
                # A block whose save failed is refused and found by nobody; its pins go as well.
                self._pool.end(pooled)
        except KvdRefused as refusal:
            self._log.debug("kvd was not told the end of %s: %s", one.name, refusal)
            return refusal.code not in UNHEARD
        return True
