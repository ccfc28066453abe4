"""Regions and gate pages for the tests of the native host module."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvd_kernels.host import (
    GATE_HEADER_BYTES,
    GATE_LINE_BYTES,
    WORD_FREE,
    GateWaiter,
    Mapping,
    gate_word,
)
from tests.capabilities import lacking

F_SEAL_FUTURE_WRITE = 0x0010
SLOTS = 63  # a page of 4096 bytes

_HUGE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")

MakeRegion = Callable[..., Mapping]
MakeMemfd = Callable[..., int]


@pytest.fixture
def make_memfd() -> Iterator[MakeMemfd]:
    """Make memfds of a given size; they are closed at the end of the test."""
    with ExitStack() as stack:

        def make(size: int, flags: int = os.MFD_CLOEXEC) -> int:
            fd = os.memfd_create("test", flags)
            stack.callback(os.close, fd)
            os.ftruncate(fd, size)
            return fd

        yield make


@pytest.fixture
def make_region(make_memfd: MakeMemfd) -> MakeRegion:
    """Make a mapping of a new memfd, filled with `content` from its start."""

    def make(size: int, content: bytes = b"", *, writable: bool = True) -> Mapping:
        fd = make_memfd(size)
        os.pwrite(fd, content, 0)
        return Mapping(fd, size, writable=writable)

    return make


def _free_huge_pages() -> int:
    return int((_HUGE / "free_hugepages").read_text()) - int((_HUGE / "resv_hugepages").read_text())


@pytest.fixture
def huge_page_bytes() -> Iterator[int]:
    """Have two huge pages of 2 MiB free, reserving them where allowed; yields the size of one."""
    total = _HUGE / "nr_hugepages"
    before = int(total.read_text()) if total.exists() else None
    if before is not None and _free_huge_pages() < 2 and os.access(total, os.W_OK):
        total.write_text(str(before + 2))
    if before is None or _free_huge_pages() < 2:
        lacking("two free huge pages", "sysctl -w vm.nr_hugepages=2")
    yield 2 << 20
    if int(total.read_text()) == before + 2:
        total.write_text(str(before))


@dataclass
class Gate:
    """Both ends of a gate page: what kvd holds (writer, events, peer) and what a member holds."""

    writer: Mapping
    page: Mapping
    page_fd: int
    event_fd: int
    peer: socket.socket
    connection: socket.socket
    waiter: GateWaiter

    def put(self, slot: int, epoch: int, state: int) -> None:
        """Store a word without an event."""
        offset = GATE_HEADER_BYTES + slot * GATE_LINE_BYTES
        self.writer.store_u64(offset, gate_word(epoch, state))

    def release(self, slot: int, epoch: int) -> None:
        """Store a free word, then signal."""
        self.put(slot, epoch, WORD_FREE)
        os.eventfd_write(self.event_fd, 1)


@pytest.fixture
def make_gate() -> Iterator[Callable[[], Gate]]:
    with ExitStack() as stack:

        def make() -> Gate:
            size = GATE_HEADER_BYTES + SLOTS * GATE_LINE_BYTES
            fd = os.memfd_create("gate", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
            stack.callback(os.close, fd)
            os.ftruncate(fd, size)
            writer = Mapping(fd, size, writable=True)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
            page = Mapping(fd, size, writable=False)
            event_fd = os.eventfd(0, os.EFD_CLOEXEC)
            stack.callback(os.close, event_fd)
            peer, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(peer)
            stack.enter_context(connection)
            waiter = GateWaiter(page, event_fd, connection.fileno())
            stack.callback(waiter.close)
            return Gate(writer, page, fd, event_fd, peer, connection, waiter)

        yield make


@pytest.fixture
def gate(make_gate: Callable[[], Gate]) -> Gate:
    return make_gate()
