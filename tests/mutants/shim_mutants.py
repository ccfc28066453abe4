"""Ways to break the owner's half of the release gate."""

from __future__ import annotations

from typing import Final

from tests.mutants.patches import Mutant

MUTANTS: Final = (
    Mutant(
        "the free word of the last tenancy is taken",
        "engine_shim.gate",
        "        return state == STATE_FREE and epoch > self._last[slot]\n",
        "        return state == STATE_FREE and epoch >= self._last[slot]\n",
        ("simulator",),
    ),
    Mutant(
        "a word that says held is taken",
        "engine_shim.gate",
        "        return state == STATE_FREE and epoch > self._last[slot]\n",
        "        return epoch > self._last[slot] or state > STATE_FREE\n",
        ("simulator",),
    ),
)
