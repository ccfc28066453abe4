"""Selections step after step: drawn ones with a known overlap, and recorded ones.

A drawn selection keeps a share of the last one. What it does not keep, it takes mostly from a pool
of positions that were selected before, else from anywhere: so a hot buffer hits what it should.

A recorded trace is a file of one request:

    .npz   "selections": int32 [steps, queries, k], -1 for padding; "context": tokens
    .json  {"context": tokens, "selections": [[[position, ...] of a query, ...] of a step, ...]}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

POOL: Final = 3  # size of the pool, in selections
ANYWHERE: Final = 0.3  # share of what is new that is drawn from the whole context
NEIGHBOUR_OVERLAP: Final = 0.92  # of a step's queries with the one before


class DrawnTrace:
    """The selections of one request and layer, ascending."""

    def __init__(self, context: int, k: int, overlap: float, seed: int) -> None:
        """Draw from a context of so many tokens."""
        self._context, self._k, self._overlap = context, k, overlap
        self._draw = np.random.default_rng(seed)
        self._pool = self._draw.integers(0, context, POOL * k, dtype=np.int32)
        self._last = self._next(np.empty(0, np.int32), 0.0)

    def settled(self, slots: int) -> list[Ints]:
        """Return selections after which a buffer is full and holds what it would after long."""
        far = [
            self._draw.integers(0, self._context, self._k, dtype=np.int32)
            for _ in range(-(-slots // self._k))
        ]
        near = [*np.split(self._pool, POOL), self._last]
        return [np.unique(some) for some in (*far, *near)]

    def step(self, queries: int = 1) -> list[Ints]:
        """Return what each query of the next step selects."""
        selections = []
        for query in range(queries):
            overlap = self._overlap if query == 0 else NEIGHBOUR_OVERLAP
            self._last = self._next(self._last, overlap)
            selections.append(self._last)
        replaced = self._draw.integers(0, len(self._pool), self._k // 16)
        self._pool[replaced] = self._draw.choice(self._last, len(replaced))
        return selections

    def _next(self, last: Ints, overlap: float) -> Ints:
        kept = last[self._draw.random(len(last)) < overlap]
        chosen = kept
        while len(chosen) < self._k:
            missing = self._k - len(chosen)
            new = self._draw.choice(self._pool, missing)
            far = self._draw.random(missing) < ANYWHERE
            new[far] = self._draw.integers(0, self._context, int(far.sum()), dtype=np.int32)
            chosen = np.union1d(chosen, new)
        return chosen.astype(np.int32)


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """The selections of one request and layer, as they were recorded."""

    context: int
    steps: Sequence[Sequence[Ints]]


def load_trace(path: Path) -> RecordedTrace:
    """Read a recorded trace. Raises: ValueError for a position outside its context, or none."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as stored:
            context, rows = int(stored["context"]), stored["selections"].astype(np.int32)
        steps = [[row[row >= 0] for row in step] for step in rows]
    else:
        read = json.loads(path.read_text(encoding="utf-8"))
        context = int(read["context"])
        steps = [[np.array(row, np.int32) for row in step] for step in read["selections"]]
    for step in steps:
        for row in step:
            if len(row) and not 0 <= int(row.min()) <= int(row.max()) < context:
                raise ValueError(f"{path} selects a position outside its context of {context}")
    if not steps:
        raise ValueError(f"{path} has no steps; record one at least")
    return RecordedTrace(context, steps)
