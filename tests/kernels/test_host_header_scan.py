"""scan_headers: refusals, and any metadata against the reference."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_kernels import reference
from kvd_kernels.host import BlockIndex, Mapping, crc32c, scan_headers
from tests.kernels.conftest import MakeRegion

FILLING, READY = 0x46494C4C, 0x52454459
Columns = tuple[bytearray, "array[int]", bytearray, "array[int]"]


def columns(count: int) -> Columns:
    """Columns of zeros."""
    return bytearray(count), array("I", [0]) * count, bytearray(32 * count), array("I", [0]) * count


def header(word: int, namespace: int = 0, key: int = 0, tokens: int = 0) -> bytes:
    """A header with the right checksum."""
    body = b"\0\0\0\1" + bytes([namespace]) * 32 + bytes([key]) * 32
    body += tokens.to_bytes(4, "little")
    body = body.ljust(120, b"\0")
    return word.to_bytes(4, "little") + body + crc32c(body).to_bytes(4, "little")


@contextmanager
def memory_of(data: bytes) -> Iterator[Mapping]:
    """A mapping that holds these bytes."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.pwrite(fd, data, 0)
    mapping = Mapping(fd, len(data), writable=False)
    os.close(fd)
    yield mapping
    mapping.close()


@pytest.mark.parametrize(
    ("name", "length"), [("namespaces", 1), ("hashes", 63), ("tokens", 3), ("namespaces", 0)]
)
def test_a_column_of_another_length_is_refused(
    make_region: MakeRegion, name: str, length: int
) -> None:
    index = BlockIndex(2)
    names = ("states", "namespaces", "hashes", "tokens")
    given_columns: dict[str, bytearray | array[int]] = dict(zip(names, columns(2), strict=True))
    given_columns[name] = bytearray(length) if name == "hashes" else array("I", [0]) * length
    with pytest.raises(ValueError, match=f"{name} has .* bytes, not "):
        scan_headers(make_region(4096, header(READY)), 0, index, **given_columns)
    assert len(index) == 0


def test_a_column_that_is_read_only_is_refused(make_region: MakeRegion) -> None:
    _, namespaces, hashes, tokens = columns(2)
    with pytest.raises(ValueError, match="states is read-only"):
        scan_headers(make_region(4096), 0, BlockIndex(2), bytes(2), namespaces, hashes, tokens)


def test_headers_outside_the_mapping_are_refused(make_region: MakeRegion) -> None:
    region = make_region(4096)
    with pytest.raises(IndexError, match="lies outside the mapping of size 4096"):
        scan_headers(region, 0, BlockIndex(33), *columns(33))
    with pytest.raises(IndexError):
        scan_headers(region, -128, BlockIndex(1), *columns(1))
    with pytest.raises(ValueError, match="offset 2 must be a multiple of 4"):
        scan_headers(region, 2, BlockIndex(1), *columns(1))


def test_an_index_without_room_is_refused(make_region: MakeRegion) -> None:
    index = BlockIndex(3)
    index.put(0, bytes(32), 0)
    with pytest.raises(ValueError, match="the index has room for 2 more keys, not for 3"):
        scan_headers(make_region(4096), 0, index, *columns(3))
    assert len(index) == 1


def test_a_closed_mapping_is_refused(make_region: MakeRegion) -> None:
    region = make_region(4096)
    region.close()
    with pytest.raises(ValueError, match="closed"):
        scan_headers(region, 0, BlockIndex(1), *columns(1))


def test_an_index_serves_again_after_a_scan(make_region: MakeRegion) -> None:
    index = BlockIndex(2)
    states, namespaces, hashes, tokens = columns(2)
    region = make_region(4096, header(READY, 1, 7, 5) + header(FILLING))
    found = scan_headers(region, 0, index, states, namespaces, hashes, tokens)
    assert found == ([b"\1" * 32], [], [])
    assert (list(states), list(tokens), bytes(hashes[:32])) == ([2, 1], [5, 0], b"\7" * 32)
    assert index.prefix(0, b"\7" * 32) == [0]


A_HEADER = st.builds(
    header,
    st.sampled_from([0, FILLING, READY, READY, READY, READY, 5]),
    st.integers(0, 2),
    st.integers(0, 9),
    st.integers(0, 2**32 - 1),
)
DAMAGE = st.lists(st.tuples(st.integers(0, 2**16), st.integers(1, 255)), max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.lists(A_HEADER, min_size=1, max_size=40), DAMAGE)
def test_any_headers_read_as_the_reference(
    headers: list[bytes], damage: list[tuple[int, int]]
) -> None:
    data = bytearray(b"".join(headers))
    for at, flip in damage:
        data[at % len(data)] ^= flip
    count = len(headers)
    index, model = BlockIndex(count), reference.BlockIndex(count)
    ours, theirs = columns(count), columns(count)
    with memory_of(bytes(data)) as region:
        found = scan_headers(region, 0, index, *ours)
    assert found == reference.scan_headers(bytes(data), model, *theirs)
    assert ours == theirs
    assert len(index) == len(model)
    for block, state in enumerate(ours[0]):
        if state == 2:
            key = ours[1][block], bytes(ours[2][32 * block : 32 * block + 32])
            assert index.get(*key) == model.get(*key) == block


def test_many_namespaces_are_numbered_in_order_of_appearance(make_region: MakeRegion) -> None:
    rng = random.Random(3)
    names = [rng.randrange(200) for _ in range(1000)]
    data = b"".join(header(READY, name, block % 256, 1) for block, name in enumerate(names))
    ours, theirs = columns(1000), columns(1000)
    index, model = BlockIndex(1000), reference.BlockIndex(1000)
    found = scan_headers(make_region(len(data), data), 0, index, *ours)
    assert found == reference.scan_headers(data, model, *theirs)
    assert ours == theirs
