"""Ways to break the rows of sparse decode.

The kernels are native: what is broken here is their definition, and the suites compare both, so
that each of these would be seen in a kernel as well.
"""

from __future__ import annotations

from typing import Final

from tests.mutants.patches import Mutant

REFERENCE: Final = "kvd_kernels.rows_reference"
COPIES: Final = ("row copies",)
ATTENTION: Final = ("row attention",)

MUTANTS: Final = (
    Mutant(
        "an offset in the region has 32 bits",
        REFERENCE,
        "        at += row * part.row_bytes\n        return bytes_of(part.region)",
        "        at = (at + row * part.row_bytes) % (1 << 32)\n"
        "        return bytes_of(part.region)",
        ("rows far away",),
    ),
    Mutant(
        "an offset in the hot buffers is a signed word of 32 bits",
        REFERENCE,
        "part.hot_layer_stride + slot * part.slot_stride\n",
        "part.hot_layer_stride + slot * part.slot_stride % (1 << 31)\n",
        ("rows far away",),
    ),
    Mutant(
        "a row that was never written is read",
        REFERENCE,
        "            if position >= end:\n",
        "            if position >= self.tables.tokens_max:\n",
        COPIES,
    ),
    Mutant(
        "the row at the watermark is read",
        REFERENCE,
        "            if position >= end:\n",
        "            if position > end:\n",
        COPIES,
    ),
    Mutant(
        "a row is written past a gap",
        REFERENCE,
        "            if position > end:\n",
        "            if position > self.tables.tokens_max:\n",
        COPIES,
    ),
    Mutant(
        "a tracked row that nobody wrote is read",
        REFERENCE,
        "        return self.rows is None or bool(self.rows[request, layer, position])\n",
        "        return True\n",
        COPIES,
    ),
    Mutant(
        "a rejected row stays marked",
        REFERENCE,
        "            self.rows[request, :, tokens:] = 0\n",
        "            self.rows[request, :, tokens + 1 :] = 0\n",
        COPIES,
    ),
    Mutant(
        "new rows stay unwritten",
        REFERENCE,
        "        self.tables.mark_written(request, layer, end)\n",
        "        self.tables.mark_written(request, layer, 0)\n",
        COPIES,
    ),
    Mutant(
        "rejected rows stay written",
        REFERENCE,
        "np.minimum(self.written_rows[request], tokens)",
        "self.written_rows[request]",
        COPIES,
    ),
    Mutant(
        "rows behind a block edge are taken from the block before",
        REFERENCE,
        "self.tables[request, position // self.block_tokens]",
        "self.tables[request, max(0, position - 1) // self.block_tokens]",
        COPIES,
    ),
    Mutant(
        "some rows have moved before a bad one is seen",
        REFERENCE,
        "            self.check_slot(slot)\n            places.append((block, row, slot))\n",
        "            if slot >= self.slots_end and places:\n"
        "                self.hot_row(self.parts[0], request, layer, places[0][2])[:] = 0\n"
        "            self.check_slot(slot)\n            places.append((block, row, slot))\n",
        COPIES,
    ),
    Mutant(
        "a missing row is attended to before its copy has ended",
        REFERENCE,
        "        self._copy(number, layer)\n        for query, softmax in enumerate(softmaxes):\n"
        "            missing = [place for place in self._selected(number, query) "
        "if place <= FIRST_MISS]\n",
        "        for query, softmax in enumerate(softmaxes):\n"
        "            missing = [place for place in self._selected(number, query) "
        "if place <= FIRST_MISS]\n",
        ATTENTION,
    ),
    Mutant(
        "missing rows are joined without what earlier ones are worth",
        REFERENCE,
        "        self.sums = keep * self.sums + weights.sum(axis=1)\n",
        "        self.sums = self.sums + weights.sum(axis=1)\n",
        ATTENTION,
    ),
    Mutant(
        "a slot that a miss is copied to is read as it was",
        REFERENCE,
        "                if place in slots:\n",
        "                if place in slots[:0]:\n",
        ATTENTION,
    ),
    Mutant(
        "scores reach beyond the watermark",
        REFERENCE,
        "    if tokens > written:\n",
        "    if tokens > scores.shape[1]:\n",
        ("row scores",),
    ),
)
