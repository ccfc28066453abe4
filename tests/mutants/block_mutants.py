"""Ways to break the block table."""

from __future__ import annotations

from typing import Final

from tests.mutants.patches import Mutant

BLOCKS = "kvd.core.blocks"
BOOKS = "kvd.core.block_books"
LIVES = "kvd.core.block_lives"
BLOCK_TYPES = "kvd.core.block_types"

MUTANTS: Final = (
    Mutant(
        "a span end of an earlier chunk counts",
        BLOCK_TYPES,
        "all(have == want for have in self.tokens)",
        "all(have > 0 for have in self.tokens)",
        ("block machine", "blocks by example", "simulator"),
    ),
    Mutant(
        "a commit is visible before all spans are saved",
        BLOCK_TYPES,
        "all(have == want for have in self.tokens)",
        "any(have == want for have in self.tokens)",
        ("block machine", "blocks by example"),
    ),
    Mutant(
        "a look-up returns filling blocks",
        BLOCK_TYPES,
        "        return want > 0 and all(have == want for have in self.tokens)\n",
        "        return want > 0\n",
        ("block machine", "blocks by example"),
    ),
    Mutant(
        "a commit of the same text elsewhere leaves an earlier commit standing",
        BLOCK_TYPES,
        "        self.key = None\n        self.want = 0\n",
        "        assert self.want >= 0\n",
        ("block machine", "blocks by example"),
    ),
    Mutant(
        "pins are counted, not named",
        LIVES,
        "        if pins is None or pin not in pins:\n"
        "            return\n"
        "        if len(pins) > 1:\n"
        "            self.pins[block] = pins - {pin}\n",
        "        if pins is None:\n"
        "            return\n"
        "        if len(pins) > 1:\n"
        "            self.pins[block] = frozenset(list(pins)[1:])\n",
        ("block machine", "blocks by example"),
    ),
    Mutant(
        "abort frees a block while a save into it is open",
        LIVES,
        "        if block in self.saving:\n            return\n",
        "",
        ("block machine", "blocks by example"),
    ),
    Mutant(
        "a pinned block may be evicted",
        LIVES,
        "            self.pins[block] = frozenset((pin,))\n"
        "            self.policy.withdraw(block)\n",
        "            self.pins[block] = frozenset((pin,))\n",
        ("block machine", "blocks by example"),
    ),
    Mutant(
        "a span is rewritten while it is read",
        BOOKS,
        "        if (block, layer) in self.span_readers:\n",
        "        if block < 0:\n",
        ("block machine", "blocks by example"),
    ),
    Mutant(
        "a span is rewritten while it is loaded",
        BOOKS,
        "        return any(block in taken for taken in self.span_loads.get(span, {}).values())\n",
        "        return False\n",
        ("block machine", "blocks by example"),
    ),
    Mutant(
        "rows of the next life of a block pass for those of the last",
        BOOKS,
        "        if self.lives[block] != life:\n            return False\n",
        "",
        ("block machine", "blocks by example"),
    ),
    Mutant(
        "a poisoned block is still found",
        LIVES,
        "            self.index.remove(*self.columns.drop_key(block))\n"
        "            self.policy.withdraw(block)\n",
        "            self.columns.drop_key(block)\n            self.policy.withdraw(block)\n",
        ("block machine", "blocks by example"),
    ),
    Mutant(
        "a failed save leaves its block good",
        BLOCKS,
        "            for block in blocks:\n                self.poison(block)\n",
        "            pass\n",
        ("block machine", "blocks by example"),
    ),
    Mutant(
        "a block without an owner waits for its saves for ever",
        BLOCKS,
        "            if self.state[block] == BlockState.FILLING:\n"
        "                self.poison(block)\n",
        "            self.fills[block].orphan_deadline = now + 1\n",
        ("block machine", "blocks by example"),
    ),
    Mutant(
        "a block is ready while another of its spans is being saved again",
        LIVES,
        "        if block in self.saving or not fill.is_complete():\n",
        "        if not fill.is_complete():\n",
        ("blocks by example",),
    ),
    Mutant(
        "a save of many blocks may name poisoned ones",
        BOOKS,
        "        return not dead or (len(dead) < len(blocks) and kept.issuperset(dead))\n",
        "        return not dead or len(dead) < len(blocks)\n",
        ("blocks by example",),
    ),
    Mutant(
        "a save of many blocks may name those of another request",
        BOOKS,
        "RequestKey(engine, names.pop()), set()).issuperset(blocks)\n",
        "RequestKey(engine, names.pop()), set()) is not None\n",
        ("blocks by example",),
    ),
    Mutant(
        "a save of many blocks may name some that are read",
        BOOKS,
        "            if any((block, layer) in self.span_readers for block in blocks):\n"
        "                return False\n",
        "            assert layer >= 0\n",
        ("blocks by example",),
    ),
    Mutant(
        "a save of many blocks may name some that are being saved",
        BOOKS,
        "        copies = (self.span_saves.get(span, {}), self.span_loads.get(span, {}))\n",
        "        copies = ({}, self.span_loads.get(span, {}))\n",
        ("blocks by example",),
    ),
)
