"""assign on the device: refusals first, then steps of several tables against their definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvd_kernels.residency_reference import Placed, Table
from tests.capabilities import need_module
from tests.triton.twins import CPU, assert_same_table, ints, placed_by, upload

need_module("triton", "python3 .ci/environment.py triton, then use the Python it names")
from kvd_kernels.triton_ops import residency  # noqa: E402

CONTEXT = 300


def assert_same(found: Placed, wanted: Placed) -> None:
    assert found.places.tolist() == wanted.places.tolist()
    assert found.loads == wanted.loads
    assert found.scratch == wanted.scratch


class Twins:
    """Tables of the device and their definitions; every method acts on both and compares."""

    def __init__(self, slots: int, num_tables: int = 1, width: int = 128, block: int = 64) -> None:
        self.tables = residency.make_tables(num_tables, slots, CONTEXT, CPU)
        self.defined = [Table(slots) for _ in range(num_tables)]
        self.out = residency.make_placement(num_tables, width, CPU)
        self.width, self.block = width, block

    def begin_step(self) -> None:
        residency.begin_step(self.tables)
        for table in self.defined:
            table.begin_step()

    def assign(self, misses: list[list[int]]) -> None:
        """Place a line of misses for each table, the last table first."""
        order = list(reversed(range(len(self.defined))))
        lines = [misses[number] + [-1] * (self.width - len(misses[number])) for number in order]
        counts = [len(misses[number]) for number in order]
        residency.assign(
            self.tables, ints(order), ints(lines), ints(counts), self.out, block=self.block
        )
        for line, number in enumerate(order):
            wanted = self.defined[number].assign(np.array(misses[number], np.int32))
            assert_same(placed_by(misses[number], self.out, line), wanted)
            assert set(self.out.places[line, counts[line] :].tolist()) <= {-1}
            assert_same_table(residency, self.tables, number, self.defined[number])

    def upload(self) -> None:
        """Carry over what was done to the definitions alone."""
        for number, table in enumerate(self.defined):
            upload(residency, self.tables, number, table)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("misses", ints([1, 2]), r"misses must be \[any, any\] of int32, not \[2\] of int32"),
        ("misses", ints([[], []]), "the length of a line of misses is 0 but must be 1 to 57344"),
        ("counts", ints([1]), r"counts must be \[2\] of int32"),
        ("table_of", torch.zeros(2), r"table_of must be \[2\] of int32, not \[2\] of float32"),
        ("out", residency.make_placement(2, 9, CPU), r"places must be \[2, 8\] of int32"),
        ("block", 100, "block is 100 but must be a power of two"),
    ],
)
def test_arguments_that_do_not_fit(name: str, value: object, text: str) -> None:
    tables = residency.make_tables(2, 4, 32, CPU)
    fitting: dict[str, object] = {
        "table_of": ints([0, 1]),
        "misses": torch.zeros(2, 8, dtype=torch.int32),
        "counts": ints([0, 0]),
        "out": residency.make_placement(2, 8, CPU),
        "block": 64,
    }
    with pytest.raises(ValueError, match=text):
        residency.assign(tables, **{**fitting, name: value})  # type: ignore[arg-type]
    assert not tables.stamps.any()


def test_room_for_no_misses() -> None:
    with pytest.raises(ValueError, match="misses is 0 but must be 1 to 57344"):
        residency.make_placement(1, 0, CPU)


# --- against the definition -----------------------------------------------------------------------


def test_empty_slots_first_then_victims_then_scratch() -> None:
    twins = Twins(slots=8)
    twins.assign([[5, 6, 7]])
    twins.begin_step()
    twins.assign([list(range(20, 40))])
    assert twins.out.figures[0].tolist() == [8, 12]


def test_what_has_a_slot_keeps_it() -> None:
    twins = Twins(slots=4)
    twins.assign([[1, 3, 5, 7]])
    twins.begin_step()
    twins.assign([[2, 3, 4, 7]])
    twins.assign([[2, 3, 4, 7]])
    assert twins.out.figures[0].tolist() == [0, 0]


@pytest.mark.parametrize("slots", [1, 2, 63, 64, 65])
def test_hand_goes_round(slots: int) -> None:
    twins = Twins(slots)
    for start in range(0, 250, 61):
        twins.begin_step()
        twins.assign([list(range(start, start + slots // 2 + 1))])


@pytest.mark.parametrize(("slots", "block"), [(5, 64), (64, 32), (90, 32)])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_second_round_takes_what_had_a_chance(slots: int, block: int, share: float) -> None:
    """All that were hit have one: fewer are left than are wanted, then none."""
    draw = np.random.default_rng(slots)
    twins = Twins(slots, block=block)
    twins.assign([list(range(slots))])
    for new in (100, 200):
        twins.begin_step()
        resident = twins.defined[0].tokens
        twins.defined[0].lookup(resident[draw.random(slots) < share])
        twins.begin_step()
        twins.defined[0].lookup(twins.defined[0].tokens[:2])
        twins.upload()
        twins.assign([list(range(new, new + slots - slots // 5))])


def test_no_misses_change_nothing() -> None:
    twins = Twins(slots=4, num_tables=2)
    twins.assign([[], [9]])
    twins.begin_step()
    twins.assign([[], []])


def test_rows_of_this_step_are_not_resident_for_it() -> None:
    twins = Twins(slots=2)
    twins.assign([[0, 1]])
    twins.begin_step()
    twins.defined[0].lookup(np.array([0, 1], np.int32))
    twins.defined[0].admit(100, 104)
    twins.upload()
    twins.assign([[50, 100, 101, 103]])
    assert twins.out.figures[0].tolist() == [0, 4]


def test_rows_of_this_step_go_to_scratch_though_there_are_slots() -> None:
    twins = Twins(slots=2)
    twins.assign([[60, 61]])
    twins.begin_step()
    twins.defined[0].lookup(np.array([60, 61], np.int32))
    twins.defined[0].admit(50, 54)
    twins.defined[0].invalidate_from(60)
    twins.upload()
    twins.assign([[49, 50, 51, 53, 54]])
    assert twins.out.scratch[0, :3].tolist() == [50, 51, 53]


@pytest.mark.parametrize(("seed", "block"), [(0, 32), (1, 32), (2, 256), (3, 256)])
def test_generated_steps(seed: int, block: int) -> None:
    draw = np.random.default_rng(seed)
    twins = Twins(slots=int(draw.integers(1, 90)), num_tables=2, block=block)
    for _ in range(8):
        twins.begin_step()
        for table in twins.defined:
            action = draw.integers(0, 4)
            if action == 0:
                table.invalidate_from(int(draw.integers(0, CONTEXT)))
            if action == 1:
                start = int(draw.integers(0, CONTEXT - 14))
                table.admit(start, start + int(draw.integers(0, 14)))
            if action == 2:
                table.lookup(draw.integers(0, CONTEXT, 50).astype(np.int32))
        twins.upload()
        lines = [
            sorted(draw.permutation(CONTEXT)[: draw.integers(0, twins.width)].tolist())
            for _ in twins.defined
        ]
        twins.assign(lines)


def test_selection_then_its_misses() -> None:
    """Both operations in a row, several steps, without a look from outside."""
    draw = np.random.default_rng(9)
    twins = Twins(slots=100, num_tables=2)
    out = residency.make_selection(2, 64, CPU)
    for _ in range(4):
        twins.begin_step()
        scores = draw.standard_normal((2, CONTEXT)).astype(np.float32)
        scores[:, :60] += 1
        lengths = ints([CONTEXT, CONTEXT])
        residency.lim(
            twins.tables, ints([0, 1]), torch.from_numpy(scores), lengths, 64, out, block=128
        )
        lines = []
        for number, table in enumerate(twins.defined):
            _, winners = table.lim(scores[number], 64)
            assert out.winners[number].tolist() == winners.tolist()
            lines.append([~code for code in winners.tolist() if code < 0])
        twins.assign(lines)
