"""Regions and gate pages for the tests of the native host module."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvd_kernels.host import (
    GATE_HEADER_BYTES,
    GATE_LINE_BYTES,
    WORD_FREE,
    CopyQueue,
    GateWaiter,
    Mapping,
    gate_word,
)
from tests.capabilities import lacking
from tests.kernels.queue_rig import LongCopy

F_SEAL_FUTURE_WRITE = 0x0010
SLOTS = 63  # a page of 4096 bytes
LONG_NS = 60_000_000_000  # never reached: a wait of this length that ends was woken

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


# ppoll and futex on x86-64 and aarch64. Waiting for the interpreter lock is a futex, too; a test
# that takes that for sleep merely goes on a little early.
_SLEEPING_CALLS = frozenset({"271", "202", "73", "98"})


def until_asleep(task: int) -> None:
    """Return once a thread of this process sleeps in ppoll or on a futex, or has ended."""
    where = Path(f"/proc/self/task/{task}")
    while True:
        try:
            state = (where / "stat").read_text().rpartition(")")[2].split()[0]
            if state == "S" and (where / "syscall").read_text().split()[0] in _SLEEPING_CALLS:
                return
        except (FileNotFoundError, ProcessLookupError):
            return


class Sleeper(threading.Thread):
    """A thread in wait_free, and what it returned."""

    def __init__(self, waiter: GateWaiter, slot: int, after: int, timeout_ns: int) -> None:
        super().__init__()
        self._arguments = (waiter, slot, after, timeout_ns)
        self.result: tuple[str, int] | None = None
        self.start()

    def run(self) -> None:
        waiter, slot, after, timeout_ns = self._arguments
        self.result = waiter.wait_free(slot, after, timeout_ns, spin_ns=0)

    def until_asleep(self) -> None:
        """Return once the thread sleeps."""
        assert self.native_id is not None
        until_asleep(self.native_id)

    def outcome(self) -> tuple[str, int]:
        self.join(30)
        assert self.result is not None, "the sleeper was not woken"
        return self.result


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

    def sleeper(self, slot: int, after: int = 0, timeout_ns: int = LONG_NS) -> Sleeper:
        """Start a thread that waits for a slot without spinning."""
        return Sleeper(self.waiter, slot, after, timeout_ns)

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


@pytest.fixture
def queue() -> Iterator[CopyQueue]:
    made = CopyQueue()
    yield made
    made.close()


@pytest.fixture
def long_copy(make_region: MakeRegion) -> LongCopy:
    return LongCopy(make_region)
