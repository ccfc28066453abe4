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
from kvd_kernels.host import Mapping, crc32c, scan_headers
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
    try:
        yield mapping
    finally:
        mapping.close()


def digest(number: int) -> bytes:
    """A namespace as headers have it."""
    return bytes([number]) * 32


@pytest.mark.parametrize(
    ("name", "length"), [("namespaces", 1), ("hashes", 63), ("tokens", 3), ("namespaces", 0)]
)
def test_a_column_of_another_length_is_refused(
    make_region: MakeRegion, name: str, length: int
) -> None:
    names = ("states", "namespaces", "hashes", "tokens")
    given_columns: dict[str, bytearray | array[int]] = dict(zip(names, columns(2), strict=True))
    given_columns[name] = bytearray(length) if name == "hashes" else array("I", [0]) * length
    region = make_region(4096, header(READY))
    with pytest.raises(ValueError, match=f"{name} has .* bytes, not "):
        scan_headers(region, 0, b"", 1, **given_columns)
    assert given_columns["states"] == bytes(2)


def test_a_column_that_is_read_only_is_refused(make_region: MakeRegion) -> None:
    _, namespaces, hashes, tokens = columns(2)
    with pytest.raises(ValueError, match="states is read-only"):
        scan_headers(make_region(4096), 0, b"", 1, bytes(2), namespaces, hashes, tokens)


def test_digests_that_are_not_whole_are_refused(make_region: MakeRegion) -> None:
    with pytest.raises(ValueError, match="digests has 33 bytes, not 32"):
        scan_headers(make_region(4096), 0, bytes(33), 1, *columns(1))


@pytest.mark.parametrize("tokens_max", [-1, 0, 2**32])
def test_a_token_count_out_of_range_is_refused(make_region: MakeRegion, tokens_max: int) -> None:
    with pytest.raises(ValueError, match=f"tokens_max is {tokens_max} but must be 1 to 4294967295"):
        scan_headers(make_region(4096), 0, b"", tokens_max, *columns(1))


def test_headers_outside_the_mapping_are_refused(make_region: MakeRegion) -> None:
    region = make_region(4096)
    with pytest.raises(IndexError, match="lies outside the mapping of size 4096"):
        scan_headers(region, 0, b"", 1, *columns(33))
    with pytest.raises(IndexError):
        scan_headers(region, -128, b"", 1, *columns(1))
    with pytest.raises(ValueError, match="offset 2 must be a multiple of 4"):
        scan_headers(region, 2, b"", 1, *columns(1))


def test_a_closed_mapping_is_refused(make_region: MakeRegion) -> None:
    region = make_region(4096)
    region.close()
    with pytest.raises(ValueError, match="closed"):
        scan_headers(region, 0, b"", 1, *columns(1))


def test_what_is_whole_but_of_no_use_is_odd(make_region: MakeRegion) -> None:
    all_of = [header(READY, 1, tokens=n) for n in (0, 1, 4, 5)] + [header(READY, 2, tokens=1)]
    ours = columns(5)
    region = make_region(4096, b"".join(all_of))
    assert scan_headers(region, 0, digest(1), 4, *ours) == ([], [0, 3, 4])
    assert list(ours[0]) == [0, 2, 2, 0, 0]


A_HEADER = st.builds(
    header,
    st.sampled_from([0, FILLING, READY, READY, READY, READY, 5]),
    st.integers(0, 3),
    st.integers(0, 9),
    st.integers(0, 9) | st.integers(0, 2**32 - 1),
)
DAMAGE = st.lists(st.tuples(st.integers(0, 2**16), st.integers(1, 255)), max_size=3)
DIGESTS = digest(2) + digest(0) + digest(1)


@settings(max_examples=200, deadline=None)
@given(st.lists(A_HEADER, min_size=1, max_size=40), DAMAGE)
def test_any_headers_read_as_the_reference(
    headers: list[bytes], damage: list[tuple[int, int]]
) -> None:
    data = bytearray(b"".join(headers))
    for at, flip in damage:
        data[at % len(data)] ^= flip
    ours, theirs = columns(len(headers)), columns(len(headers))
    with memory_of(bytes(data)) as region:
        found = scan_headers(region, 0, DIGESTS, 8, *ours)
    assert found == reference.scan_headers(bytes(data), DIGESTS, 8, *theirs)
    assert ours == theirs


def test_many_namespaces_keep_their_numbers(make_region: MakeRegion) -> None:
    rng = random.Random(3)
    names = [rng.randrange(250) for _ in range(1000)]
    digests = b"".join(map(digest, rng.sample(range(250), 200)))
    data = b"".join(header(READY, name, block % 256, 1) for block, name in enumerate(names))
    ours, theirs = columns(1000), columns(1000)
    found = scan_headers(make_region(len(data), data), 0, digests, 1, *ours)
    assert found == reference.scan_headers(data, digests, 1, *theirs)
    assert ours == theirs
