"""admit, invalidate_from and reset on the device: refusals first, then beside the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvd_kernels.residency_reference import Table
from tests.capabilities import need_module
from tests.triton.twins import CPU, assert_same_table, ints, placed_by

need_module("triton", "python3 .ci/environment.py triton, then use the Python it names")
from kvd_kernels.triton_ops import residency  # noqa: E402

CONTEXT = 3000

# --- refusals -------------------------------------------------------------------------------------


def test_arguments_that_do_not_fit() -> None:
    tables = residency.make_tables(2, 4, 32, CPU)
    with pytest.raises(ValueError, match=r"starts must be \[2\] of int32, not \[1\] of int32"):
        residency.admit(tables, ints([0]), ints([1, 1]))
    with pytest.raises(ValueError, match=r"ends must be \[2\] of int32, not \[2\] of float32"):
        residency.admit(tables, ints([0, 0]), torch.ones(2))
    with pytest.raises(ValueError, match="block is 5 but must be a power of two"):
        residency.admit(tables, ints([0, 0]), ints([1, 1]), block=5)
    with pytest.raises(ValueError, match=r"positions must be \[2\] of int32, not \[3\]"):
        residency.invalidate_from(tables, ints([0, 0, 0]))
    with pytest.raises(IndexError, match="table is 2 but must be 0 to 1"):
        residency.reset(tables, 2)
    for number in range(2):
        assert_same_table(residency, tables, number, Table(4))


# --- against the definition -----------------------------------------------------------------------


class Twins:
    """Two tables of the device and their definitions; every method acts on both and compares."""

    def __init__(self, slots: int) -> None:
        self.tables = residency.make_tables(2, slots, CONTEXT, CPU)
        self.defined = [Table(slots), Table(slots)]
        self.out = residency.make_placement(2, 64, CPU)

    def compare(self) -> None:
        for number, table in enumerate(self.defined):
            assert_same_table(residency, self.tables, number, table)

    def begin_step(self) -> None:
        residency.begin_step(self.tables)
        for table in self.defined:
            table.begin_step()

    def admit(self, starts: list[int], ends: list[int], block: int = 32) -> None:
        residency.admit(self.tables, ints(starts), ints(ends), block=block)
        for table, start, end in zip(self.defined, starts, ends, strict=True):
            table.admit(start, end)
        self.compare()

    def invalidate_from(self, positions: list[int]) -> None:
        residency.invalidate_from(self.tables, ints(positions))
        for table, position in zip(self.defined, positions, strict=True):
            table.invalidate_from(position)
        self.compare()

    def reset(self, number: int) -> None:
        residency.reset(self.tables, number)
        self.defined[number].reset()
        self.compare()

    def assign(self, misses: list[list[int]]) -> None:
        lines = [line + [-1] * (64 - len(line)) for line in misses]
        counts = ints([len(line) for line in misses])
        residency.assign(self.tables, ints([0, 1]), ints(lines), counts, self.out, block=64)
        for number, table in enumerate(self.defined):
            wanted = table.assign(np.array(misses[number], np.int32))
            found = placed_by(misses[number], self.out, number)
            assert found.places.tolist() == wanted.places.tolist()
            assert found.loads == wanted.loads
            assert found.scratch == wanted.scratch
        self.compare()


def test_fewer_slots_than_rows() -> None:
    twins = Twins(slots=3)
    twins.admit([0, 0], [7, 3])
    twins.begin_step()
    twins.admit([5, 14], [9, 14])


def test_older_row_whose_slot_a_newer_one_took() -> None:
    twins = Twins(slots=2)
    twins.assign([[10, 11], [11, 12]])
    twins.begin_step()
    twins.admit([10, 11], [14, 14])


def test_rows_admitted_where_all_have_a_chance() -> None:
    twins = Twins(slots=40)
    twins.assign([list(range(40)), list(range(40))])
    twins.begin_step()
    twins.assign([list(range(40)), list(range(0, 40, 3))])  # hits now
    twins.begin_step()
    twins.assign([[3, 5], [5]])
    twins.admit([100, 100], [109, 114])
    twins.admit([104, 104], [110, 116])


def test_one_buffer_for_many_requests() -> None:
    twins = Twins(slots=5)
    for request in range(20):
        twins.admit([request, 7], [request + 4, 9])
        twins.reset(request % 2)


def test_edges_of_invalidation() -> None:
    twins = Twins(slots=40)
    twins.assign([list(range(0, 3000, 80)), list(range(2000, 2060, 2))])
    for positions in ([3000, 5000], [2960, 2059], [2048, 2047], [2047, 2001], [1, 0], [0, 0]):
        twins.invalidate_from(positions)


@pytest.mark.parametrize("slots", [1, 16, 50])
def test_generated_steps(slots: int) -> None:
    draw = np.random.default_rng(slots)
    twins = Twins(slots)
    for _ in range(10):
        twins.begin_step()
        starts = draw.integers(0, CONTEXT - 14, 2)
        twins.admit(starts.tolist(), (starts + draw.integers(0, 15, 2)).tolist())
        drawn = [np.unique(draw.integers(0, CONTEXT, 40)), np.arange(starts[1], starts[1] + 20)]
        twins.assign([line[line < CONTEXT].tolist() for line in drawn])
        if draw.random() < 0.5:
            twins.invalidate_from(draw.integers(0, CONTEXT + 9, 2).tolist())
        if draw.random() < 0.2:
            twins.reset(int(draw.integers(0, 2)))
