"""copy_spans: refusals first, then every kernel against the reference."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_kernels import reference
from kvd_kernels.host import Mapping, copy_kernels, copy_spans

MakeRegion = Callable[..., Mapping]
MakeMemfd = Callable[..., int]

KERNELS = copy_kernels()
PAGE = mmap.PAGESIZE
SIZE = 16 * PAGE
EDGES = (0, 1, 63, 64, 65, 127, 128, 255, 256, 257, 511, 512, 640, 1152, 4095, 4096, 4097)
LARGE = (9216, 18432, 24576, 24577, 32768, 49152, 49151, 65537, 147456, (1 << 20) + 3)


def triples(*spans: tuple[int, int, int]) -> array[int]:
    return array("Q", [word for span in spans for word in span])


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ((SIZE, 0, 1), f"span 1: 1 bytes at dst offset {SIZE} do not fit the mapping of {SIZE} "),
        ((0, SIZE - 7, 8), f"span 1: 8 bytes at src offset {SIZE - 7} "),
        ((0, 0, SIZE + 1), f"span 1: {SIZE + 1} bytes at dst"),
        ((2**64 - 1, 0, 16), f"dst offset {2**64 - 1}"),
        ((0, 2**64 - 8, 16), f"src offset {2**64 - 8}"),
        ((64, 0, 2**64 - 1), f"span 1: {2**64 - 1} bytes"),
        ((SIZE + 1, 0, 0), f"dst offset {SIZE + 1}"),
    ],
)
def test_one_bad_span_refuses_the_whole_list(
    make_region: MakeRegion, bad: tuple[int, int, int], text: str
) -> None:
    src, dst = make_region(SIZE, noise(SIZE)), make_region(SIZE)
    with pytest.raises(IndexError, match=text):
        copy_spans(dst, src, triples((0, 0, 4096), bad, (SIZE + 5, 0, 1)))
    assert dst.read_bytes(0, SIZE) == bytes(SIZE)


def test_a_list_that_is_not_triples_is_refused(make_region: MakeRegion) -> None:
    src, dst = make_region(SIZE), make_region(SIZE)
    for words in (array("Q", [0, 0]), array("Q", [0, 0, 1, 4]), b"\0" * 25):
        with pytest.raises(ValueError, match="multiple of 24"):
            copy_spans(dst, src, words)


@pytest.mark.parametrize("code", ["d", "I", "i", "H", "f"])
def test_other_element_types_are_refused(make_region: MakeRegion, code: str) -> None:
    with pytest.raises(TypeError, match=f"format '{code}'"):
        copy_spans(make_region(SIZE), make_region(SIZE), array(code, [0] * 6))


def test_a_list_in_foreign_byte_order_is_refused(make_region: MakeRegion) -> None:
    big = (ctypes.c_uint64.__ctype_be__ * 3)()
    with pytest.raises(TypeError, match="format '>"):
        copy_spans(make_region(SIZE), make_region(SIZE), big)


def test_a_list_with_gaps_is_refused(make_region: MakeRegion) -> None:
    gaps = memoryview(triples((0, 0, 1), (0, 0, 1)))[::2]
    with pytest.raises(BufferError):
        copy_spans(make_region(SIZE), make_region(SIZE), gaps)
    with pytest.raises(TypeError, match="spans must be a bytes-like object, not list"):
        copy_spans(make_region(SIZE), make_region(SIZE), [0, 0, 1])  # type: ignore[arg-type]


def test_a_read_only_destination_is_refused(make_region: MakeRegion) -> None:
    with pytest.raises(ValueError, match="read-only"):
        copy_spans(make_region(SIZE, writable=False), make_region(SIZE), triples((0, 0, 1)))


def test_an_unknown_kernel_is_refused(make_region: MakeRegion) -> None:
    with pytest.raises(ValueError, match=f"'warp' does not run .* auto, {', '.join(KERNELS)}"):
        copy_spans(make_region(SIZE), make_region(SIZE), b"", kernel="warp")


@pytest.mark.parametrize("kernel", KERNELS)
def test_overlap_within_one_mapping_is_refused(make_region: MakeRegion, kernel: str) -> None:
    data = noise(SIZE)
    region = make_region(SIZE, data)
    for spans in (
        triples((0, 0, 1)),
        triples((100, 0, 101)),
        triples((0, 100, 101)),
        triples((0, 4096, 64), (4096 + 63, 8192, 64)),
        triples((8192, 0, 64), (0, 8192 + 63, 64)),
    ):
        with pytest.raises(ValueError, match="also a source of this call"):
            copy_spans(region, region, spans, kernel=kernel)
    assert region.read_bytes(0, SIZE) == data


def test_overlap_is_seen_through_two_mappings_of_one_file(make_memfd: MakeMemfd) -> None:
    fd = make_memfd(SIZE)
    os.pwrite(fd, noise(SIZE), 0)
    low = Mapping(fd, 8 * PAGE, writable=True)
    high = Mapping(fd, 8 * PAGE, writable=True, offset=4 * PAGE)
    with pytest.raises(ValueError, match="also a source"):
        copy_spans(low, high, triples((4 * PAGE, 0, 1)))
    assert copy_spans(low, high, triples((0, 0, 4 * PAGE))) == 4 * PAGE
    assert low.read_bytes(0, 4 * PAGE) == high.read_bytes(0, 4 * PAGE)


# --- what is copied -------------------------------------------------------------------------------


def test_the_list_may_come_in_any_buffer_of_u64(make_region: MakeRegion) -> None:
    src, dst = make_region(SIZE, noise(SIZE)), make_region(SIZE)
    words = triples((8, 0, 100), (4096, 5, 3000))
    square = memoryview(words.tobytes()).cast("Q", shape=[2, 3])
    odd = memoryview(b"x" + words.tobytes())[1:]
    for spans in (words, words.tobytes(), square, odd, (ctypes.c_uint64 * 6)(*words)):
        assert copy_spans(dst, src, spans) == 3100
        assert dst.read_bytes(8, 100) == src.read_bytes(0, 100)
        assert dst.read_bytes(4096, 3000) == src.read_bytes(5, 3000)
        dst.write_bytes(0, bytes(SIZE))
    assert copy_spans(dst, src, b"") == 0


def test_scalar_is_last_and_auto_is_one_of_them(make_region: MakeRegion) -> None:
    assert KERNELS[-1] == "scalar"
    assert len(set(KERNELS)) == len(KERNELS)
    src, dst = make_region(SIZE, noise(SIZE)), make_region(SIZE)
    assert copy_spans(dst, src, triples((0, 0, SIZE)), kernel="auto") == SIZE
    assert dst.read_bytes(0, SIZE) == noise(SIZE)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", EDGES + LARGE)
def test_sizes_and_alignments(make_region: MakeRegion, kernel: str, size: int) -> None:
    total = size + 2 * PAGE
    content = noise(total)
    src, dst = make_region(total, content), make_region(total)
    for to, start in ((0, 0), (64, 128), (1, 0), (0, 1), (33, 17), (63, 64), (4095, 4001)):
        assert copy_spans(dst, src, triples((to, start, size)), kernel=kernel) == size
        expected = bytearray(total)
        expected[to : to + size] = content[start : start + size]
        assert dst.read_bytes(0, total) == expected
        dst.write_bytes(0, bytes(total))


@st.composite
def span_lists(draw: st.DrawFn, dst_size: int, src_size: int) -> list[tuple[int, int, int]]:
    """Draw spans with destinations that do not overlap each other, in any order."""
    lengths = st.one_of(st.sampled_from(EDGES + LARGE), st.integers(0, 20000))
    spans, end = [], 0
    for _ in range(draw(st.integers(0, 24))):
        to = end + draw(st.one_of(st.just(0), st.integers(0, 200)))
        length = min(draw(lengths), dst_size - to, src_size)
        if length < 0:
            break
        spans.append((to, draw(st.integers(0, src_size - length)), length))
        end = to + length
    return draw(st.permutations(spans))


DST_SIZE, SRC_SIZE = 256 * 1024 + 77, 192 * 1024 + 5


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_list_copies_as_the_reference_says(make_region: MakeRegion, kernel: str) -> None:
    content = noise(SRC_SIZE)
    src, dst = make_region(SRC_SIZE, content), make_region(DST_SIZE)
    blank = noise(DST_SIZE)

    @settings(max_examples=120, deadline=None)
    @given(span_lists(DST_SIZE, SRC_SIZE))
    def check(spans: list[tuple[int, int, int]]) -> None:
        words = triples(*spans)
        expected = bytearray(blank)
        moved = reference.copy_spans(expected, content, words)
        dst.write_bytes(0, blank)
        assert copy_spans(dst, src, words, kernel=kernel) == moved
        assert dst.read_bytes(0, DST_SIZE) == expected

    check()


def outcome(copy: Callable[[], int]) -> int | type[Exception]:
    try:
        return copy()
    except (IndexError, ValueError) as refused:
        return type(refused)


@pytest.mark.slow
def test_within_one_mapping_the_same_lists_are_refused_as_by_the_reference(
    make_region: MakeRegion,
) -> None:
    size = PAGE
    content = noise(size)
    region = make_region(size, content)
    span = st.tuples(st.integers(0, 120), st.integers(0, 120), st.integers(0, 9))

    @settings(max_examples=300, deadline=None)
    @given(st.lists(span, max_size=5))
    def check(spans: Sequence[tuple[int, int, int]]) -> None:
        # Spread out, so that about half of the lists have no overlap.
        words = triples(*((to * 8, start * 8, length * 8) for to, start, length in spans))
        region.write_bytes(0, content)
        expected = bytearray(content)
        wanted = outcome(lambda: reference.copy_spans(expected, expected, words))
        assert outcome(lambda: copy_spans(region, region, words)) == wanted
        ends = sorted((to, to + length) for to, _, length in spans if length)
        if all(first[1] <= second[0] for first, second in pairwise(ends)):
            assert region.read_bytes(0, size) == expected

    check()


@pytest.mark.parametrize("kernel", KERNELS)
def test_spans_beyond_4_gib(make_region: MakeRegion, kernel: str) -> None:
    size, far = 6 << 30, (5 << 30) + 64
    src, dst = make_region(size), make_region(size)
    data = noise(70000)
    src.write_bytes(far, data)
    assert copy_spans(dst, src, triples((far + 4096, far, len(data))), kernel=kernel) == len(data)
    assert dst.read_bytes(far + 4096, len(data)) == data
    assert dst.read_bytes(far + 4096 - (4 << 30), len(data)) == bytes(len(data))


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_last_bytes_of_a_mapping_are_copied(make_region: MakeRegion, kernel: str) -> None:
    """Fetching ahead reaches past the end there, which must stay without effect."""
    size = 2 * PAGE
    src, dst = make_region(size, noise(size)), make_region(size)
    for length in (600, 1152, 4096, size):
        assert copy_spans(dst, src, triples((0, size - length, length)) * 2, kernel=kernel)
        assert dst.read_bytes(0, length) == noise(size)[-length:]


def test_importing_the_module_imports_neither_numpy_nor_torch() -> None:
    script = (
        "import sys, kvd_kernels.host; "
        "raise SystemExit('numpy' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
