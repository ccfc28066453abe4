"""crc32c: refusals, published vectors, and both native paths against the reference."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_kernels import _host, reference
from kvd_kernels.host import Mapping, crc32c

# RFC 3720, appendix B.4, and the check value of the catalogue of CRCs.
VECTORS = [
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


@pytest.mark.parametrize("seed", [-1, 2**32, 2**70])
def test_a_seed_that_is_no_u32_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=f"seed is {seed} but must be 0 to 4294967295"):
        crc32c(b"abc", seed)


def test_only_contiguous_bytes_are_taken() -> None:
    with pytest.raises(TypeError, match="data must be a bytes-like object, not str"):
        crc32c("abc")  # type: ignore[arg-type]
    with pytest.raises(BufferError):
        crc32c(memoryview(b"abcdef")[::2])


@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_published_vectors(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected
    assert _host.crc32c_table(data) == expected
    assert reference.crc32c(data) == expected


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=2000), st.integers(0, 2**32 - 1))
def test_any_bytes_and_seed(data: bytes, seed: int) -> None:
    assert crc32c(data, seed) == reference.crc32c(data, seed)
    assert _host.crc32c_table(data) == reference.crc32c(data)


@pytest.mark.parametrize("base", [8, 256, 768, 4096, 12288, 16384, 24576])
def test_lengths_around_every_stream_boundary(base: int) -> None:
    data = random.Random(base).randbytes(base + 10)
    for length in range(base - 9, base + 10):
        assert crc32c(data[:length]) == _host.crc32c_table(data[:length]), length


def test_a_long_buffer_equals_the_reference() -> None:
    data = random.Random(7).randbytes(50_001)
    assert crc32c(data) == reference.crc32c(data)


def test_the_seed_continues_a_crc() -> None:
    data = random.Random(1).randbytes(30_000)
    whole = crc32c(data)
    for cut in (0, 1, 7, 768, 12288, 20_000, len(data)):
        assert crc32c(data[cut:], crc32c(data[:cut])) == whole


def test_any_contiguous_buffer_counts_as_its_bytes(make_region: Callable[..., Mapping]) -> None:
    data = random.Random(2).randbytes(40_000)
    region = make_region(65536, data)
    assert crc32c(region.view(0, len(data))) == crc32c(data)
    assert crc32c(array("Q", data)) == crc32c(data)
    assert crc32c(bytearray(data)) == crc32c(data)
