"""The native scan of a pool's headers against `MetaTable.scan`, whatever the headers hold."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core import block_types
from kvd.core.adopted import AdoptedBlocks
from kvd.memory.adopt_scan import scan_ready
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

BLOCKS = 12
SHAPE = Superblock(4096, BLOCKS, BLOCKS * 4096, bytes(32))


@contextmanager
def metadata() -> Iterator[tuple[Mapping, MetaTable]]:
    """Formatted metadata of `BLOCKS` blocks."""
    fd = os.memfd_create("kvd-meta", os.MFD_CLOEXEC)
    os.ftruncate(fd, meta_bytes(BLOCKS))
    mapping = Mapping(fd, meta_bytes(BLOCKS), writable=True)
    os.close(fd)
    try:
        yield mapping, MetaTable.format(mapping, SHAPE)
    finally:
        mapping.close()


def digest(number: int) -> bytes:
    """A hash or a namespace."""
    return bytes([number]) * 32


DIGESTS = tuple(map(digest, (2, 0, 1)))


def ready(
    table: MetaTable, block: int, *, namespace: int = 1, key: int = 1, tokens: int = 4
) -> None:
    """Make a block ready."""
    table.begin_fill(block)
    table.commit(block, digest(namespace), digest(key), tokens)


def test_metadata_that_is_none_is_refused() -> None:
    with metadata() as (mapping, _):
        mapping.store_u64(0, 0)
        with pytest.raises(ValueError, match="not pool metadata"):
            scan_ready(mapping, DIGESTS, 8)


def test_damaged_header_is_torn_and_its_key_is_not_found() -> None:
    with metadata() as (mapping, table):
        ready(table, 3)
        mapping.write_bytes(SUPERBLOCK_BYTES + 3 * HEADER_BYTES + 50, b"\7")
        found = scan_ready(mapping, DIGESTS, 8)
        assert table.read(3).state is BlockState.TORN
    assert (found.torn, found.odd) == ([3], [])
    assert found.columns.states == bytes(BLOCKS)


def test_block_of_a_namespace_that_nobody_recorded_or_of_too_many_tokens_is_odd() -> None:
    with metadata() as (mapping, table):
        ready(table, 5, namespace=9)
        ready(table, 6, tokens=9)
        ready(table, 7, tokens=8)
        found = scan_ready(mapping, DIGESTS, 8)
    assert (found.torn, found.odd) == ([], [5, 6])
    assert list(found.columns.states) == [0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0]


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
    with metadata() as (mapping, table):
        for kind, block, namespace, key, byte in steps:
            if kind == "ready":
                ready(table, block, namespace=namespace, key=key, tokens=byte % 10)
            elif kind == "fill":
                table.begin_fill(block)
            elif kind == "free":
                table.free(block)
            else:
                mapping.write_bytes(SUPERBLOCK_BYTES + block * HEADER_BYTES + byte, b"\x5a")
        plain = list(table.scan())
        found = scan_ready(mapping, DIGESTS, 8)
    expect(found, plain)


def expect(found: AdoptedBlocks, plain: list[Header]) -> None:
    """Compare with headers as objects."""
    states = [block_types.BlockState.RESET] * BLOCKS
    odd = []
    for header in plain:
        if header.state is BlockState.FILLING:
            states[header.block] = block_types.BlockState.FILLING
        elif header.state is BlockState.READY:
            if header.namespace not in DIGESTS or not 0 < header.tokens <= 8:
                odd.append(header.block)
                continue
            states[header.block] = block_types.BlockState.READY
            number, block_hash = found.columns.key(header.block)
            assert (DIGESTS[number], block_hash) == (header.namespace, header.hash)
            assert found.columns.tokens[header.block] == header.tokens
    torn = [header.block for header in plain if header.state is BlockState.TORN]
    assert (found.torn, found.odd) == (torn, odd)
    assert list(found.columns.states) == states
    unused = [b for b in range(BLOCKS) if states[b] != block_types.BlockState.READY]
    assert all(found.columns.tokens[block] == 0 for block in unused)
