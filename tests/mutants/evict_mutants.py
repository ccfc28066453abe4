"""Ways to evict the wrong block: one that somebody keeps, or one that is worth more."""

from __future__ import annotations

from typing import Final

from tests.mutants.patches import Mutant

QUEUES: Final = "kvd.core.block_queues"
LRU: Final = "kvd.core.evict"
ARC: Final = "kvd.core.evict_arc"
GHOSTS: Final = "kvd.core.ghosts"
POOL_OPS: Final = "kvd.core.pool_ops"
LIVES: Final = "kvd.core.block_lives"

MUTANTS: Final = (
    Mutant(
        "a look-up does not keep what it found",
        POOL_OPS,
        "        pinned = table.pin_all(found, request.key)\n",
        "        pinned = dict.fromkeys(found)\n",
        ("room by example",),
    ),
    Mutant(
        "an operation may evict what it has just found",
        LIVES,
        "            self.policy.withdraw_all(blocks)\n",
        "",
        ("block machine", "room by example"),
    ),
    Mutant(
        "a block is evictable once its owner leaves, whoever else keeps it",
        LIVES,
        "            self.pins[block] = pins - {pin}\n            return\n",
        "            self.pins[block] = pins - {pin}\n"
        "            self.policy.admit(block)\n"
        "            return\n",
        ("block machine", "room by example"),
    ),
    Mutant(
        "the head of a request is evicted before its tail",
        POOL_OPS,
        "    for block in reversed(blocks):\n",
        "    for block in blocks:\n",
        ("room by example",),
    ),
    Mutant(
        "asking twice for one request counts as two uses",
        POOL_OPS,
        "[block for block in found if block not in request.blocks]",
        "found",
        ("room by example",),
    ),
    Mutant(
        "ticks evict though there is room",
        POOL_OPS,
        "    if free < pool.free_low:\n",
        "    if free <= pool.free_low:\n",
        ("room by example",),
    ),
    Mutant(
        "ticks stop as soon as high water is left",
        POOL_OPS,
        "    pool.makes_room = free + batch < pool.free_high\n",
        "    pool.makes_room = free + batch < pool.free_low\n",
        ("room by example",),
    ),
    Mutant(
        "the block used last is evicted first",
        QUEUES,
        "        block = self._after[self.total + queue]\n        return block if",
        "        block = self._before[self.total + queue]\n        return block if",
        ("block machine", "eviction", "arc by example"),
    ),
    Mutant(
        "using a block again does not make it younger",
        LRU,
        "        self._queue.drop(block)\n        self._queue.push(0, block)\n",
        "        if not self._queue.home[block]:\n            self._queue.push(0, block)\n",
        ("eviction",),
    ),
    Mutant(
        "a scan displaces what was found again",
        ARC,
        "        self._queues.push(self._is_used[block], block)\n",
        "        self._queues.push(NEW, block)\n",
        ("eviction", "arc by example"),
    ),
    Mutant(
        "a block inherits the uses of what was in it before",
        ARC,
        "            self._is_used[block] = 0\n",
        "            self._is_used[block] |= 0\n",
        ("eviction", "arc by example"),
    ),
    Mutant(
        "evicted keys are remembered as those of the other queue",
        ARC,
        "        self._ghosts[queue].add(",
        "        self._ghosts[1 - queue].add(",
        ("eviction", "arc by example"),
    ),
    Mutant(
        "used blocks have no room to lose",
        ARC,
        "            self._room = max(self._floor, self._room - step)\n",
        "            self._room = max(0, self._room - step)\n",
        ("eviction",),
    ),
    Mutant(
        "a key that came back still counts as evicted",
        GHOSTS,
        "        ring[place - 1] = 0\n        self._kept -= 1\n        self._close_gap(slot)\n",
        "",
        ("eviction",),
    ),
    Mutant(
        "forgetting one key loses others behind it",
        GHOSTS,
        "        self._kept -= 1\n        self._close_gap(slot)\n",
        "        self._kept -= 1\n        slots[slot] = 0\n",
        ("eviction",),
    ),
)
