"""The gate page: only kvd writes it, a member reads the same layout, epochs never go back."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.errors import LocalError
from kvd.memory import gate_page as gate_page_module
from kvd.memory.gate_page import GatePage
from kvd.wire import gate_layout as layout
from kvd_kernels import host

ROOT = Path(__file__).parents[3]
BOOT_ID = bytes(range(16))


@pytest.fixture
def page() -> Iterator[GatePage]:
    """Give a page of 100 slots, more than one OS page of them."""
    made = GatePage(100, BOOT_ID)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("num_slots", "boot_id", "message"),
    [
        (0, BOOT_ID, "num_slots must be between 1 and"),
        (-1, BOOT_ID, "num_slots must be between 1 and"),
        (1 << 32, BOOT_ID, "num_slots must be between 1 and"),
        (4, BOOT_ID[:15], "boot_id must have 16 bytes, got 15"),
        (4, BOOT_ID + b"x", "boot_id must have 16 bytes, got 17"),
    ],
)
def test_page_that_cannot_be(
    num_slots: int, boot_id: bytes, message: str, memfds: Callable[[], list[str]]
) -> None:
    with pytest.raises(ValueError, match=message):
        GatePage(num_slots, boot_id)
    assert memfds() == []


def test_kernel_refuses_the_page(
    memfds: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, length: int, *, writable: bool) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(gate_page_module, "Mapping", refuse)
    with pytest.raises(LocalError) as caught:
        GatePage(100, BOOT_ID)
    assert caught.value.code == "memory_short"
    assert caught.value.context["need"] == "8KiB"
    assert memfds() == []


@pytest.mark.parametrize("slot", [-1, 100, 1 << 40])
def test_slot_outside_the_page(slot: int, page: GatePage) -> None:
    with pytest.raises(IndexError, match=f"slot {slot} is outside the 100 slots"):
        page.set(slot, 1, layout.STATE_FREE)
    with pytest.raises(IndexError, match=f"slot {slot} is outside the 100 slots"):
        page.get(slot)


@pytest.mark.parametrize(
    ("epoch", "state", "message"),
    [
        (-1, layout.STATE_FREE, "epoch must be between 0 and"),
        (1 << 56, layout.STATE_FREE, "epoch must be between 0 and"),
        (8, 4, r"state must be one of 0 \.\. 3, got 4"),
        (8, -1, r"state must be one of 0 \.\. 3, got -1"),
        (6, layout.STATE_FREE, "epoch of slot 5 would go back from 7 to 6"),
    ],
)
def test_word_that_is_refused_changes_nothing(
    epoch: int, state: int, message: str, page: GatePage
) -> None:
    page.set(5, 7, layout.STATE_HELD)
    with pytest.raises(ValueError, match=message):
        page.set(5, epoch, state)
    assert page.get(5) == (7, layout.STATE_HELD)


def test_nobody_else_can_write_or_resize_it(page: GatePage) -> None:
    fd = os.dup(page.fd)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, page.size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError):
        host.Mapping(fd, page.size, writable=True)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 64)
    for size in (64, page.size * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(page.fd)
    os.close(fd)


def test_kvd_still_writes_after_the_seal_and_a_reader_sees_it(page: GatePage) -> None:
    reader = host.Mapping(page.fd, page.size, writable=False)
    assert reader.load_u64(layout.word_offset(99)) == 0
    page.set(99, 3, layout.STATE_FREE)
    assert reader.load_u64(layout.word_offset(99)) == 3 << 8 | layout.STATE_FREE
    reader.close()


def test_all_words_start_closed_at_epoch_0(page: GatePage) -> None:
    assert {page.get(slot) for slot in range(page.num_slots)} == {(0, layout.STATE_CLOSED)}


def test_words_do_not_touch_each_other_or_the_header(page: GatePage) -> None:
    for slot in range(page.num_slots):
        page.set(slot, slot + 1, slot % 4)
    assert [page.get(slot) for slot in range(100)] == [(slot + 1, slot % 4) for slot in range(100)]
    reader = host.Mapping(page.fd, page.size, writable=False)
    header = layout.parse_header(reader.read_bytes(0, 64), reader.size)
    assert header == (BOOT_ID, 100)
    reader.close()


def test_repeating_a_word_is_harmless(page: GatePage) -> None:
    page.set(0, 2, layout.STATE_FREE)
    page.set(0, 2, layout.STATE_FREE)
    page.set(0, 2, layout.STATE_QUARANTINED)
    assert page.get(0) == (2, layout.STATE_QUARANTINED)


def test_close_is_repeatable_and_members_keep_the_page() -> None:
    made = GatePage(1, BOOT_ID)
    made.set(0, 9, layout.STATE_FREE)
    reader = host.Mapping(made.fd, made.size, writable=False)
    made.close()
    made.close()
    with pytest.raises(ValueError):
        made.set(0, 10, layout.STATE_FREE)
    assert reader.load_u64(layout.word_offset(0)) == 9 << 8 | layout.STATE_FREE
    reader.close()


def test_another_process_reads_it_through_the_inherited_fd(page: GatePage) -> None:
    page.set(42, 17, layout.STATE_FREE)
    code = (
        "import sys; from kvd.wire.gate_layout import *; from kvd_kernels.host import Mapping; "
        "m = Mapping(int(sys.argv[1]), int(sys.argv[2]), writable=False); "
        "h = parse_header(m.read_bytes(0, 64), m.size); "
        "print(h.boot_id.hex(), h.num_slots, *split_word(m.load_u64(word_offset(42))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(page.fd), str(page.size)],
        cwd=ROOT,
        pass_fds=[page.fd],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [BOOT_ID.hex(), "100", "17", "1"]


@pytest.mark.parametrize(
    ("data", "page_bytes", "message"),
    [
        (b"", 0, "a gate page has at least 64 bytes, got 0"),
        (layout.pack_header(BOOT_ID, 1)[:63], 4096, "at least 64 bytes, got 63"),
        (layout.pack_header(BOOT_ID, 1), 63, "at least 64 bytes"),
        (bytes(64), 4096, "not a gate page"),
        (layout.pack_header(BOOT_ID, 1).replace(b"KVDGATE1", b"KVDGATE2"), 4096, "not a gate"),
        (layout.pack_header(BOOT_ID, 64), 4096, "4096 bytes cannot hold 64 slots"),
        (b"KVDGATE1" + BOOT_ID + b"\1\0\0\0\2\0\0\0" + bytes(32), 4096, "version 2 is not known"),
        (b"KVDGATE1" + BOOT_ID + b"\0\0\0\0\1\0\0\0" + bytes(32), 4096, "cannot hold 0 slots"),
    ],
)
def test_header_that_a_member_refuses(data: bytes, page_bytes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout.parse_header(data, page_bytes)


def test_header_bytes_are_fixed() -> None:
    packed = layout.pack_header(BOOT_ID, 63)
    assert packed == b"KVDGATE1" + BOOT_ID + b"\x3f\0\0\0\1\0\0\0" + bytes(32)
    assert layout.parse_header(packed, 4096) == (BOOT_ID, 63)
    assert (layout.gate_page_bytes(63), layout.word_offset(0), layout.word_offset(62)) == (
        4096,
        64,
        4032,
    )


def test_layout_agrees_with_the_native_module() -> None:
    assert layout.GATE_HEADER_BYTES == host.GATE_HEADER_BYTES
    assert layout.GATE_LINE_BYTES == host.GATE_LINE_BYTES
    assert layout.EPOCH_MAX == host.EPOCH_MAX
    assert (
        layout.STATE_CLOSED,
        layout.STATE_FREE,
        layout.STATE_HELD,
        layout.STATE_QUARANTINED,
    ) == (host.WORD_CLOSED, host.WORD_FREE, host.WORD_HELD, host.WORD_QUARANTINED)


@given(st.integers(0, (1 << 56) - 1), st.integers(0, 3))
def test_words_round_trip_and_agree_with_the_native_module(epoch: int, state: int) -> None:
    word = layout.make_word(epoch, state)
    assert word < 1 << 64
    assert layout.split_word(word) == (epoch, state)
    assert host.gate_word(epoch, state) == word
    assert tuple(host.split_word(word)) == (epoch, state)
