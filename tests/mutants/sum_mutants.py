"""Ways to break the checksums of spans."""

from __future__ import annotations

from typing import Final

from tests.mutants.patches import Mutant

CAUGHT: Final = ("checksums by example",)

COPIES: Final = "kvd.core.copies"

MUTANTS: Final = (
    Mutant(
        "a failed save leaves its checksums",
        COPIES,
        "    if effect.ok and opened is not None and m.settings",
        "    if opened is not None and m.settings",
        CAUGHT,
    ),
    Mutant(
        "a save without checksums leaves those of the save before it",
        COPIES,
        '    if effect.ok and opened is not None and m.settings.checksums != "off":\n',
        "    if effect.ok and opened is not None and sums:\n",
        CAUGHT,
    ),
    Mutant(
        "a checksum covers what was announced, not what was copied",
        COPIES,
        "opened.blocks, counts or opened.tokens, sums",
        "opened.blocks, opened.tokens, sums",
        CAUGHT,
    ),
    Mutant(
        "checksums of another number of blocks are taken",
        COPIES,
        "    if event.sums and len(event.sums) != SUM_BYTES * len(save.blocks):\n",
        "    if len(event.sums) > 1 << 20:\n",
        CAUGHT,
    ),
    Mutant(
        "damage is reported only of loads that have failed altogether",
        "kvd.core.slot_ops",
        "        if event.bad:\n",
        "        if event.bad and not event.ok:\n",
        CAUGHT,
    ),
    Mutant(
        "a member may report any block as damaged",
        COPIES,
        "        if bad.block in tenancy.load_blocks:\n",
        "        if bad.block in pool_of(m).fills:\n",
        CAUGHT,
    ),
    Mutant(
        "a report of an ended tenancy counts",
        COPIES,
        "    if tenancy is None or member.slots[event.ref.slot].ref != event.ref:\n"
        "        return\n"
        "    for bad",
        "    if tenancy is None:\n        return\n    for bad",
        CAUGHT,
    ),
    Mutant(
        "any reader may report a block as damaged",
        "kvd.core.outgoing",
        "    if found.hold.executor != e.executor:\n        return\n    for bad",
        "    for bad",
        CAUGHT,
    ),
    Mutant(
        "a reader may report any block as damaged",
        "kvd.core.outgoing",
        "        if bad.block in found.spec.pool_blocks:\n",
        "        if bad.block >= 0:\n",
        CAUGHT,
    ),
    Mutant(
        "a mismatch is counted and the block served on",
        "kvd.core.pool_ops",
        "    poison_block(m, bad.block, now, where)\n",
        "",
        CAUGHT,
    ),
)
