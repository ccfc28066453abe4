"""Ways to break the native steps of decode."""

from __future__ import annotations

from typing import Final

from tests.mutants.patches import Mutant

STEPS: Final = "engine_shim.hot_steps"
OPS: Final = "engine_shim.sparse_ops"
MACHINE: Final = ("native steps",)

MUTANTS: Final = (
    Mutant(
        "rows that a broken step promised are taken for resident",
        STEPS,
        "            request.books[group].reset()\n        self._hot.begin_step",
        "            pass\n        self._hot.begin_step",
        MACHINE,
    ),
    Mutant(
        "a layer attends before its rows have come",
        STEPS,
        "            request.loads.end(layer)\n",
        "            pass\n",
        MACHINE,
    ),
    Mutant(
        "copies ahead leave the last layer of a group out",
        STEPS,
        "layers if ordered else layers[1:])",
        "layers[:-1] if ordered else layers[1:])",
        MACHINE,
    ),
    Mutant(
        "the first layer waits for nobody and copies nothing",
        STEPS,
        "(self._place_scratch if ordered else self._place_misses)(",
        "self._place_scratch(",
        MACHINE,
    ),
    Mutant(
        "the scratch tile keeps the rows of the layer before",
        STEPS,
        "        ops.items[0] = (buffer, count, scratch)\n",
        "        ops.items[0] = (buffer, count, scratch)\n"
        "        ops.miss_positions[0, scratch:] = 0\n"
        "        self._scratch = self._scratch * 0\n",
        MACHINE,
    ),
    Mutant(
        "a short selection ends in places of the one before",
        STEPS,
        "            places[:number] = np.where(references >= 0, found[references], winners)\n"
        "            places[number:] = NOTHING\n",
        "            places[:number] = np.where(references >= 0, found[references], winners)\n",
        MACHINE,
    ),
    Mutant(
        "all rows of a step go to the slot of the first",
        STEPS,
        "        self._own_slots[:count] = self._winners[0, :count]\n",
        "        self._own_slots[:count] = self._winners[0, :1]\n",
        MACHINE,
    ),
    Mutant(
        "a rank that does not write the region leaves its own rows out of their slots",
        STEPS,
        "[slots[slots >= 0]] = rows[slots >= 0]",
        "[slots[slots < 0]] = rows[slots < 0]",
        MACHINE,
    ),
    Mutant(
        "the newest key has no score",
        OPS,
        "            self._scorer.score(query, request, layer, length)\n",
        "            self._scorer.score(query, request, layer, length - 1)\n",
        MACHINE,
    ),
    Mutant(
        "hits of several positions are counted each time",
        STEPS,
        "        hits = int(np.count_nonzero(self._used))\n",
        "        hits = sum(int((self._winners[query, :number] >= 0).sum())\n"
        "                   for query, number in enumerate(given))\n",
        MACHINE,
    ),
    Mutant(
        "copies that are called again copy again",
        STEPS,
        "        if self.has_run:\n            return\n",
        "",
        ("native steps by example",),
    ),
    Mutant(
        "arrays of copies that still run are written",
        STEPS,
        "        self._lists.settle((AHEAD,))\n",
        "",
        ("native steps by example",),
    ),
)
