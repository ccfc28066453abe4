"""copy_sfa: what is refused first, then the ordered form bit for bit, the other within bounds."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvd_kernels import rows_reference
from kvd_kernels.rows import (
    NOTHING,
    HoleError,
    SparseAttention,
    place_of_miss,
    row_kernels,
)
from kvd_kernels.rows_reference import TOLERANCE
from tests.kernels.rows_world import Lists, Shape, World

KERNELS = row_kernels()

Floats = NDArray[np.float32]


def rows_of(draw: np.random.Generator, count: int, size: int, element: str) -> NDArray[np.uint8]:
    """Rows of normal numbers: [count, bytes]."""
    values = draw.standard_normal((count, size)).astype(np.float32)
    if element == "bfloat16":
        halves = (values.view(np.uint32) >> 16).astype(np.uint16)
        return halves.view(np.uint8).reshape(count, -1)
    return values.view(np.uint8).reshape(count, -1)


@dataclass(frozen=True)
class Case:
    """One batch over a world of rows.

    hits, misses: selected rows of each query that are in the hot buffer, and that are not.
    """

    shape: Shape
    element: str
    latent: int
    batch: int = 2
    queries: int = 2
    heads: int = 3
    hits: int = 5
    misses: int = 3
    seed: int = 1

    @property
    def row_floats(self) -> int:
        """Elements of a row."""
        return sum(self.shape.part_bytes) // (2 if self.element == "bfloat16" else 4)


class Bench:
    """A case made: the arrays of both sides, and the objects over them."""

    def __init__(self, case: Case, kernel: str = "auto", threads: int = 2) -> None:
        draw = np.random.default_rng(case.seed)
        self.case = case
        self.world = World(case.shape, kernel, seed=case.seed)
        self.world.write(case.shape.tokens_max)
        self._fill(draw)
        b, p = case.batch, case.queries
        k, m = case.hits + case.misses + 2, max(1, 2 * case.misses)
        self.queries = draw.standard_normal((b, p, case.heads, case.row_floats)).astype(np.float32)
        self.items = np.array([[b - 1 - i, p, m] for i in range(b)], np.int32)
        self.positions = draw.integers(0, case.shape.tokens_max, (b, m), dtype=np.int32)
        self.slots = np.empty((b, m), np.int32)
        self.places = np.full((b, p, k), NOTHING, np.int32)
        slots_end = case.shape.num_slots + case.shape.scratch_rows
        for item in range(b):
            slots = draw.permutation(slots_end)
            self.slots[item] = slots[:m]
            for query in range(p):
                hits = draw.choice(slots[m:], case.hits, replace=False)
                missing = [place_of_miss(int(n)) for n in draw.choice(m, case.misses)]
                chosen = draw.permutation([*hits, *missing, NOTHING, NOTHING])
                self.places[item, query] = chosen
        self.output = np.full((b, p, case.heads, case.latent), 7.0, np.float32)
        self.twin_output = self.output.copy()
        self.native = self.attention(self.places, self.output, threads)
        self.reference = rows_reference.SparseAttention(
            self.world.reference, self.queries, self.places, self.items, self.positions,
            self.slots, self.twin_output, case.element, case.row_floats**-0.5,
        )  # fmt: skip

    def attention(
        self, places: NDArray[np.int32], output: Floats, threads: int = 2
    ) -> SparseAttention:
        """The native operation over some places."""
        return SparseAttention(
            self.world.copier,
            queries=self.queries,
            places=places,
            items=self.items,
            positions=self.positions,
            slots=self.slots,
            output=output,
            element=self.case.element,
            scale=self.case.row_floats**-0.5,
            threads=threads,
        )

    def _fill(self, draw: np.random.Generator) -> None:
        """Put numbers into region and hot buffers, the same on both sides."""
        width = 2 if self.case.element == "bfloat16" else 4
        for mine, other in zip(self.world.memory, self.world.twin, strict=True):
            floats = len(mine) // width
            mine[: floats * width] = rows_of(draw, 1, floats, self.case.element)[0]
            other[:] = mine

    def resident(self, layer: int) -> Floats:
        """What the same kernel gives when every selected row is resident, in the same order."""
        places = self.places.copy()
        for item, (request, _, misses) in enumerate(self.items):
            rows = self.world.rows(
                Lists(self.positions[item, :misses].tolist(), self.slots[item, :misses].tolist())
            )
            self.world.copier.gather(rows, int(request), layer, int(misses))
            missing = places[item] <= place_of_miss(0)
            places[item][missing] = self.slots[item][place_of_miss(0) - places[item][missing]]
        before = self.items.copy()
        self.items[:, 2] = 0
        output = np.full_like(self.output, 3.0)
        self.attention(places, output, 1).attend(layer, self.case.batch, ordered=True)
        self.items[:] = before
        return output

    def bound(self) -> float:
        """The largest difference that rounding may make."""
        width = self.case.element
        largest = max(
            float(np.abs(rows_reference.widen(memory[: len(memory) // 4 * 4], width)).max())
            for memory in self.world.memory
        )
        return TOLERANCE * largest


SMALL = Case(Shape(part_bytes=(64, 16), num_slots=24, gap=16), "bfloat16", 32)
TILES = Case(
    Shape(part_bytes=(1152,), blocks=120, blocks_max=40, block_tokens=16, num_slots=300, gap=64),
    "bfloat16",
    512,
    heads=5,
    hits=150,
    misses=70,
)


# --- refusals -------------------------------------------------------------------------------------


def refused(bench: Bench, kind: type[Exception], text: str) -> None:
    for ordered in (False, True):
        with pytest.raises(kind, match=text):
            bench.native.attend(0, 2, ordered=ordered)
        with pytest.raises(kind):
            bench.reference.attend(0, 2, ordered=ordered)
    assert (bench.output == 7).all()
    assert bench.world.same()


def test_miss_that_was_never_written_is_refused() -> None:
    bench = Bench(SMALL)
    bench.world.write(9)
    bench.positions[:] = 8
    bench.positions[1, 2] = 9
    refused(bench, HoleError, "row 2: position 9 of request 0 layer 0 was never written: 9 rows")


def test_place_that_is_overwritten_is_refused() -> None:
    bench = Bench(SMALL)
    bench.places[1, 1, 0] = bench.slots[1, 2]
    refused(bench, ValueError, r"item 1: place \d+ of query 1 is a slot that a miss is copied to")


@pytest.mark.parametrize("place", [27, 2**31 - 1])
def test_place_that_is_no_slot_is_refused(place: int) -> None:
    bench = Bench(SMALL)
    bench.places[1, 0, 1] = place
    refused(bench, IndexError, f"item 1: place {place} of query 0 is no slot: there are 27")


@pytest.mark.parametrize("number", [6, 2**31 - 2])
def test_place_that_is_no_miss_is_refused(number: int) -> None:
    bench = Bench(SMALL)
    bench.places[0, 0, 1] = place_of_miss(number)
    refused(bench, IndexError, f"item 0: place -{number + 2} of query 0 is miss {number} of 6")


def test_slot_of_two_misses_is_refused() -> None:
    bench = Bench(SMALL)
    bench.slots[0, 3] = bench.slots[0, 1]
    refused(bench, ValueError, "item 0: slot .* is given to two misses")


def test_miss_without_a_position_is_refused() -> None:
    bench = Bench(SMALL)
    bench.positions[1, 0] = -1
    refused(bench, ValueError, "item 1: a miss has no position")


@pytest.mark.parametrize(
    ("field", "value", "kind", "text"),
    [
        (0, 3, IndexError, "request is 3"),
        (0, 1, ValueError, "item 1: request 1 is in the batch already"),
        (1, 3, ValueError, "item 1: query positions is 3 but must be 0 to 2"),
        (1, -1, ValueError, "item 1: query positions is -1"),
        (2, 7, ValueError, "item 1: misses is 7 but must be 0 to 6"),
        (2, -1, ValueError, "item 1: misses is -1"),
    ],
)
def test_item_that_cannot_be_is_refused(
    field: int, value: int, kind: type[Exception], text: str
) -> None:
    bench = Bench(SMALL)
    bench.items[1, field] = value
    refused(bench, kind, text)


def test_batch_and_layer_have_limits() -> None:
    bench = Bench(SMALL)
    with pytest.raises(ValueError, match="batch is 3 but must be 0 to 2"):
        bench.native.attend(0, 3)
    with pytest.raises(IndexError, match="layer is 2"):
        bench.native.attend(2, 1)
    bench.native.attend(0, 0)
    assert (bench.output == 7).all()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"element": "fp8"}, "element is fp8"),
        ({"element": "int4"}, "element is 'int4' but must be float32, bfloat16 or fp8"),
        ({"scale": 0.0}, "scale is 0.0* but must be above 0"),
        ({"scale": float("nan")}, "scale is .*nan"),
        ({"threads": 3}, "threads is 3"),
        ({"output": np.zeros((2, 2, 3, 41), np.float32)}, "latent is 41 but must be 1 to 40"),
        ({"output": np.zeros((2, 2, 4, 32), np.float32)}, "output has 4 items in dimension 2"),
        ({"queries": np.zeros((2, 2, 3, 41), np.float32)}, "queries have 41 elements for rows of"),
        ({"slots": np.zeros((2, 5), np.int32)}, "slots has 5 items in dimension 1 but must have 6"),
    ],
)
def test_arguments_that_do_not_fit(changed: dict[str, object], text: str) -> None:
    bench = Bench(SMALL)
    arguments = {
        "queries": bench.queries, "places": bench.places, "items": bench.items,
        "positions": bench.positions, "slots": bench.slots, "output": bench.output,
        "element": "bfloat16", "scale": 1.0, **changed,
    }  # fmt: skip
    with pytest.raises(ValueError, match=text):
        SparseAttention(bench.world.copier, **arguments)  # type: ignore[arg-type]


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", [SMALL, TILES], ids=["small", "tiles"])
def test_ordered_is_bit_equal_to_resident(case: Case, kernel: str, threads: int) -> None:
    bench = Bench(case, kernel, threads)
    bench.native.attend(1, case.batch, ordered=True)
    copied = [memory.copy() for memory in bench.world.memory]
    assert bench.output.tobytes() == bench.resident(1).tobytes()
    assert all(np.array_equal(a, b) for a, b in zip(copied, bench.world.memory, strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", [SMALL, TILES], ids=["small", "tiles"])
def test_overlapped_is_within_the_tolerance_of_ordered(
    case: Case, kernel: str, threads: int
) -> None:
    bench = Bench(case, kernel, threads)
    bench.native.attend(1, case.batch)
    found = bench.output.copy()
    np.testing.assert_allclose(found, bench.resident(1), rtol=0, atol=bench.bound())
    assert bench.native.statistics().misses == bench.positions.size


@pytest.mark.parametrize("kernel", KERNELS)
def test_overlapped_is_the_same_each_time(kernel: str) -> None:
    """Which thread copies a row changes nothing: rows are attended to in one order."""
    bench = Bench(TILES, kernel)
    found = set()
    for _ in range(10):
        for number in range(0, len(bench.world.memory), 2):
            bench.world.memory[number + 1][:] = bench.world.twin[number + 1]
        bench.native.attend(0, 2)
        found.add(bench.output.tobytes())
    assert len(found) == 1


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    """Draw a case: parts of rows, widths that are no multiple of a vector, misses from none on."""
    element = draw(st.sampled_from(("float32", "bfloat16")))
    width = 2 if element == "bfloat16" else 4
    parts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    shape = Shape(
        part_bytes=tuple(width * floats for floats in parts),
        num_slots=draw(st.integers(65, 90)),
        gap=draw(st.sampled_from((0, 8, 64))),
    )
    hits, misses = draw(
        st.sampled_from(((0, 0), (0, 1), (1, 0), (0, 17), (20, 0), (13, 9), (33, 16)))
    )
    return Case(
        shape, element, draw(st.integers(1, sum(parts))), draw(st.integers(1, 3)),
        draw(st.integers(1, 3)), draw(st.integers(1, 9)), hits, misses, draw(st.integers(1, 99)),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_batch_is_as_defined(kernel: str) -> None:
    @settings(max_examples=60, deadline=None)
    @given(any_case(), st.booleans())
    def check(case: Case, ordered: bool) -> None:
        bench = Bench(case, kernel)
        bench.native.attend(1, case.batch, ordered=ordered)
        bench.reference.attend(1, case.batch, ordered=ordered)
        np.testing.assert_allclose(bench.output, bench.twin_output, rtol=0, atol=bench.bound())
        assert bench.world.same()
        if ordered:
            assert bench.output.tobytes() == bench.resident(1).tobytes()

    check()


def test_a_query_that_selects_nothing_gets_zeros() -> None:
    bench = Bench(SMALL)
    bench.places[0, 1] = NOTHING
    bench.native.attend(0, 1)
    assert not bench.output[0, 1].any()
    assert bench.output[0, 0].any()
    assert (bench.output[1] == 7).all()


def test_large_scores_do_not_overflow() -> None:
    bench = Bench(SMALL)
    bench.queries *= 1e4
    bench.native.attend(0, 2)
    bench.reference.attend(0, 2)
    np.testing.assert_allclose(bench.output, bench.twin_output, rtol=1e-3, atol=1e-3)


def test_a_row_that_is_no_number_spoils_its_query() -> None:
    bench = Bench(SMALL)
    part = bench.world.parts(bench.world.memory)[0]
    slot = next(place for place in bench.places[0, 0].tolist() if place >= 0)
    request = int(bench.items[0, 0])
    bench.world.reference.hot_row(part, request, 0, slot)[:] = 0  # of the twin
    native = rows_reference.RowCopier(
        bench.world.twin_tables, bench.world.parts(bench.world.memory), 24, 3
    )
    native.hot_row(part, request, 0, slot)[:2] = (0xC0, 0x7F)  # a bf16 NaN
    bench.native.attend(0, 2)
    assert np.isnan(bench.output[0, 0, :, 0]).all()


def test_attentions_of_two_threads_share_one_copier() -> None:
    benches = [Bench(TILES, threads=2) for _ in range(2)]
    expected = [bench.resident(0) for bench in benches]

    def run(bench: Bench) -> None:
        for _ in range(5):
            bench.native.attend(0, 2, ordered=True)

    threads = [threading.Thread(target=run, args=(bench,)) for bench in benches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for bench, wanted in zip(benches, expected, strict=True):
        assert bench.output.tobytes() == wanted.tobytes()
