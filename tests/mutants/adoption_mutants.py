"""Known-bad versions of the life after a death."""

from __future__ import annotations

from typing import Final

from tests.mutants.patches import Mutant

ADOPTION: Final = "kvd.core.adoption"
POOL_OPS: Final = "kvd.core.pool_ops"
CAUGHT: Final = ("simulator", "adoption by example")

MUTANTS: Final = (
    Mutant(
        "blocks of the last life are free before its members came back",
        ADOPTION,
        "    if not m.inherited_blocks or m.absent:\n",
        "    if not m.inherited_blocks:\n",
        CAUGHT,
    ),
    Mutant(
        "announced saves into blocks of the last life are not waited for",
        ADOPTION,
        "            m.inherited_saves.add(slot.ref)\n",
        "            pass\n",
        CAUGHT,
    ),
    Mutant(
        "a block that was being filled is free in the next life",
        ADOPTION,
        "    m.inherited_blocks.extend(held)\n",
        "    for block in held:\n"
        "        table.poison(block)\n"
        "        table.unpin(block, LAST_LIFE)\n"
        "    flush(m, out)\n",
        CAUGHT,
    ),
    Mutant(
        "a poisoned block is free in the next life",
        POOL_OPS,
        "        out.append(MarkVoid(kept))\n",
        "        out.append(ClearHeaders(kept))\n",
        CAUGHT,
    ),
    Mutant(
        "a region of an engine that died meanwhile is kept",
        ADOPTION,
        "                region.dropped = True\n        free_dropped(m, out)\n",
        "                region.dropped = False\n        free_dropped(m, out)\n",
        ("adoption by example",),
    ),
)
