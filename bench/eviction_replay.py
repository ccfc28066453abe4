"""Replays a trace on an eviction policy, and finds the best that any policy could do.

The pool here is what `kvd.core.blocks.BlockTable` is to its policy and no more: a request pins what
it finds of its prefix, takes blocks for the rest, evicting as needed, and lets go of all of it,
last block first, when `RUNNING` later ones have begun.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import deque
from collections.abc import Iterable, Sequence

from bench.eviction_traces import Request
from kvd.core.evict import EvictionPolicy

RUNNING = 4
NEVER = 1 << 60


class ReplayPool:
    """A pool of `total` blocks under one policy."""

    def __init__(self, total: int, policy: EvictionPolicy, *, tail_first: bool = True) -> None:
        """tail_first: whether the last block of a request is the first to be let go."""
        self.policy = policy
        self.hits = 0
        self.asked = 0
        self._tail_first = tail_first
        self._free = list(range(total))
        self._block_of: dict[int, int] = {}
        self._key_of = [0] * total
        self._pins = [0] * total
        self._running: deque[list[int]] = deque()

    def replay(self, trace: Iterable[Request]) -> float:
        """The share of blocks asked for that was found."""
        for request in trace:
            self._run(request)
        return self.hits / self.asked

    def _run(self, request: Request) -> None:
        while len(self._running) >= RUNNING:
            self._end(self._running.popleft())
        found: list[int] = []
        for key in request:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        self.hits += len(found)
        self.asked += len(request)
        self.policy.found(found)
        self._pin(found)
        rest = request[len(found) :]
        while self._running and len(rest) > len(self._free) + len(self.policy):
            self._end(self._running.popleft())
        if len(rest) > len(self._free) + len(self.policy):
            self._end(found)
            return
        taken = [self._take() for _ in rest]
        kept = [self._store(block, key) for block, key in zip(taken, rest, strict=True)]
        self._running.append(found + [block for block in kept if block >= 0])

    def _pin(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not self._pins[block]:
                self.policy.withdraw(block)
            self._pins[block] += 1

    def _end(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks) if self._tail_first else blocks:
            self._pins[block] -= 1
            if not self._pins[block]:
                self.policy.admit(block)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block = self.policy.victim()
        assert block is not None
        key = self._key_of[block]
        self.policy.evict(block, 0, digest_of(key))
        del self._block_of[key]
        return block

    def _store(self, block: int, key: int) -> int:
        """Give a block its key; -1 if another has it, whose head was evicted before it."""
        other = self._block_of.get(key)
        if other is not None:
            self.policy.found([other])
            self._free.append(block)
            return -1
        self._block_of[key] = block
        self._key_of[block] = key
        self._pins[block] = 1
        self.policy.born(block, 0, digest_of(key))
        return block


def digest_of(key: int) -> bytes:
    """The hash that an engine would give a block."""
    return hashlib.blake2b(key.to_bytes(8), digest_size=32).digest()


def best_possible(total: int, trace: Sequence[Request]) -> float:
    """Belady's optimum: keep what is asked for soonest; what is not worth a block gets none.

    No policy finds more, not even one that knows the future: the rules here are kinder than those
    of a pool, which must take in whatever a request stores.
    """
    asks = [key for request in trace for key in request]
    following = [NEVER] * len(asks)
    last: dict[int, int] = {}
    for at in range(len(asks) - 1, -1, -1):
        following[at] = last.get(asks[at], NEVER)
        last[asks[at]] = at
    wanted: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    hits = 0
    for at, key in enumerate(asks):
        hits += key in wanted
        if following[at] == NEVER:
            wanted.pop(key, None)
            continue
        wanted[key] = following[at]
        heapq.heappush(latest, (-following[at], key))
        while len(wanted) > total:
            when, worst = heapq.heappop(latest)
            if wanted.get(worst) == -when:
                del wanted[worst]
    return hits / len(asks)
