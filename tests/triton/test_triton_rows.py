"""gather_rows on the device: faults first, then bytes against the definition."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
import torch

from kvd_kernels import rows_reference as reference
from kvd_kernels.rows import HoleError, Part
from tests.capabilities import need_module
from tests.triton.twins import ints

need_module("triton", "python3 .ci/environment.py triton, then use the Python it names")
from kvd_kernels.triton_ops import rows  # noqa: E402

REQUESTS, LAYERS, BLOCKS, TABLE, BLOCK_TOKENS = 3, 2, 40, 8, 16
SLOTS, SCRATCH, GAP = 50, 6, 64
TOKENS = TABLE * BLOCK_TOKENS


class World:
    """Memory of both, tables, and rows to be gathered."""

    def __init__(self, part_bytes: tuple[int, ...] = (48,), gap: int = GAP, seed: int = 1) -> None:
        self.draw = np.random.default_rng(seed)
        self.table = self.draw.permutation(BLOCKS)[: REQUESTS * TABLE].astype(np.int32)
        self.table = self.table.reshape(REQUESTS, TABLE)
        self.written = np.full((REQUESTS, LAYERS), TOKENS, np.int64)
        self.parts, self.twins = [], []
        for row in part_bytes:
            block = BLOCK_TOKENS * row + gap
            slot, region_size = row + gap, gap + LAYERS * BLOCKS * block
            hot_layer = SLOTS * slot + gap
            hot_request = LAYERS * hot_layer + SCRATCH * slot
            region = self.draw.integers(0, 256, region_size, np.uint8)
            hot = self.draw.integers(0, 256, REQUESTS * hot_request, np.uint8)
            places = (gap, BLOCKS * block, block, row)
            ends = (0, hot_request, hot_layer, slot, LAYERS * hot_layer)
            self.twins.append(Part(region, *places, hot.copy(), *ends))
            tensors = torch.from_numpy(region), torch.from_numpy(hot)
            self.parts.append(rows.RowPart(tensors[0], *places, tensors[1], *ends))

    def gather(
        self,
        positions: list[int],
        slots: list[int],
        requests: list[int],
        layer: int = 1,
        lanes: int = 4096,
    ) -> None:
        """Gather on the device, and raise what was wrong."""
        tables = rows.RowTables(
            torch.from_numpy(self.table), torch.from_numpy(self.written), BLOCK_TOKENS, BLOCKS
        )
        given = rows.make_rows(ints(positions), ints(slots), ints(requests))
        rows.gather_rows(
            tables, self.parts, given, layer, num_slots=SLOTS, scratch_rows=SCRATCH, lanes=lanes
        )
        rows.raise_fault(given)

    def define(
        self, positions: list[int], slots: list[int], requests: list[int], layer: int = 1
    ) -> None:
        """Gather by the definition, request by request."""
        tables = reference.BlockTables(self.table, self.written, BLOCK_TOKENS, BLOCKS)
        copier = reference.RowCopier(tables, self.twins, SLOTS, SCRATCH)
        for request in range(REQUESTS):
            own = [at for at, owner in enumerate(requests) if owner == request]
            copier.gather([positions[at] for at in own], [slots[at] for at in own], request, layer)

    def drawn(self, count: int) -> tuple[list[int], list[int], list[int]]:
        """Draw rows, no slot of a request twice, some of them none."""
        positions, slots, requests = [], [], []
        for request in range(REQUESTS):
            drawn = self.draw.permutation(TOKENS)[:count]
            positions += np.where(self.draw.random(count) < 0.1, -1, drawn).tolist()
            slots += self.draw.permutation(SLOTS + SCRATCH)[:count].tolist()
            requests += [request] * count
        return positions, slots, requests

    def assert_same(self) -> None:
        for part, twin in zip(self.parts, self.twins, strict=True):
            assert np.array_equal(part.hot.numpy(), np.asarray(twin.hot))


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "slots", "requests", "error", "text"),
    [
        ([0, 100], [0, 1], [0, 1], HoleError, "position 100 of request 1 was never written"),
        ([0, 1 << 30], [0, 1], [0, 0], IndexError, "position 1073741824 is outside the tables"),
        ([0, 1], [0, 1], [0, 3], IndexError, "request 3 of row 1 does not exist"),
        ([0, 1], [0, 1], [0, -1], IndexError, "request -1 of row 1 does not exist"),
        ([3, 20], [0, 1], [0, 0], IndexError, "position 20 is in block 40, there is none"),
        ([0, 1], [0, 56], [0, 0], IndexError, "slot 56 of position 1 does not exist"),
        ([0, 1], [-1, 1], [0, 0], IndexError, "slot -1 of position 0 does not exist"),
        ([100, 0], [0, 99], [1, 0], HoleError, "position 100 of request 1 was never written"),
    ],
)
def test_fault_moves_nothing(
    positions: list[int], slots: list[int], requests: list[int], error: type[Exception], text: str
) -> None:
    world = World()
    world.written[0] = (1 << 31) + 1
    world.written[1, 1] = 100
    world.table[0, 1] = BLOCKS
    with pytest.raises(error, match=text):
        world.gather(positions, slots, requests)
    world.assert_same()


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_layer_that_there_is_none_of(layer: int) -> None:
    with pytest.raises(IndexError, match=f"layer is {layer} but must be 0 to 1"):
        World().gather([0], [0], [0], layer)


def test_tensors_that_do_not_fit() -> None:
    world = World()
    with pytest.raises(ValueError, match=r"slots must be \[2\] of int32, not \[1\] of int32"):
        world.gather([0, 1], [0], [0, 0])
    with pytest.raises(ValueError, match="the number of rows is 0 but must be 1 to"):
        world.gather([], [], [])
    with pytest.raises(ValueError, match="lanes is 3 but must be a power of two"):
        world.gather([0], [0], [0], lanes=3)
    world.parts[0] = world.parts[0]._replace(hot=torch.zeros(9, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"hot of part 0 must be \[any\] of uint8, not \[9\]"):
        world.gather([0], [0], [0])
    world.parts.clear()
    with pytest.raises(ValueError, match="a row has no parts"):
        world.gather([0], [0], [0])


# --- against the definition -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part_bytes", "gap"),
    [((1152,), 64), ((1024, 128), 64), ((656,), 0), ((656,), 6), ((132, 7), 1), ((1,), 0)],
)
def test_parts_of_many_sizes(part_bytes: tuple[int, ...], gap: int) -> None:
    world = World(part_bytes, gap)
    given = world.drawn(40)
    for layer in range(LAYERS):
        world.gather(*given, layer=layer, lanes=16384)
        world.define(*given, layer=layer)
    world.assert_same()


@pytest.mark.parametrize("count", [1, 15, 16, 17])
def test_programs_of_few_rows(count: int) -> None:
    world = World()
    given = world.drawn(count)
    world.gather(*given, lanes=64)
    world.define(*given)
    world.assert_same()


@pytest.mark.parametrize(("gigabytes", "row_bytes"), [(2, 63), (4, 63), (4, 64)])
def test_addresses_beyond_32_bits(gigabytes: int, row_bytes: int) -> None:
    """A file of nothing but holes is as large as wanted and takes no memory.

    Rows of an odd size are moved byte by byte, so that byte addresses are what is computed.
    """
    size, row = (gigabytes << 30) + (1 << 20), 5
    fd = os.memfd_create("region")
    os.ftruncate(fd, size)
    with os.fdopen(fd, "r+b") as file:
        region = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    blocks = size // (16 * row_bytes)
    at = ((blocks - 1) * 16 + row) * row_bytes
    region[at : at + row_bytes] = torch.arange(row_bytes, dtype=torch.uint8)
    hot = torch.zeros(4 * row_bytes, dtype=torch.uint8)
    part = rows.RowPart(
        region, 0, size, 16 * row_bytes, row_bytes, hot, 0, 4 * row_bytes, 0, row_bytes
    )
    tables = rows.RowTables(ints([[blocks - 1]]), torch.tensor([[16]]), 16, blocks)
    given = rows.make_rows(ints([row]), ints([3]), ints([0]))
    rows.gather_rows(tables, [part], given, 0, num_slots=4)
    rows.raise_fault(given)
    assert hot.view(4, row_bytes)[3].tolist() == list(range(row_bytes))
    assert not hot[: 3 * row_bytes].any()
