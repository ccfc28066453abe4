"""gather and append: what is refused first, then the bytes, for every kernel, as the definition."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_kernels import rows_reference
from kvd_kernels.host import Mapping
from kvd_kernels.rows import BlockTables, HoleError, Part, RowCopier, RowList, row_kernels
from tests.kernels.rows_world import Lists, Octets, Shape, World

KERNELS = row_kernels()
GIB = 1 << 30
WRITTEN = 13

MakeRegion = Callable[..., Mapping]


@pytest.fixture
def world() -> World:
    made = World(Shape())
    made.write(WRITTEN)
    return made


# --- refusals -------------------------------------------------------------------------------------

REFUSED = [
    (Lists([0, WRITTEN], [0, 1]), 0, 0, HoleError, r"row 1: position 13 of request 0 layer 0 was"),
    (Lists([3, 0], [2, 12]), 0, 0, IndexError, "row 1: position 0 .* has slot 12, which is none"),
    (Lists([3, 0], [2, -1]), 0, 0, IndexError, "row 1: position 0 .* has slot -1"),
    (Lists([0], [0]), 3, 0, IndexError, "request is 3 but must be 0 to 2"),
    (Lists([0], [0]), -1, 0, IndexError, "request is -1"),
    (Lists([0], [0]), 0, 2, IndexError, "layer is 2 but must be 0 to 1"),
    (Lists([0], [0]), 0, -1, IndexError, "layer is -1"),
]


@pytest.mark.parametrize(("lists", "request_", "layer", "kind", "text"), REFUSED)
def test_gather_refuses_and_moves_nothing(
    world: World, lists: Lists, request_: int, layer: int, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        world.copier.gather(world.rows(lists), request_, layer, len(lists.positions))
    with pytest.raises(kind):
        world.reference.gather(lists.positions, lists.slots, request_, layer)
    assert world.unchanged()
    assert world.same()


@pytest.mark.parametrize("block", [-1, 12, 2**31 - 1])
def test_block_outside_the_region_is_refused(world: World, block: int) -> None:
    world.table[0, 2] = block
    with pytest.raises(IndexError, match=f"position 8 of request 0 is in block {block}, which is"):
        world.copier.gather(world.rows(Lists([0, 8], [0, 1])), 0, 0, 2)
    assert world.unchanged()


def test_watermark_beyond_the_table_reads_nothing_outside(world: World) -> None:
    world.marks[0, 0] = 1 << 40
    with pytest.raises(IndexError, match="position 16 is outside the 16 tokens"):
        world.copier.gather(world.rows(Lists([16], [0])), 0, 0, 1)


def test_count_beyond_the_list_is_refused(world: World) -> None:
    for count in (3, -1):
        with pytest.raises(ValueError, match=f"count is {count} but must be 0 to 2"):
            world.copier.gather(world.rows(Lists([0], [0])), 0, 0, count)


def test_append_behind_a_gap_is_refused(world: World) -> None:
    new = np.zeros((3, 48), np.uint8)
    rows = world.rows(Lists([13, 15], [0, 1]), [new])
    with pytest.raises(HoleError, match=r"row 1: position 15 .* past a gap: 14 rows are there"):
        world.copier.append(rows, 0, 0, 2)
    assert world.unchanged()
    assert world.tables.written(0, 0) == WRITTEN


def test_append_needs_a_source_for_each_part_and_row(world: World) -> None:
    lists = Lists([13, 14], [0, 1])
    with pytest.raises(ValueError, match="the list has 0 sources for rows of 1 parts"):
        world.copier.append(world.rows(lists), 0, 0, 2)
    with pytest.raises(ValueError, match="source 0 has 95 bytes for 2 rows of 48"):
        world.copier.append(world.rows(lists, [np.zeros(95, np.uint8)]), 0, 0, 2)
    assert world.unchanged()


def test_append_to_a_region_of_another_process_is_refused() -> None:
    world = World(Shape())
    world.memory[0].flags.writeable = False
    copier = RowCopier(world.tables, world.parts(world.memory), num_slots=9)
    rows = world.rows(Lists([0], [0]), [np.zeros(48, np.uint8)])
    with pytest.raises(ValueError, match="region of part 0 is read-only"):
        copier.append(rows, 0, 0, 1)


def test_read_only_watermarks_are_only_read() -> None:
    marks = np.full((1, 1), 5, np.int64)
    marks.flags.writeable = False
    tables = BlockTables(np.zeros((1, 2), np.int32), marks, block_tokens=4, num_blocks=1)
    assert tables.written(0, 0) == 5
    with pytest.raises(ValueError, match="written is read-only"):
        tables.mark_written(0, 0, 1)
    with pytest.raises(ValueError, match="written is read-only"):
        tables.truncate(0, 1)


def test_tracked_row_that_nobody_wrote_is_refused_below_the_watermark() -> None:
    """For debugging: a watermark was raised, but one of its rows never came."""
    world = World(Shape(), is_tracked=True)
    new = np.zeros((4, 48), np.uint8)
    world.copier.append(world.rows(Lists([0, 1, 2, 3], [0, 1, 2, 3]), [new]), 1, 0, 4)
    world.reference.append([0, 1, 2, 3], [0, 1, 2, 3], [new], 1, 0)
    assert world.same()
    world.tables.mark_written(1, 0, 7)
    world.twin_tables.mark_written(1, 0, 7)
    assert world.tracked is not None
    world.tracked[1, 0, 5] = 1
    with pytest.raises(HoleError, match=r"row 1: position 4 .* never written, although 7 rows are"):
        world.copier.gather(world.rows(Lists([5, 4], [0, 1])), 1, 0, 2)
    assert world.same()
    assert world.tracked[1, 0].nonzero()[0].tolist() == [0, 1, 2, 3, 5]
    assert world.copier.gather(world.rows(Lists([5, 3], [0, 1])), 1, 0, 2) == 96
    for tables in (world.tables, world.twin_tables):
        tables.truncate(1, 2)
        tables.mark_written(1, 0, 3)
    with pytest.raises(HoleError, match="position 2"):
        world.copier.gather(world.rows(Lists([2], [0])), 1, 0, 1)
    with pytest.raises(HoleError, match="position 2"):
        world.reference.gather([2], [0], 1, 0)


def test_marks_of_another_shape_are_refused() -> None:
    table, marks = np.zeros((1, 2), np.int32), np.zeros((1, 1), np.int64)
    for rows, text in (
        (np.zeros((1, 1, 7), np.uint8), "rows has 7 items in dimension 2 but must have 8"),
        (np.zeros((1, 1, 8), np.int16), "rows has items of more than one byte"),
        (np.zeros((1, 8), np.uint8), "rows has 2 dimensions but must have 3"),
    ):
        with pytest.raises(ValueError, match=text):
            BlockTables(table, marks, block_tokens=4, num_blocks=1, rows=rows)


def test_watermarks_have_limits(world: World) -> None:
    for tokens in (-1, 17):
        with pytest.raises(ValueError, match=f"tokens is {tokens} but must be 0 to 16"):
            world.tables.mark_written(0, 0, tokens)
        with pytest.raises(ValueError, match=f"tokens is {tokens} but must be 0 to 16"):
            world.tables.truncate(0, tokens)
    with pytest.raises(IndexError, match="layer is 2"):
        world.tables.mark_written(0, 2, 1)
    with pytest.raises(IndexError, match="request is 9"):
        world.tables.truncate(9, 1)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"offset": 400}, "part 0: its region ends at byte"),
        ({"layer_stride": 1 << 61}, "part 0: its region ends at byte"),
        ({"offset": 1 << 63}, r"part 0: its region has an offset or a stride above 2\*\*62"),
        ({"block_stride": 2**64 - 1}, "part 0: its region has an offset or a stride"),
        ({"hot_layer_stride": 10**6}, "part 0: its hot buffers ends at byte"),
        ({"hot_request_stride": 10**6}, "part 0: its hot buffers ends at byte"),
        ({"scratch_offset": 10**6}, "part 0: its scratch rows ends at byte"),
        ({"row_bytes": 0}, "part 0: its row_bytes is 0"),
        ({"slot_stride": 47}, "part 0: its slot_stride is 47, less than a row of 48"),
    ],
)
def test_memory_that_does_not_hold_every_row_is_refused(changed: dict[str, int], text: str) -> None:
    world = World(Shape())
    part = Part(**{**world.parts(world.memory)[0]._asdict(), **changed})
    with pytest.raises(ValueError, match=text):
        RowCopier(world.tables, [part], num_slots=9, scratch_rows=3)


def test_arguments_that_cannot_be() -> None:
    world = World(Shape())
    parts = world.parts(world.memory)
    with pytest.raises(ValueError, match="threads is 3 but must be 1 or 2"):
        RowCopier(world.tables, parts, num_slots=9, threads=3)
    with pytest.raises(ValueError, match="kernel 'warp' does not run on this CPU: use one of auto"):
        RowCopier(world.tables, parts, num_slots=9, kernel="warp")
    with pytest.raises(ValueError, match="num_slots is 0"):
        RowCopier(world.tables, parts, num_slots=0)
    with pytest.raises(ValueError, match="parts has 0 items but must have 1 to 8"):
        RowCopier(world.tables, [], num_slots=9)
    with pytest.raises(ValueError, match="block_tokens is 0"):
        BlockTables(world.table, world.marks, block_tokens=0, num_blocks=1)
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockTables(world.table, world.marks, block_tokens=1, num_blocks=0)


def test_arrays_of_another_kind_are_refused() -> None:
    good, marks = np.zeros((1, 2), np.int32), np.zeros((1, 1), np.int64)
    with pytest.raises(TypeError, match="tables must be an array of int32, not of format"):
        BlockTables(good.astype(np.int64), marks, block_tokens=4, num_blocks=1)
    with pytest.raises(ValueError, match="tables has 1 dimensions but must have 2"):
        BlockTables(good[0], marks, block_tokens=4, num_blocks=1)
    with pytest.raises(ValueError, match="written has 2 items in dimension 0 but must have 1"):
        BlockTables(good, np.zeros((2, 1), np.int64), block_tokens=4, num_blocks=1)
    with pytest.raises(TypeError, match="positions must be an array, not list"):
        RowList([1], good[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="positions is empty"):
        RowList(np.zeros(0, np.int32), good[0])


def test_memory_stays_while_a_copier_has_it(make_region: MakeRegion) -> None:
    region = make_region(4096)
    tables = BlockTables(
        np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int64), block_tokens=4, num_blocks=1
    )
    hot = np.zeros(64, np.uint8)
    copier = RowCopier(tables, [Part(region, 0, 0, 0, 16, hot, 0, 0, 0, 16)], num_slots=4)
    with pytest.raises(BufferError):
        region.close()
    del copier
    region.close()


# --- bytes ----------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, int, int, int, Lists]:
    """Draw a world, its watermark, a request, a layer, and rows that may all be read."""
    parts = st.lists(st.sampled_from((1, 16, 48, 64, 128, 132, 656, 1152)), min_size=1, max_size=3)
    shape = Shape(
        part_bytes=tuple(draw(parts)),
        block_tokens=draw(st.integers(1, 5)),
        num_slots=draw(st.integers(1, 24)),
        scratch_rows=draw(st.integers(0, 3)),
        gap=draw(st.sampled_from((0, 16, 64, 7))),
    )
    written = draw(st.integers(0, shape.tokens_max))
    slots = draw(st.permutations(range(shape.num_slots + shape.scratch_rows)))
    positions = draw(
        st.lists(st.integers(-1, written - 1), max_size=len(slots)) if written else st.just([-1])
    )
    lists = Lists(positions, slots[: len(positions)])
    return shape, written, draw(st.integers(0, 2)), draw(st.integers(0, 1)), lists


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_gather_is_as_defined(kernel: str) -> None:
    @settings(max_examples=100, deadline=None)
    @given(cases())
    def check(case: tuple[Shape, int, int, int, Lists]) -> None:
        shape, written, request, layer, lists = case
        world = World(shape, kernel)
        world.write(written)
        count = len(lists.positions)
        moved = world.copier.gather(world.rows(lists), request, layer, count)
        assert moved == world.reference.gather(lists.positions, lists.slots, request, layer)
        assert world.same()
        for far in (False, True):
            world.copier.read(world.rows(lists), request, layer, count, far=far)
        assert world.same()

    check()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_append_is_as_defined(kernel: str) -> None:
    @settings(max_examples=100, deadline=None)
    @given(cases(), st.data())
    def check(case: tuple[Shape, int, int, int, Lists], data: st.DataObject) -> None:
        shape, written, request, layer, _ = case
        world = World(shape, kernel)
        world.write(written)
        end = st.integers(-1, min(shape.tokens_max - 1, written + 3))
        positions = data.draw(st.lists(end, min_size=1, max_size=6))
        slots = data.draw(
            st.lists(
                st.integers(-1, shape.num_slots + shape.scratch_rows - 1),
                min_size=len(positions),
                max_size=len(positions),
            )
        )
        draw = np.random.default_rng(len(positions))
        sources = [
            draw.integers(0, 256, (len(positions), row), np.uint8) for row in shape.part_bytes
        ]
        rows = world.rows(Lists(positions, slots), sources)
        assert moved(lambda: world.copier.append(rows, request, layer, len(positions))) == moved(
            lambda: world.reference.append(positions, slots, sources, request, layer)
        )
        assert world.same()

    check()


def moved(call: Callable[[], int]) -> int | None:
    """Return what a call moved, None when it found a hole."""
    try:
        return call()
    except HoleError:
        return None


def test_rows_grow_across_a_block_edge_and_shrink_again(world: World) -> None:
    new: Octets = np.arange(3 * 48, dtype=np.uint8).reshape(3, 48)
    world.write(3)
    rows = world.rows(Lists([3, 4, 5], [8, -1, 0]), [new])
    assert world.copier.append(rows, 1, 1, 3) == new.nbytes
    assert world.tables.written(1, 1) == 6
    assert world.tables.written(1, 0) == 3
    back = world.rows(Lists([5, 4, 3], [3, 4, 5]))
    world.copier.gather(back, 1, 1, 3)
    part = world.parts(world.memory)[0]
    read = [world.reference.hot_row(part, 1, 1, slot).tolist() for slot in (3, 4, 5)]
    assert read == new[::-1].tolist()
    world.twin_marks[:] = world.marks
    for tables in (world.tables, world.twin_tables):
        tables.truncate(1, 4)
    assert np.array_equal(world.marks, world.twin_marks)
    with pytest.raises(HoleError, match="position 5"):
        world.copier.gather(back, 1, 1, 3)
    assert world.copier.gather(world.rows(Lists([3], [0])), 1, 1, 1) == 48


def test_one_row_to_many_slots_and_no_row_at_all(world: World) -> None:
    lists = Lists([5, 5, -1, 5], [0, 1, 2, 11])
    assert world.copier.gather(world.rows(lists), 2, 1, 4) == 3 * 48
    world.reference.gather(lists.positions, lists.slots, 2, 1)
    assert world.same()
    assert world.copier.gather(world.rows(Lists([-1, -1], [0, 0])), 0, 0, 2) == 0
    assert world.copier.gather(world.rows(lists), 0, 0, 0) == 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_beyond_2_and_4_gib(make_region: MakeRegion, kernel: str) -> None:
    """Blocks and slots that no 32-bit offset reaches, of a region that is a file with holes."""
    row, tokens, blocks = 1152, 128, 49152
    size = blocks * tokens * row
    assert size > 6 * GIB
    region, hot = make_region(size), make_region(6 * GIB)
    slots = 6 * GIB // row
    places = {3: slots - 1, 130: (2 * GIB) // row + 7, 260: (4 * GIB) // row + 5}
    table = np.array([[15000, 20000, 48000]], np.int32)  # at 2.06, 2.75 and 6.6 GiB
    tables = BlockTables(
        table, np.full((1, 1), 300, np.int64), block_tokens=tokens, num_blocks=blocks
    )
    part = Part(region, 0, 0, tokens * row, row, hot, 0, 0, 0, row)
    copier = RowCopier(tables, [part], num_slots=slots, kernel=kernel)
    wanted = {}
    for position in places:
        data = os.urandom(row)
        block = int(table[0, position // tokens])
        region.write_bytes((block * tokens + position % tokens) * row, data)
        wanted[position] = data
    positions, targets = (np.array(list(it), np.int32) for it in (places, places.values()))
    assert copier.gather(RowList(positions, targets), 0, 0, 3) == 3 * row
    assert {at: hot.read_bytes(slot * row, row) for at, slot in places.items()} == wanted
    new = np.frombuffer(os.urandom(row), np.uint8)
    appended = RowList(positions[2:], np.array([slots - 2], np.int32), [new])
    copier.append(appended, 0, 0, 1)
    assert region.read_bytes((48000 * tokens + 4) * row, row) == new.tobytes()
    assert hot.read_bytes((slots - 2) * row, row) == new.tobytes()
    definition = rows_reference.RowCopier(
        rows_reference.BlockTables(table, np.full((1, 1), 300), tokens, blocks), [part], slots
    )
    for position, slot in places.items():
        block, at = int(table[0, position // tokens]), position % tokens
        assert definition.hot_row(part, 0, 0, slot).tobytes() == wanted[position]
        if position != 260:  # which was written again
            assert definition.region_row(part, 0, block, at).tobytes() == wanted[position]
    assert definition.region_row(part, 0, 48000, 4).tobytes() == new.tobytes()
