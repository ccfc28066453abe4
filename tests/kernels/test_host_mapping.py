"""Mapping: refusals first, then words, views and residency."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd_kernels.host import Mapping, copy_spans

MakeRegion = Callable[..., Mapping]
MakeMemfd = Callable[..., int]

PAGE = mmap.PAGESIZE
SIZE = 4 * PAGE
MIB = 1 << 20
F_SEAL_FUTURE_WRITE = 0x0010

OUTSIDE = [
    (-1, 8),
    (SIZE, 8),
    (SIZE - 4, 8),
    (0, SIZE + 1),
    (0, -1),
    (-(2**63), 8),
    (2**63, 8),
    (2**64 + 8, 8),
    (2**64 - 8, 2**64 - 8),
    (8, 2**64 - 8),
]


# --- refusals -------------------------------------------------------------------------------------


def test_a_file_shorter_than_asked_is_refused(make_memfd: MakeMemfd) -> None:
    fd = make_memfd(SIZE // 2)
    with pytest.raises(ValueError, match=rf"has {SIZE // 2} bytes.*length {SIZE}"):
        Mapping(fd, SIZE, writable=False)
    with pytest.raises(ValueError, match=rf"offset {SIZE // 2} and length 1 "):
        Mapping(fd, 1, writable=False, offset=SIZE // 2)


@pytest.mark.parametrize("length", [0, -1, 2**64])
def test_a_length_that_cannot_be_is_refused(make_memfd: MakeMemfd, length: int) -> None:
    with pytest.raises(ValueError, match=rf"length is {length} but must be 1 to "):
        Mapping(make_memfd(SIZE), length, writable=False)


def test_the_largest_length_does_not_wrap_round(make_memfd: MakeMemfd) -> None:
    with pytest.raises(ValueError, match="need more"):
        Mapping(make_memfd(SIZE), 2**63 - 1, writable=False, offset=PAGE)


def test_a_misaligned_offset_is_refused(make_memfd: MakeMemfd) -> None:
    with pytest.raises(ValueError, match=rf"offset 64 must be a multiple of .* {PAGE}"):
        Mapping(make_memfd(SIZE), PAGE, writable=False, offset=64)
    with pytest.raises(ValueError, match="offset is -1 "):
        Mapping(make_memfd(SIZE), PAGE, writable=False, offset=-1)


def test_a_descriptor_that_is_not_open_is_an_os_error(make_memfd: MakeMemfd) -> None:
    spare = os.dup(make_memfd(SIZE))
    os.close(spare)
    with pytest.raises(OSError, match=f"fd {spare}") as caught:
        Mapping(spare, SIZE, writable=False)
    assert caught.value.errno == errno.EBADF


def test_writing_needs_a_writable_descriptor(make_memfd: MakeMemfd) -> None:
    read_only = os.open(f"/proc/self/fd/{make_memfd(SIZE)}", os.O_RDONLY)
    try:
        with pytest.raises(PermissionError, match="for writing"):
            Mapping(read_only, SIZE, writable=True)
        assert not Mapping(read_only, SIZE, writable=False).writable
    finally:
        os.close(read_only)


def test_a_seal_against_new_writers_holds(make_memfd: MakeMemfd) -> None:
    fd = make_memfd(SIZE, os.MFD_ALLOW_SEALING)
    writer = Mapping(fd, SIZE, writable=True)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    with pytest.raises(PermissionError):
        Mapping(fd, SIZE, writable=True)
    reader = Mapping(fd, SIZE, writable=False)
    writer.store_u64(8, 77)
    assert reader.load_u64(8) == 77


@pytest.mark.parametrize(("offset", "length"), OUTSIDE)
def test_ranges_outside_are_index_errors(make_region: MakeRegion, offset: int, length: int) -> None:
    region = make_region(SIZE)
    text = rf"offset {offset} with length {length} .*size {SIZE}"
    for refused in (region.view, region.read_bytes, region.populate):
        with pytest.raises(IndexError, match=text):
            refused(offset, length)


@pytest.mark.parametrize("offset", [-8, SIZE, SIZE + 8, -(2**70), 2**63, 2**64])
def test_words_outside_are_index_errors(make_region: MakeRegion, offset: int) -> None:
    region = make_region(SIZE)
    for refused in (region.load_u64, region.load_u32):
        with pytest.raises(IndexError, match=rf"offset {offset} "):
            refused(offset)
    for stored in (region.store_u64, region.store_u32):
        with pytest.raises(IndexError, match=rf"offset {offset} "):
            stored(offset, 1)
    with pytest.raises(IndexError, match=rf"offset {offset} with length 1 "):
        region.write_bytes(offset, b"x")
    assert region.read_bytes(0, SIZE) == bytes(SIZE)


@pytest.mark.parametrize("offset", [1, 4, 12, SIZE - 9])
def test_a_misaligned_word_is_refused(make_region: MakeRegion, offset: int) -> None:
    region = make_region(SIZE)
    with pytest.raises(ValueError, match=rf"offset {offset} must be a multiple of 8"):
        region.load_u64(offset)
    with pytest.raises(ValueError, match=rf"offset {offset} must be a multiple of 8"):
        region.store_u64(offset, 1)
    with pytest.raises(ValueError, match="multiple of 4"):
        region.store_u32(2, 1)


@pytest.mark.parametrize("value", [-1, 2**64, 2**70])
def test_a_value_that_does_not_fit_is_refused(make_region: MakeRegion, value: int) -> None:
    region = make_region(SIZE)
    with pytest.raises(ValueError, match=rf"value {value} .* 8 bytes"):
        region.store_u64(0, value)
    with pytest.raises(ValueError, match=r"value 4294967296 .* 4 bytes"):
        region.store_u32(0, 2**32)
    assert region.read_bytes(0, 16) == bytes(16)


def test_a_read_only_mapping_refuses_stores(make_region: MakeRegion) -> None:
    region = make_region(SIZE, writable=False)
    stores: list[Callable[[], None]] = [
        lambda: region.store_u64(0, 1),
        lambda: region.store_u32(0, 1),
        lambda: region.write_bytes(0, b"x"),
    ]
    for store in stores:
        with pytest.raises(ValueError, match="read-only: map the fd with writable=True"):
            store()


def test_wrong_types_name_the_field(make_region: MakeRegion) -> None:
    region = make_region(SIZE)
    with pytest.raises(TypeError, match="offset must be an int, not str"):
        region.load_u64("8")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="length must be an int, not float"):
        region.view(0, 8.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="data must be a bytes-like object, not int"):
        region.write_bytes(0, 7)  # type: ignore[arg-type]
    with pytest.raises(BufferError):
        region.write_bytes(0, memoryview(b"abcdef")[::2])


def test_a_closed_mapping_refuses_everything(make_region: MakeRegion) -> None:
    region, other = make_region(SIZE), make_region(SIZE)
    region.close()
    region.close()
    assert region.closed
    assert region.size == SIZE
    uses: list[Callable[[], object]] = [
        lambda: region.address,
        lambda: region.view(),
        lambda: memoryview(region),
        lambda: region.read_bytes(0, 1),
        lambda: region.write_bytes(0, b"x"),
        lambda: region.load_u64(0),
        lambda: region.store_u64(0, 1),
        lambda: region.load_u32(0),
        lambda: region.store_u32(0, 1),
        lambda: region.populate(0, 1),
        region.smaps_page_kb,
        lambda: copy_spans(region, other, b""),
        lambda: copy_spans(other, region, b""),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="mapping is closed"):
            use()


@pytest.mark.parametrize("use_madvise", [True, False])
def test_a_page_that_cannot_be_had_is_an_error_not_a_signal(
    make_memfd: MakeMemfd, use_madvise: bool
) -> None:
    fd = make_memfd(SIZE)
    region = Mapping(fd, SIZE, writable=True)
    os.ftruncate(fd, PAGE)
    with pytest.raises(OSError, match="cannot make the mapping resident") as caught:
        region.populate(0, SIZE, use_madvise=use_madvise)
    assert caught.value.errno == errno.ENOMEM
    assert region.populate(0, PAGE, use_madvise=use_madvise) in ("madvise", "touch")


# --- content --------------------------------------------------------------------------------------


def test_two_mappings_of_one_file_show_the_same_bytes(make_memfd: MakeMemfd) -> None:
    fd = make_memfd(SIZE)
    writer = Mapping(fd, SIZE, writable=True)
    tail = Mapping(fd, SIZE - PAGE, writable=False, offset=PAGE)
    writer.write_bytes(PAGE + 3, b"hello")
    assert tail.read_bytes(3, 5) == b"hello"
    assert bytes(tail.view(2, 7)) == b"\0hello\0"
    assert tail.size == SIZE - PAGE


@pytest.mark.parametrize("length", [0, 1, 16384, 16385, 3 * MIB])
def test_bytes_come_back_as_written(make_region: MakeRegion, length: int) -> None:
    region = make_region(4 * MIB)
    data = os.urandom(length)
    region.write_bytes(13, data)
    assert region.read_bytes(13, length) == data
    assert region.read_bytes(0, 13) == bytes(13)
    assert region.read_bytes(13 + length, 8) == bytes(8)


def test_a_mapping_may_be_written_from_its_own_view(make_region: MakeRegion) -> None:
    data = os.urandom(64 * 1024)
    region = make_region(MIB, data)
    region.write_bytes(100, region.view(0, len(data)))
    assert region.read_bytes(100, len(data)) == data


def test_words_are_native_and_whole(make_region: MakeRegion) -> None:
    region = make_region(SIZE)
    region.store_u64(8, 2**64 - 2)
    region.store_u32(SIZE - 4, 0xDEADBEEF)
    assert region.load_u64(8) == 2**64 - 2
    assert region.load_u32(SIZE - 4) == 0xDEADBEEF
    assert region.read_bytes(8, 8) == (2**64 - 2).to_bytes(8, sys.byteorder)
    assert region.read_bytes(0, 8) == bytes(8) == region.read_bytes(16, 8)


def test_offsets_beyond_4_gib(make_region: MakeRegion) -> None:
    region = make_region(6 << 30)
    far = (5 << 30) + 24
    region.store_u64(far, 1234)
    region.write_bytes(far + 8, b"beyond")
    assert region.load_u64(far) == 1234
    assert region.load_u64(far - (4 << 30)) == 0
    assert bytes(region.view(far + 8, 6)) == b"beyond"
    assert region.populate(far, PAGE) in ("madvise", "touch")


# --- views ----------------------------------------------------------------------------------------


def test_views_are_writable_only_where_the_mapping_is(make_region: MakeRegion) -> None:
    region = make_region(SIZE)
    view = region.view(8, 4)
    view[:] = b"abcd"
    assert region.read_bytes(8, 4) == b"abcd"
    assert len(region.view(SIZE)) == 0
    assert len(region.view(16)) == SIZE - 16
    frozen = make_region(SIZE, writable=False).view()
    assert frozen.readonly
    with pytest.raises(TypeError):
        frozen[0] = 1


def test_a_view_keeps_the_memory_and_close_says_so(make_region: MakeRegion) -> None:
    region = make_region(SIZE, b"kept")
    inner = region.view()[1:3]
    with pytest.raises(BufferError, match="1 live views"):
        region.close()
    assert not region.closed
    assert region.read_bytes(0, 4) == b"kept"
    assert bytes(inner) == b"ep"
    inner.release()
    region.close()
    assert region.closed


def test_a_view_outlives_the_object(make_region: MakeRegion) -> None:
    region = make_region(SIZE, b"kept")
    view = region.view(0, 4)
    del region
    assert bytes(view) == b"kept"


# --- residency ------------------------------------------------------------------------------------


def allocated_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("use_madvise", [True, False])
def test_populate_allocates_exactly_the_pages_touched(
    make_memfd: MakeMemfd, writable: bool, use_madvise: bool
) -> None:
    pages = 3000  # more than one batch of the fallback
    fd = make_memfd(pages * PAGE)
    os.pwrite(fd, b"kept", PAGE)
    region = Mapping(fd, pages * PAGE, writable=writable)
    assert allocated_bytes(fd) == PAGE
    way = region.populate(PAGE + 5, (pages - 2) * PAGE, use_madvise=use_madvise)
    assert way == "touch" or use_madvise
    assert allocated_bytes(fd) == (pages - 1) * PAGE
    assert region.read_bytes(PAGE, 4) == b"kept"
    assert region.populate(0, 0, use_madvise=use_madvise) == ("madvise" if use_madvise else "touch")


def test_populate_uses_madvise_where_the_kernel_has_it(make_region: MakeRegion) -> None:
    major, minor = (int(part) for part in os.uname().release.split(".")[:2])
    expected = "madvise" if (major, minor) >= (5, 14) else "touch"
    assert make_region(SIZE).populate(0, SIZE) == expected


def test_the_page_size_is_the_kernels(make_region: MakeRegion) -> None:
    assert make_region(SIZE).smaps_page_kb() == PAGE // 1024


def test_huge_pages_map_whole_and_say_so(make_memfd: MakeMemfd, huge_page_bytes: int) -> None:
    size = 2 * huge_page_bytes
    fd = make_memfd(size, os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    region = Mapping(fd, size - 100, writable=True)
    assert region.smaps_page_kb() == 2048
    assert region.populate(0, region.size, use_madvise=False) == "touch"
    assert allocated_bytes(fd) == size
    with pytest.raises(ValueError, match="page size 2097152"):
        Mapping(fd, PAGE, writable=True, offset=PAGE)
    address = region.address
    region.close()
    maps = Path("/proc/self/maps").read_text()
    assert f"{address:x}-" not in maps
