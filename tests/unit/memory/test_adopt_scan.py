"""The native scan of a pool's headers against `MetaTable.scan`, whatever the headers hold."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core import block_types
from kvd.memory.adopt_scan import Scanned, scan_ready
from kvd.memory.layout_v1 import (
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    BlockState,
    Header,
    MetaTable,
    Superblock,
    meta_bytes,
)
from kvd_kernels.host import BlockIndex, Mapping

BLOCKS = 12
SHAPE = Superblock(4096, BLOCKS, BLOCKS * 4096, bytes(32))


@contextmanager
def metadata() -> Iterator[tuple[Mapping, MetaTable]]:
    """Formatted metadata of `BLOCKS` blocks."""
    fd = os.memfd_create("kvd-meta", os.MFD_CLOEXEC)
    os.ftruncate(fd, meta_bytes(BLOCKS))
    mapping = Mapping(fd, meta_bytes(BLOCKS), writable=True)
    os.close(fd)
    yield mapping, MetaTable.format(mapping, SHAPE)
    mapping.close()


def digest(number: int) -> bytes:
    """A hash or a namespace."""
    return bytes([number]) * 32


def ready(
    table: MetaTable, block: int, *, namespace: int = 1, key: int = 1, tokens: int = 4
) -> None:
    """Make a block ready."""
    table.begin_fill(block)
    table.commit(block, digest(namespace), digest(key), tokens)


def test_metadata_that_is_none_is_refused_and_the_index_stays() -> None:
    index = BlockIndex(1)
    index.put(0, digest(1), 0)
    with metadata() as (mapping, _):
        mapping.store_u64(0, 0)
        with pytest.raises(ValueError, match="not pool metadata"):
            scan_ready(mapping, index)
    assert len(index) == 1


def test_damaged_header_is_torn_and_its_key_is_not_found() -> None:
    index = BlockIndex(0)
    with metadata() as (mapping, table):
        ready(table, 3)
        mapping.write_bytes(SUPERBLOCK_BYTES + 3 * HEADER_BYTES + 50, b"\7")
        found = scan_ready(mapping, index)
    assert (found.torn, found.duplicates, found.digests) == ((3,), (), ())
    assert found.columns.states == bytes(BLOCKS)
    assert len(index) == 0


def test_second_block_of_a_key_is_told_and_the_first_is_found() -> None:
    index = BlockIndex(0)
    with metadata() as (mapping, table):
        ready(table, 5, namespace=1)
        ready(table, 2, namespace=1)
        ready(table, 7, namespace=2)
        found = scan_ready(mapping, index)
    assert found.duplicates == (5,)
    assert found.digests == (digest(1), digest(2))
    assert index.get(0, digest(1)) == 2
    assert index.get(1, digest(1)) == 7
    assert list(found.columns.states) == [0, 0, 2, 0, 0, 0, 0, 2, 0, 0, 0, 0]


def test_what_the_index_held_is_forgotten() -> None:
    index = BlockIndex(1)
    index.put(0, digest(9), 0)
    with metadata() as (mapping, _):
        scan_ready(mapping, index)
    assert index.get(0, digest(9)) is None
    assert index.capacity == BLOCKS


@pytest.mark.parametrize("total", [6, 40])
def test_pool_of_another_size_keeps_what_lies_in_both(total: int) -> None:
    index = BlockIndex(0)
    with metadata() as (mapping, table):
        for block in (5, 6, 11):
            ready(table, block, key=block)
        found = scan_ready(mapping, index, total)
    assert len(found.columns) == total
    assert index.capacity == total
    kept = [block for block in (5, 6, 11) if block < total]
    assert [b for b, state in enumerate(found.columns.states) if state] == kept
    assert len(index) == len(kept)
    assert found.superblock == SHAPE


A_STEP = st.tuples(
    st.sampled_from(["ready", "ready", "ready", "fill", "free", "harm"]),
    st.integers(0, BLOCKS - 1),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 127),
)


@settings(deadline=None)
@given(st.lists(A_STEP, max_size=30))
def test_any_headers_are_read_as_the_plain_scan_reads_them(
    steps: list[tuple[str, int, int, int, int]],
) -> None:
    index = BlockIndex(0)
    with metadata() as (mapping, table):
        for kind, block, namespace, key, byte in steps:
            if kind == "ready":
                ready(table, block, namespace=namespace, key=key, tokens=1 + byte)
            elif kind == "fill":
                table.begin_fill(block)
            elif kind == "free":
                table.free(block)
            else:
                mapping.write_bytes(SUPERBLOCK_BYTES + block * HEADER_BYTES + byte, b"\x5a")
        plain = list(table.scan())
        found = scan_ready(mapping, index)
    expect(found, index, plain)


def expect(found: Scanned, index: BlockIndex, plain: list[Header]) -> None:
    """Compare with headers as objects, of which the first of a key counts."""
    states = [block_types.BlockState.RESET] * BLOCKS
    keys: dict[tuple[bytes, bytes], int] = {}
    duplicates = []
    for header in plain:
        key = (header.namespace, header.hash)
        if header.state is BlockState.FILLING:
            states[header.block] = block_types.BlockState.FILLING
        elif header.state is BlockState.READY and key in keys:
            duplicates.append(header.block)
        elif header.state is BlockState.READY:
            keys[key] = header.block
            states[header.block] = block_types.BlockState.READY
            number, block_hash = found.columns.key(header.block)
            assert (found.digests[number], block_hash) == key
            assert found.columns.tokens[header.block] == header.tokens
    torn = [header.block for header in plain if header.state is BlockState.TORN]
    assert (list(found.torn), list(found.duplicates)) == (torn, duplicates)
    assert list(found.columns.states) == states
    assert len(index) == len(keys)
    for (namespace, block_hash), block in keys.items():
        assert index.get(found.digests.index(namespace), block_hash) == block
    unused = [b for b in range(BLOCKS) if states[b] != block_types.BlockState.READY]
    assert all(found.columns.tokens[block] == 0 for block in unused)
