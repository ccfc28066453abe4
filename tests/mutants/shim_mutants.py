"""Ways to break the owner's half of the release gate, and what it does under pressure."""

from __future__ import annotations

from typing import Final

from tests.mutants.patches import Mutant

MUTANTS: Final = (
    Mutant(
        "the free word of the last tenancy is taken",
        "engine_shim.gate",
        "        if state == STATE_FREE and epoch > self._last[slot]:\n",
        "        if state == STATE_FREE and epoch >= self._last[slot]:\n",
        ("simulator",),
    ),
    Mutant(
        "a word that says held is taken",
        "engine_shim.gate",
        "        if state == STATE_FREE and epoch > self._last[slot]:\n",
        "        if epoch > self._last[slot] or state > STATE_FREE:\n",
        ("simulator",),
    ),
    Mutant(
        "a slot that kvd has given up is taken early",
        "engine_shim.gate",
        'EARLY if self._is_over[slot] and state in EARLY_STATES else ""\n',
        'EARLY if self._is_over[slot] else ""\n',
        ("slots taken early",),
    ),
    Mutant(
        "a slot is taken early once more while it is in use",
        "engine_shim.gate",
        "        self._last[slot], self._is_over[slot] = epoch, False\n",
        "        self._last[slot] = epoch\n",
        ("slots taken early",),
    ),
    Mutant(
        "a slot is taken early at the epoch that is over",
        "engine_shim.gate",
        "if how == FREE else self._last[slot] + 1\n",
        "if how == FREE else self._last[slot]\n",
        ("slots taken early",),
    ),
    Mutant(
        "a slot that others may read is taken early",
        "engine_shim.client.slots",
        "        if not (use.is_busy or use.reads):\n",
        "        if not use.is_busy:\n",
        ("slots taken early",),
    ),
    Mutant(
        "a save does not wait for loads",
        "engine_shim.saver",
        "        self._order.wait_for_loads(task.step.seconds_left())\n",
        "",
        ("shim under pressure",),
    ),
    Mutant(
        "a save waits for loads that began after it",
        "engine_shim.copy_order",
        "lambda: self._loads_ended >= before,",
        "lambda: self._loads_ended >= max(before, self._loads_begun),",
        ("shim under pressure",),
    ),
    Mutant(
        "saves that are needed are shed with those that are not",
        "engine_shim.pipeline",
        "        return tuple(request for request in live if not request.optional)\n",
        "        return ()\n",
        ("shim under pressure",),
    ),
    Mutant(
        "rows are saved that were not announced",
        "engine_shim.saver",
        "save_plan(task.layer, slot, task.requests, mode)",
        "save_plan(task.layer, slot, task.step.requests, mode)",
        ("shim under pressure",),
    ),
    Mutant(
        "blocks that a chunk must load again are left out when the pool is full",
        "engine_shim.requests",
        "            if not optional or error.code != POOL_FULL:\n",
        "            if error.code != POOL_FULL:\n",
        ("shim under pressure",),
    ),
    Mutant(
        "a flag wakes one of those who wait for it",
        "engine_shim.flags",
        "        if bar.acquire(timeout=seconds):\n            bar.release()\n",
        "        bar.acquire(timeout=seconds)\n",
        ("flags",),
    ),
    Mutant(
        "a flag that is set while somebody begins to wait is slept on",
        "engine_shim.flags",
        "            if self._is_set:\n                return True\n",
        "",
        ("flags",),
    ),
)
