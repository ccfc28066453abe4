"""Reads of a pool with checksums: damage is found by whoever copies, in every part and row."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from kvd.core.ids import MemberRef, SlotRef
from kvd.core.transfer_types import Source, SourceKind
from kvd.memory.sum_area import SumArea
from kvd.plan.layout import BlockLayout, RegionLayout
from kvd.transfer import shm
from kvd.wire.layout import BlockLayoutSpec, DeviceLayout, Part, ResidentPart
from kvd.wire.sum_layout import SumShape, SumView
from kvd_kernels.host import Mapping, crc32c

SIZE = 4
ROWS = {"main": 24, "indexer": 10}
LAYOUT = BlockLayout(
    BlockLayoutSpec(
        "m", "f", SIZE, [[Part(name, row) for name, row in ROWS.items()]] * 2, num_shards=2
    )
)
BLOCKS = (5, 2, 7)
TOKENS = 10
LAYER, SHARD = 1, 1


def memory(size: int) -> Mapping:
    fd = os.memfd_create("shm-sums")
    os.ftruncate(fd, size)
    made = Mapping(fd, size, writable=True)
    os.close(fd)
    return made


@dataclass(frozen=True)
class Rig:
    """A pool with three blocks of a sequence, the last one half full, and two ranks to read it."""

    producer: shm.ProducerMemory
    to: shm.Destination
    pool: Mapping

    def read(self, start: int, end: int, **changes: object) -> int:
        first = start // SIZE
        blocks = BLOCKS[first : -(-end // SIZE)]
        ref = SlotRef(MemberRef("p", "w", 1), 0, 0)
        source = Source(ref, SourceKind.POOL, blocks, SHARD)
        to = replace(self.to, first_token=first * SIZE, blocks=self.to.blocks[first:])
        producer = replace(self.producer, **changes)  # type: ignore[arg-type]
        return shm.copy(shm.plan_read(LAYER, start, end, source, producer, to))

    def with_same_blocks(self) -> Rig:
        """The same with a region whose blocks are as large as those of the pool."""
        layout = RegionLayout(2, 8, SIZE, ROWS["main"])
        return replace(self, to=replace(self.to, layout=layout))

    def damage(self, block: int, part: int, row: int) -> None:
        span = LAYOUT.spans(LAYER, SHARD)[part]
        at = block * LAYOUT.stride + span.offset + row * span.row_bytes + 3
        (byte,) = self.pool.read_bytes(at, 1)
        self.pool.write_bytes(at, bytes([byte ^ 1]))


@pytest.fixture
def rig() -> Iterator[Rig]:
    pool, device = memory(8 * LAYOUT.stride), memory(4096)
    pool.write_bytes(0, os.urandom(pool.size))
    area = SumArea(SumShape(8, 4, LAYOUT.digest()))
    for at, block in enumerate(BLOCKS):
        tokens = min(SIZE, TOKENS - at * SIZE)
        crc = 0
        for span in LAYOUT.spans(LAYER, SHARD):
            begin = block * LAYOUT.stride + span.offset
            crc = crc32c(pool.read_bytes(begin, tokens * span.row_bytes), crc)
        area.store(LAYER * 2 + SHARD, (block,), (tokens,), struct.pack("<I", crc))
    sums = Mapping(area.fd, area.size, writable=False)
    producer = shm.ProducerMemory(
        device, DeviceLayout(SIZE, 1, [0], [0], [[]]), pool, LAYOUT, SumView(sums), sums
    )
    # Its blocks have another size.
    layout = RegionLayout(2, 8, 3, ROWS["main"])
    kept = (ResidentPart("indexer", ROWS["indexer"], {LAYER: 64}),)
    ranks = tuple(shm.ResidentMemory(memory(4096), kept) for _ in range(2))
    region = memory(2 * layout.num_bytes)
    to = shm.Destination(region, layout, (1, 0, 4, 3), 0, ranks)
    yield Rig(producer, to, pool)
    area.close()
    producer.close()


@pytest.mark.parametrize(("start", "end"), [(0, 10), (0, 8), (4, 10), (1, 9), (5, 6), (8, 10)])
def test_undamaged_rows_arrive(rig: Rig, start: int, end: int) -> None:
    to = rig.with_same_blocks()
    moved = to.read(start, end)
    assert moved == (end - start) * (ROWS["main"] + 2 * ROWS["indexer"])
    main, indexer = LAYOUT.spans(LAYER, SHARD)
    for token in range(start, end):
        row, block = token % SIZE, BLOCKS[token // SIZE]
        place = rig.to.blocks[token // SIZE] * SIZE + row
        source = rig.pool.read_bytes(
            block * LAYOUT.stride + main.offset + row * ROWS["main"], ROWS["main"]
        )
        offset = to.to.layout.row_offset(LAYER, 0, 0) + place * ROWS["main"]
        assert rig.to.region.read_bytes(offset, ROWS["main"]) == source
        source = rig.pool.read_bytes(
            block * LAYOUT.stride + indexer.offset + row * ROWS["indexer"], ROWS["indexer"]
        )
        for rank in rig.to.residents:
            offset = 64 + place * ROWS["indexer"]
            assert rank.device.read_bytes(offset, ROWS["indexer"]) == source


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize(("block", "row"), [(5, 0), (2, 3), (7, 1)])
def test_damage_in_any_part_fails_the_read_and_is_named(
    rig: Rig, part: int, block: int, row: int
) -> None:
    span = LAYER * 2 + SHARD
    assert rig.producer.sums is not None
    expected = rig.producer.sums.get(span, block)
    rig.damage(block, part, row)
    small = rig.with_same_blocks()
    with pytest.raises(shm.SumsDiffer, match=f"layer {LAYER}, pool block {block}") as caught:
        small.read(0, TOKENS)
    ((named, crc, got),) = caught.value.bad
    assert expected is not None
    assert (named, crc) == (block, expected.crc)
    assert got != crc


def test_rows_of_a_block_that_are_not_asked_for_count_too(rig: Rig) -> None:
    rig.damage(2, 0, 3)
    small = rig.with_same_blocks()
    with pytest.raises(shm.SumsDiffer):
        small.read(4, 5)
    assert small.read(8, 10)


def test_rows_beyond_the_checksum_are_copied_without_one(rig: Rig) -> None:
    rig.damage(7, 0, 0)
    small = rig.with_same_blocks()
    assert small.read(8, 11)


def test_without_checksums_damage_is_not_noticed(rig: Rig) -> None:
    rig.damage(5, 0, 0)
    small = rig.with_same_blocks()
    assert small.read(0, TOKENS, sums=None)


def test_blocks_of_another_size_at_the_reader(rig: Rig) -> None:
    assert rig.read(0, TOKENS)
    rig.damage(2, 1, 0)
    with pytest.raises(shm.SumsDiffer):
        rig.read(0, TOKENS)
