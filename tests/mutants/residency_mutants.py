"""Ways to break residency: its definition, which the native tables are held against, and the glue.

The native code is not edited: a mutant of the definition must differ from it, too.
"""

from __future__ import annotations

from typing import Final

from tests.mutants.patches import Mutant

REFERENCE: Final = "kvd_kernels.residency_reference"
NATIVE: Final = "engine_shim.hot_native"
BOTH: Final = ("residency operations", "residency machine")
CLOCK: Final = ("residency operations", "residency victims")

MUTANTS: Final = (
    Mutant(
        "a row that was evicted is still found",
        REFERENCE,
        "        found = np.flatnonzero(self.tokens == position)\n",
        "        past = self.__dict__.setdefault('past', {})\n"
        "        past.update({int(it): [at] for at, it in enumerate(self.tokens) if it >= 0})\n"
        "        found = past.get(position, [])\n",
        BOTH,
    ),
    Mutant(
        "a victim may be what this step selects",
        REFERENCE,
        "            if self.stamps[slot] == self.step:\n",
        "            if slot < 0:\n",
        BOTH,
    ),
    Mutant(
        "a slot that was hit has no second chance",
        REFERENCE,
        "            if not self.chances[slot]:\n",
        "            if slot >= 0:\n",
        CLOCK,
    ),
    Mutant(
        "a chance lasts for ever",
        REFERENCE,
        "            self.chances[slot] = False\n        return ABSENT",
        "        return ABSENT",
        CLOCK,
    ),
    Mutant(
        "what is put into a slot starts with a chance",
        REFERENCE,
        "        self.stamps[slot], self.chances[slot] = self.step, False\n",
        "        self.stamps[slot], self.chances[slot] = self.step, True\n",
        CLOCK,
    ),
    Mutant(
        "what is hit is not in use",
        REFERENCE,
        "                self._hit(slot)\n            elif",
        "                pass\n            elif",
        BOTH,
    ),
    Mutant(
        "reset leaves the rows of the request before",
        REFERENCE,
        "        self.tokens[:], self.stamps[:], self.chances[:] = ABSENT, 0, False\n",
        "",
        BOTH,
    ),
    Mutant(
        "two rows get one slot",
        REFERENCE,
        "            return self._free.pop()\n",
        "            return self._free[-1]\n",
        BOTH,
    ),
    Mutant(
        "a row that the step writes is missed",
        REFERENCE,
        "            slot = ABSENT if position in self.fresh else self._take_slot()\n",
        "            slot = self._take_slot()\n",
        ("residency operations",),
    ),
    Mutant(
        "a rejected row stays resident",
        REFERENCE,
        "            self.tokens[slot] = ABSENT\n",
        "",
        BOTH,
    ),
    Mutant(
        "of equal scores the later position is selected",
        REFERENCE,
        '    best_first = np.argsort(-ranked, kind="stable")\n',
        '    best_first = len(ranked) - 1 - np.argsort(-ranked[::-1], kind="stable")\n',
        ("residency search", "residency machine"),
    ),
    Mutant(
        "NaN is the best of all scores",
        REFERENCE,
        "np.float32(-np.inf), scores)",
        "np.float32(np.inf), scores)",
        ("residency search",),
    ),
    Mutant(
        "references lead to the wrong miss",
        REFERENCE,
        "        found = np.searchsorted(distinct, ~codes)\n",
        '        found = np.searchsorted(distinct, ~codes, side="right")\n',
        BOTH,
    ),
    Mutant(
        "native books are not emptied",
        NATIVE,
        "        self._tables.reset(self._table)\n",
        "        assert self._tables\n",
        ("native books",),
    ),
    Mutant(
        "native books keep rejected rows",
        NATIVE,
        "min(position, self._tables.positions_max)",
        "self._tables.positions_max",
        ("native books",),
    ),
    Mutant(
        "native books forget the last row of a long selection",
        NATIVE,
        "        num_rows = max(1, -(-end // CHOSEN_MAX))\n",
        "        num_rows = max(1, end // CHOSEN_MAX)\n",
        ("native books",),
    ),
)
