"""Pool metadata: damage is found wherever it is, and the state of a block is written last."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.units import GIB, TIB
from kvd.memory.layout_v1 import (
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    BlockState,
    Header,
    MetaTable,
    Superblock,
    meta_bytes,
)
from kvd_kernels.host import Mapping

DIGEST = bytes(range(32))
NAMESPACE = b"n" * 32
HASH = b"h" * 32
SHAPE = Superblock(block_stride=4096, block_count=5, data_bytes=5 * 4096, layout_digest=DIGEST)


class FakeMapping:
    """A mapping in a bytearray that records each write, and can die before one of them."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.writes: list[tuple[str, int, int]] = []
        self.writes_left = 1 << 30

    @property
    def size(self) -> int:
        return len(self.data)

    def _write(self, kind: str, offset: int, data: bytes) -> None:
        if self.writes_left == 0:
            raise KeyboardInterrupt
        self.writes_left -= 1
        assert 0 <= offset <= offset + len(data) <= self.size
        self.writes.append((kind, offset, len(data)))
        self.data[offset : offset + len(data)] = data

    def read_bytes(self, offset: int, length: int, /) -> bytes:
        assert 0 <= offset <= offset + length <= self.size
        return bytes(self.data[offset : offset + length])

    def write_bytes(self, offset: int, data: bytes, /) -> None:
        self._write("bytes", offset, data)

    def load_u32(self, offset: int, /) -> int:
        return int.from_bytes(self.read_bytes(offset, 4), "little")

    def store_u32(self, offset: int, value: int, /) -> None:
        assert offset % 4 == 0
        self._write("release", offset, value.to_bytes(4, "little"))

    def store_u64(self, offset: int, value: int, /) -> None:
        assert offset % 8 == 0
        self._write("release", offset, value.to_bytes(8, "little"))


@pytest.fixture
def fake() -> FakeMapping:
    """Give formatted metadata of five blocks whose writes are recorded from now on."""
    mapping = FakeMapping(meta_bytes(5))
    MetaTable.format(mapping, SHAPE)
    mapping.writes.clear()
    return mapping


def commit(table: MetaTable, block: int, tokens: int = 128, flags: int = 0) -> None:
    """Fill and commit a block."""
    table.begin_fill(block)
    table.commit(block, NAMESPACE, HASH, tokens, flags)


def offset_of(block: int) -> int:
    """Return the byte offset of a header."""
    return SUPERBLOCK_BYTES + block * HEADER_BYTES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_stride": 0}, "block_stride 0 and block_count 5 must be positive"),
        ({"block_count": 0}, "block_stride 4096 and block_count 0 must be positive"),
        ({"data_bytes": 5 * 4096 - 1}, "5 blocks of 4096 bytes do not fit in 20479 bytes"),
        ({"block_stride": 1 << 62}, "do not fit"),
        ({"data_bytes": 1 << 63}, "do not fit"),
        ({"block_count": 6, "data_bytes": GIB}, "6 blocks need 4864 bytes of metadata, it has"),
        ({"layout_digest": b"short"}, "layout_digest must have 32 bytes, got 5"),
    ],
)
def test_format_refused_and_nothing_written(
    changes: dict[str, object], message: str, fake: FakeMapping
) -> None:
    before = bytes(fake.data)
    with pytest.raises(ValueError, match=message):
        MetaTable.format(fake, SHAPE._replace(**changes))  # type: ignore[arg-type]
    assert bytes(fake.data) == before
    assert fake.writes == []


def test_metadata_of_nobody_is_not_opened() -> None:
    with pytest.raises(ValueError, match="metadata has 100 bytes, less than its superblock"):
        MetaTable(FakeMapping(100))
    with pytest.raises(ValueError, match="not pool metadata: it starts with"):
        MetaTable(FakeMapping(meta_bytes(5)))


@pytest.mark.parametrize("at", range(76))
def test_any_wrong_byte_of_the_superblock_is_found(at: int, fake: FakeMapping) -> None:
    fake.data[at] ^= 0x40
    with pytest.raises(ValueError, match=r"not pool metadata|is not known|damaged"):
        MetaTable(fake)


def test_version_that_is_not_known_is_named(fake: FakeMapping) -> None:
    fake.data[8] = 2
    with pytest.raises(ValueError, match="metadata version 2 with headers of 128 bytes"):
        MetaTable(fake)


def test_metadata_cut_short_is_not_opened(fake: FakeMapping) -> None:
    del fake.data[-1:]
    with pytest.raises(ValueError, match="5 blocks need 4736 bytes of metadata, it has 4735"):
        MetaTable(fake)


@pytest.mark.parametrize("block", [-1, 5, 1 << 40])
def test_block_outside_the_pool(block: int, fake: FakeMapping) -> None:
    table = MetaTable(fake)
    calls = (
        lambda: table.begin_fill(block),
        lambda: table.commit(block, NAMESPACE, HASH, 1),
        lambda: table.free(block),
        lambda: table.read(block),
    )
    for call in calls:
        with pytest.raises(IndexError, match=f"block {block} is outside the 5 blocks"):
            call()
    assert fake.writes == []


@pytest.mark.parametrize(
    ("namespace", "block_hash", "tokens", "flags", "message"),
    [
        (b"n", HASH, 1, 0, "namespace must have 32 bytes, got 1"),
        (NAMESPACE, HASH + b"x", 1, 0, "block_hash must have 32 bytes, got 33"),
        (NAMESPACE, HASH, -1, 0, r"tokens must be between 0 and 2\^32 - 1, got -1"),
        (NAMESPACE, HASH, 1 << 32, 0, "tokens must be between 0 and"),
        (NAMESPACE, HASH, 1, 1 << 32, "flags must be between 0 and"),
    ],
)
def test_commit_refused_leaves_the_block_filling(
    namespace: bytes, block_hash: bytes, tokens: int, flags: int, message: str, fake: FakeMapping
) -> None:
    table = MetaTable(fake)
    table.begin_fill(1)
    fake.writes.clear()
    with pytest.raises(ValueError, match=message):
        table.commit(1, namespace, block_hash, tokens, flags)
    assert fake.writes == []
    assert table.read(1).state is BlockState.FILLING


@pytest.mark.parametrize("ready", [False, True])
def test_commit_needs_begin_fill(ready: bool, fake: FakeMapping) -> None:
    table = MetaTable(fake)
    if ready:
        commit(table, 2)
    fake.writes.clear()
    with pytest.raises(ValueError, match="block 2 is not filling: begin_fill comes before commit"):
        table.commit(2, NAMESPACE, HASH, 1)
    assert fake.writes == []


@pytest.mark.parametrize("at", range(HEADER_BYTES))
def test_any_wrong_byte_of_a_ready_header_is_found(at: int, fake: FakeMapping) -> None:
    table = MetaTable(fake)
    commit(table, 3)
    for bit in range(8):
        fake.data[offset_of(3) + at] ^= 1 << bit
        assert table.read(3).state is BlockState.TORN
        assert [header.state for header in table.scan()] == [BlockState.TORN]
        fake.data[offset_of(3) + at] ^= 1 << bit
    assert table.read(3).state is BlockState.READY


def test_state_is_stored_last_with_release_order(fake: FakeMapping) -> None:
    table = MetaTable(fake)
    commit(table, 3)
    kinds = [(kind, offset) for kind, offset, _ in fake.writes]
    assert kinds[0] == kinds[-1] == ("release", offset_of(3))
    between = fake.writes[1:-1]
    assert between
    for kind, offset, length in between:
        assert kind == "bytes"
        assert offset_of(3) + 4 <= offset
        assert offset + length <= offset_of(4)


def test_death_at_any_write_of_a_commit_never_shows_a_wrong_header(fake: FakeMapping) -> None:
    table = MetaTable(fake)
    commit(table, 0)
    old = table.read(0)
    image = bytes(fake.data)
    for survived in range(4):
        fake.data[:] = image
        fake.writes_left = survived
        try:
            table.begin_fill(0)
            table.commit(0, b"m" * 32, b"g" * 32, 64)
        except KeyboardInterrupt:
            died = True
        else:
            died = False
        fake.writes_left = 1 << 30
        header = MetaTable(fake).read(0)
        if survived == 0:
            assert header == old
        elif died:
            assert header.state is BlockState.FILLING
        else:
            assert header == Header(0, BlockState.READY, 2, b"m" * 32, b"g" * 32, 64, 0)
    assert not died


def test_format_writes_its_magic_last_and_voids_the_old_one_first() -> None:
    mapping = FakeMapping(meta_bytes(5))
    table = MetaTable.format(mapping, SHAPE)
    commit(table, 1)
    mapping.writes.clear()
    MetaTable.format(mapping, SHAPE._replace(block_stride=64))
    assert mapping.writes[0] == ("release", 0, 8)
    assert mapping.writes[-1] == ("release", 0, 8)
    assert list(MetaTable(mapping).scan()) == []
    writes = len(mapping.writes)
    for survived in range(1, writes):
        commit(MetaTable.format(mapping, SHAPE), 1)
        mapping.writes_left = survived
        with pytest.raises(KeyboardInterrupt):
            MetaTable.format(mapping, SHAPE._replace(block_stride=64))
        mapping.writes_left = 1 << 30
        with pytest.raises(ValueError, match="not pool metadata"):
            MetaTable(mapping)


def test_bytes_on_the_page_are_fixed(fake: FakeMapping) -> None:
    table = MetaTable(fake)
    commit(table, 4, tokens=0x01020304, flags=0x05060708)
    header = bytes(fake.data[offset_of(4) :])
    assert header[:4] == b"YDER"  # READY, little endian
    assert header[4:8] == b"\1\0\0\0"
    assert header[8:40] == NAMESPACE
    assert header[40:72] == HASH
    assert header[72:80] == b"\4\3\2\1\x08\7\6\5"
    assert header[80:124] == bytes(44)
    assert fake.data[:12] == b"KVDMETA1\1\0\0\0"


def test_sequence_counts_commits_and_wraps(fake: FakeMapping) -> None:
    table = MetaTable(fake)
    for want in (1, 2, 3):
        commit(table, 0)
        assert table.read(0).seq == want
    fake.data[offset_of(0) + 4 : offset_of(0) + 8] = b"\xff" * 4
    commit(table, 0)
    assert table.read(0).seq == 0


def test_scan_yields_what_is_not_reset_in_order(fake: FakeMapping) -> None:
    table = MetaTable(fake)
    commit(table, 4)
    table.begin_fill(2)
    commit(table, 1)
    commit(table, 0)
    table.free(0)
    assert [(header.block, header.state) for header in MetaTable(fake).scan()] == [
        (1, BlockState.READY),
        (2, BlockState.FILLING),
        (4, BlockState.READY),
    ]


@pytest.fixture
def real() -> Iterator[Mapping]:
    """Give a real mapping with room for 20,000 blocks."""
    fd = os.memfd_create("kvd-meta", os.MFD_CLOEXEC)
    os.ftruncate(fd, meta_bytes(20_000))
    mapping = Mapping(fd, meta_bytes(20_000), writable=True)
    yield mapping
    mapping.close()
    os.close(fd)


def test_real_mapping_is_read_again_by_the_next_life(real: Mapping) -> None:
    shape = Superblock(9 * GIB, 20_000, 180 * TIB, DIGEST)  # spans far beyond 32 bits
    table = MetaTable.format(real, shape)
    blocks = (0, 8191, 8192, 19_999)
    for block in blocks:
        commit(table, block, tokens=block)
    again = MetaTable(real)
    assert again.superblock == shape
    assert [(header.block, header.tokens) for header in again.scan()] == [
        (block, block) for block in blocks
    ]
    assert again.read(8192) == Header(8192, BlockState.READY, 1, NAMESPACE, HASH, 8192, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "commit", "free"]),
            st.integers(0, 4),
            st.integers(0, (1 << 32) - 1),
            st.binary(min_size=32, max_size=32),
        ),
        max_size=30,
    )
)
def test_any_history_reads_back_as_a_plain_model(
    steps: list[tuple[str, int, int, bytes]],
) -> None:
    mapping = FakeMapping(meta_bytes(5))
    table = MetaTable.format(mapping, SHAPE)
    model: dict[int, tuple[BlockState, bytes, int]] = {}
    for kind, block, tokens, digest in steps:
        if kind == "begin":
            table.begin_fill(block)
            model[block] = (BlockState.FILLING, b"", 0)
        elif kind == "free":
            table.free(block)
            model.pop(block, None)
        elif model.get(block, (None,))[0] is BlockState.FILLING:
            table.commit(block, NAMESPACE, digest, tokens)
            model[block] = (BlockState.READY, digest, tokens)
    found = {
        header.block: (header.state, header.hash, header.tokens)
        if header.state is BlockState.READY
        else (header.state, b"", 0)
        for header in MetaTable(mapping).scan()
    }
    assert found == model
