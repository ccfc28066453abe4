"""Tables and steps for the tests of residency, each native one beside its reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvd_kernels.residency import HotStep, HotTables, figures_of, residency_kernels
from kvd_kernels.residency_reference import Ints, Placed, Table

KERNELS = residency_kernels()
LAYOUTS = ("map", "index")

every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def array_of(view: memoryview[int], count: int | None = None) -> Ints:
    """Copy a registered array, or the first entries of it."""
    copied: Ints = np.array(np.asarray(view)[:count])
    return copied


def row_of(view: memoryview[int], row: int, count: int) -> Ints:
    """Copy the first entries of a row of a registered array."""
    copied: Ints = np.array(np.asarray(view)[row, :count])
    return copied


def as_ints(values: Sequence[int]) -> Ints:
    """Return int32s."""
    return np.array(values, dtype=np.int32)


def give(step: HotStep, selections: Sequence[Sequence[int]] | Ints) -> None:
    """Write what queries selected."""
    for query, selection in enumerate(selections):
        np.asarray(step.selection)[query, : len(selection)] = selection
        step.counts[query] = len(selection)


def placed_by(step: HotStep) -> Placed:
    """Return what `select` or `assign` wrote."""
    sizes = figures_of(step)
    loads = zip(
        step.load_positions[: sizes.loads].tolist(),
        step.load_slots[: sizes.loads].tolist(),
        strict=True,
    )
    scratch = step.scratch[: sizes.scratch].tolist()
    positions = array_of(step.positions, sizes.positions)
    return Placed(positions, array_of(step.places, sizes.positions), list(loads), scratch)


def assert_same(native: Placed, defined: Placed) -> None:
    """Both place everything alike."""
    assert native.positions.tolist() == defined.positions.tolist()
    assert native.places.tolist() == defined.places.tolist()
    assert native.loads == defined.loads
    assert native.scratch == defined.scratch


class Pair:
    """One native table and its reference; every method acts on both and compares."""

    def __init__(
        self,
        slots: int,
        *,
        kernel: str = "auto",
        layout: str = "auto",
        queries: int = 4,
        k: int = 64,
        positions_max: int = 1 << 20,
        scores: npt.NDArray[np.float32] | None = None,
    ) -> None:
        self.tables = HotTables(2, slots, positions_max, layout=layout)
        self.step = HotStep(queries, k, scores=scores, kernel=kernel)
        self.defined = Table(slots)
        self.scores = scores

    def begin_step(self) -> None:
        self.tables.begin_step(1)
        self.defined.begin_step()

    def admit(self, start: int, end: int) -> None:
        self.tables.admit(1, start, end)
        self.defined.admit(start, end)
        self.compare()

    def select(self, *selections: Sequence[int]) -> Placed:
        """Select in one call."""
        give(self.step, selections)
        num_loads = self.step.select(self.tables, 1, len(selections))
        placed = self.defined.select([as_ints(it) for it in selections])
        assert num_loads == len(placed.loads)
        assert_same(placed_by(self.step), placed)
        self.compare()
        return placed

    def lim(self, query: int, length: int, k: int) -> None:
        """Search and look up."""
        assert self.scores is not None
        num_misses = self.step.lim(self.tables, 1, query, length, k)
        positions, winners = self.defined.lim(self.scores[query, :length], k)
        count = self.step.counts[query]
        assert row_of(self.step.selection, query, count).tolist() == positions.tolist()
        assert row_of(self.step.winners, query, count).tolist() == winners.tolist()
        assert num_misses == int((winners < 0).sum())

    def invalidate_from(self, position: int) -> None:
        emptied = self.tables.invalidate_from(1, position)
        assert emptied == self.defined.invalidate_from(position)
        self.compare()

    def reset(self) -> None:
        self.tables.reset(1)
        self.defined.reset()
        self.compare()

    def compare(self) -> None:
        """Both tables hold the same rows in the same slots, and the native one is sound."""
        assert self.tables.check(1) == []
        for slot, position in enumerate(self.defined.tokens.tolist()):
            if position >= 0:
                assert self.tables.slot_of(1, position) == slot
                assert self.tables.tokens(1)[slot] == position
        num_words = np.count_nonzero(np.asarray(self.tables.cache_slots(1)))
        num_resident = np.count_nonzero(self.defined.tokens >= 0)
        if self.tables.layout == "index":
            assert num_words == num_resident
        assert num_words >= num_resident
