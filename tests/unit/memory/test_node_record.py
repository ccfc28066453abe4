"""The record of members and regions: whole or not there, whenever its writer died."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.memory.node_record import (
    HALF_BYTES,
    RECORD_BYTES,
    MemberRecord,
    NodeRecord,
    PoolRecord,
    RecordFile,
    RegionRecord,
)


class Bytes:
    """Memory of a record; `writes_left` writes are done, then its process is dead."""

    def __init__(self, size: int = RECORD_BYTES) -> None:
        self.data = bytearray(size)
        self.writes_left = 1 << 30

    @property
    def size(self) -> int:
        return len(self.data)

    def read_bytes(self, offset: int, length: int, /) -> bytes:
        return bytes(self.data[offset : offset + length])

    def write_bytes(self, offset: int, data: bytes, /) -> None:
        self._spend()
        self.data[offset : offset + len(data)] = data

    def store_u64(self, offset: int, value: int, /) -> None:
        self._spend()
        self.data[offset : offset + 8] = value.to_bytes(8, "little")

    def _spend(self) -> None:
        if not self.writes_left:
            raise KeyboardInterrupt
        self.writes_left -= 1


def record(number: int) -> NodeRecord:
    pool = PoolRecord(bytes(32), 4096, number, 128, 4, 1, [(b"d" * 32, b"probe")])
    members = [MemberRecord(f"e{n}", "rank0", n, f"member-{n}") for n in range(number)]
    regions = [RegionRecord("r", "e0", 2, 3, 4, 5, "region-r")]
    return NodeRecord(pool=pool, members=members, regions=regions)


def test_a_fresh_file_has_no_record() -> None:
    assert RecordFile(Bytes()).last is None


def test_the_last_record_is_found_again() -> None:
    memory = Bytes()
    file = RecordFile(memory)
    for number in range(5):
        file.write(record(number))
        assert RecordFile(memory).last == record(number)


@given(writes=st.integers(0, 3), before=st.integers(1, 4))
def test_a_writer_that_dies_leaves_the_old_or_the_new_one(writes: int, before: int) -> None:
    memory = Bytes()
    file = RecordFile(memory)
    for number in range(before):
        file.write(record(number))
    memory.writes_left = writes
    try:
        file.write(record(99))
        wanted = 99
    except KeyboardInterrupt:
        wanted = before - 1
    memory.writes_left = 1 << 30
    found = RecordFile(memory)
    assert found.last == record(wanted)
    found.write(record(7))
    assert RecordFile(memory).last == record(7)


@given(at=st.integers(0, 400), bit=st.integers(0, 7))
def test_a_damaged_record_is_never_taken_for_another(at: int, bit: int) -> None:
    memory = Bytes()
    file = RecordFile(memory)
    file.write(record(1))
    file.write(record(2))
    memory.data[at] ^= 1 << bit
    assert RecordFile(memory).last in (record(1), record(2))


def test_what_is_too_small_or_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="a record needs"):
        RecordFile(Bytes(RECORD_BYTES - 1))
    memory = Bytes()
    file = RecordFile(memory)
    file.write(record(1))
    with pytest.raises(ValueError, match="is too large"):
        file.write(NodeRecord(members=[MemberRecord("e" * HALF_BYTES, "m", 1, "k")]))
    assert RecordFile(memory).last == record(1)


def test_another_version_is_refused() -> None:
    memory = Bytes()
    RecordFile(memory).write(NodeRecord(version=2))
    with pytest.raises(ValueError, match="has version 2"):
        RecordFile(memory)
