"""Taking over the memory of an earlier life: all of it, the beginning of it, or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from kvd.memory.inheritance import META, POOL, RECORD, Inheritance, Wanted, inherit
from kvd.memory.layout_v1 import MetaTable, Superblock, meta_bytes
from kvd.memory.node_record import (
    RECORD_BYTES,
    MemberRecord,
    NodeRecord,
    PoolRecord,
    RecordFile,
    RegionRecord,
)
from kvd.memory.region import MemfdRegion, make_region
from kvd.server.readiness import lacks_huge_pages

MIB = 1 << 20
STRIDE = 1 << 16
COUNT = 16
DIGEST = b"d" * 32
WANTED = Wanted(MIB, 1 << 20, "off")
SURVIVES = ("engine", "daemon")


class LastLife:
    """Memory as a kvd leaves it: a formatted pool with some ready blocks."""

    def __init__(self) -> None:
        self.regions = {
            POOL: make_region("pool", MIB, "off", 0),
            META: make_region("pool-meta", meta_bytes(COUNT), "off", 0),
            RECORD: make_region("record", RECORD_BYTES, "off", 0),
            "region-r": make_region("region-r", 4096, "off", 0),
        }
        for _ in self.regions[POOL].populate_steps(MIB):
            pass
        mapping = self.regions[META].mapping
        self.table = MetaTable.format(mapping, Superblock(STRIDE, COUNT, MIB, DIGEST))
        for block in range(COUNT):
            self.table.begin_fill(block)
            self.table.commit(block, DIGEST, bytes([block]) * 32, 128)
            self.regions[POOL].mapping.write_bytes(block * STRIDE, bytes([block + 1]) * STRIDE)
        self.record = RecordFile(self.regions[RECORD].mapping)
        self.write()

    def write(self, **changes: object) -> None:
        """Write the record; by default it fits the headers."""
        pool = PoolRecord(DIGEST, STRIDE, COUNT, 128, 2, 1, [(DIGEST, b"")])
        fields: dict[str, object] = {
            "pool": pool,
            "members": [MemberRecord("e", "m", 1, "member-m")],
            "regions": [RegionRecord("r", "e", 1, 1, 1, 64, "region-r")],
        }
        self.record.write(NodeRecord(**{**fields, **changes}))  # type: ignore[arg-type]

    def fds(self) -> dict[str, int]:
        """As an owner gives them back."""
        found = {name: os.dup(region.fd) for name, region in self.regions.items()}
        found["member-m"] = os.pidfd_open(os.getpid())
        found["stranger"] = os.dup(0)
        return found


@pytest.fixture
def last() -> Iterator[LastLife]:
    made = LastLife()
    yield made
    for region in made.regions.values():
        region.close()


@pytest.fixture
def took() -> Iterator[Callable[..., tuple[Inheritance | None, str]]]:
    """`inherit`, closed at the end; no descriptor is left over, whatever came."""
    made: list[Inheritance] = []

    def take(
        last: LastLife, wanted: Wanted = WANTED, **lost: int
    ) -> tuple[Inheritance | None, str]:
        fds = last.fds()
        for name in lost:
            os.close(fds.pop(name.replace("_", "-")))
        before = len(os.listdir("/proc/self/fd")) - len(fds)
        found, note = inherit(fds, wanted, SURVIVES)
        assert fds == {}
        if found is None:
            assert len(os.listdir("/proc/self/fd")) == before
        else:
            made.append(found)
        return found, note

    yield take
    for inheritance in made:
        inheritance.close()


Took = Callable[..., tuple[Inheritance | None, str]]


def test_everything_is_taken_over(last: LastLife, took: Took) -> None:
    found, note = took(last)
    assert found is not None
    assert note == "the pool of the last life of kvd was taken over, 16 blocks"
    assert found.table is not None
    assert [header.block for header in found.table.scan()] == list(range(COUNT))
    assert found.data.mapping.read_bytes(3 * STRIDE, 4) == b"\x04" * 4
    assert found.data.populated == found.data.size, "it is resident, and not populated again"
    assert set(found.regions) == {"r"}
    assert set(found.pidfds) == {"member-m"}


def test_nothing_was_kept() -> None:
    assert inherit({}, WANTED, SURVIVES) == (None, "")


def test_memory_without_a_layout_is_used_again(last: LastLife, took: Took) -> None:
    last.write(pool=None)
    found, note = took(last)
    assert found is not None
    assert found.table is None
    assert "it had no layout" in note


@pytest.mark.parametrize("name", ["pool_meta", "record"])
def test_a_part_is_missing(last: LastLife, took: Took, name: str) -> None:
    found, note = took(last, **{name: 0})
    assert found is None
    assert f"{name.replace('_', '-')} was not kept" in note


def test_a_region_or_pidfd_may_be_missing(last: LastLife, took: Took) -> None:
    found, _ = took(last, region_r=0, member_m=0)
    assert found is not None
    assert found.regions == {}
    assert found.pidfds == {}


def test_a_smaller_pool_keeps_its_beginning_and_may_grow_again(last: LastLife, took: Took) -> None:
    resident = os.fstat(last.regions[POOL].fd).st_blocks
    small = Wanted(MIB // 4, 1 << 20, "off")
    for again in (False, True):
        found, note = took(last, small)
        assert found is not None
        assert found.table is not None
        assert found.table.superblock.block_count == 4
        assert ("4 blocks instead of 16" in note) == (not again)
        assert ("768KiB were given back" in note) == (not again)
        assert found.data.size == found.data.populated == MIB // 4, "the rest is not made resident"
        assert os.fstat(last.regions[POOL].fd).st_blocks == resident // 4
        assert os.fstat(last.regions[POOL].fd).st_size == MIB, "who has it mapped lives"
        assert found.data.mapping.read_bytes(3 * STRIDE, 4) == b"\x04" * 4
    found, note = took(last)
    assert found is not None
    assert found.table is not None
    assert "16 blocks instead of 4" in note
    assert [header.block for header in found.table.scan()] == list(range(4)), "not what was there"
    assert found.data.populated == 0, "its end has to be made resident"


def test_memory_without_a_layout_is_cut_down_too(last: LastLife, took: Took) -> None:
    last.write(pool=None)
    found, note = took(last, Wanted(MIB // 2, 1 << 20, "off"))
    assert found is not None
    assert "512KiB were given back" in note
    assert found.data.size == MIB // 2


def test_huge_pages_that_are_missing_go_on_to_be_missed(last: LastLife, took: Took) -> None:
    found, _ = took(last, Wanted(MIB, 1 << 20, "prefer"))
    assert found is not None
    assert lacks_huge_pages(found.data.snapshot())
    found, _ = took(last)
    assert found is not None
    assert not lacks_huge_pages(found.data.snapshot())


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (Wanted(2 * MIB, 1 << 20, "off"), "pool.size is 2MiB now, it had 1MiB"),
        (Wanted(MIB, 1 << 20, "require"), "it was made of ordinary pages"),
        (Wanted(STRIDE - 1, 1 << 20, "off"), "holds no block of 64KiB"),
    ],
)
def test_another_configuration_drops_it(
    last: LastLife, took: Took, wanted: Wanted, says: str
) -> None:
    found, note = took(last, wanted)
    assert found is None
    assert says in note
    assert note.startswith("the pool of the last life of kvd was dropped: ")


@pytest.mark.parametrize(
    ("offset", "value", "says"),
    [
        (0, b"KVDMETA2", "not pool metadata"),
        (8, b"\x02\0\0\0", "version 2"),
        (16, b"\xff", "is damaged"),
    ],
)
def test_other_metadata_drops_it(
    last: LastLife, took: Took, offset: int, value: bytes, says: str
) -> None:
    last.regions[META].mapping.write_bytes(offset, value)
    found, note = took(last)
    assert found is None
    assert says in note


def test_headers_and_record_must_agree(last: LastLife, took: Took) -> None:
    last.write(pool=PoolRecord(b"x" * 32, STRIDE, COUNT, 128, 2, 1, []))
    found, note = took(last)
    assert found is None
    assert "different layouts" in note


def test_what_is_no_memory_of_kvd_is_not_mapped(last: LastLife) -> None:
    fds = last.fds()
    os.close(fds[POOL])
    fds[POOL] = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fds[POOL], MIB)
    found, note = inherit(fds, WANTED, SURVIVES)
    assert found is None
    assert "is not sealed" in note
    for bad in (os.open("/dev/null", os.O_RDWR), os.pipe()[0]):
        with pytest.raises((ValueError, OSError)):
            MemfdRegion.adopt("pool", bad, MIB, survives=SURVIVES)
        os.close(bad)
