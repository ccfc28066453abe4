"""A sleeping shim woken by its gate page, against a bare eventfd wake; both between processes.

A second process stores a word and writes the eventfd, or only writes it; it notes the time just
before in memory that both share. What is measured is that time until the sleeper runs again.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from multiprocessing.connection import Connection
from typing import Final

from bench.report import Better, Row, compare
from kvd.memory.gate_page import GatePage
from kvd.wire.gate_layout import BOOT_ID_BYTES, STATE_FREE
from kvd_kernels.host import GateWaiter, Mapping

TARGET: Final = 1.5
US: Final = 1e-3
IDLE_NS: Final = 1_000_000
"""How long the sleeper sleeps before it is woken: its CPU has gone idle by then."""
SECOND: Final = 1_000_000_000


def _waker(orders: Connection, hand: socket.socket, event_fd: int, clock_fd: int) -> None:
    """Wake on order: `gate` stores the next epoch first, `bare` does not."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    clock = Mapping(clock_fd, 4096, writable=True)
    page = GatePage(1, bytes(BOOT_ID_BYTES))
    socket.send_fds(hand, [page.size.to_bytes(8, "little")], [page.fd])
    epoch = 0
    while (order := orders.recv_bytes()) != b"end":
        # The sleeper must be asleep: it has gone to sleep when its CPU is idle for this long.
        end = time.perf_counter_ns() + IDLE_NS
        while time.perf_counter_ns() < end:
            pass
        clock.store_u64(0, time.monotonic_ns())
        if order == b"gate":
            epoch += 1
            page.set(0, epoch, STATE_FREE)
        os.eventfd_write(event_fd, 1)


def wake_rows(rounds: int) -> list[Row]:
    """The figure and its baseline, interleaved."""
    event_fd = os.eventfd(0, os.EFD_CLOEXEC)
    clock_fd = os.memfd_create("kvd-bench-clock")
    os.ftruncate(clock_fd, 4096)
    clock = Mapping(clock_fd, 4096, writable=False)
    mine, theirs = multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork")
    hand, taken = socket.socketpair()
    process = fork.Process(target=_waker, args=(theirs, taken, event_fd, clock_fd))
    process.start()
    size, fds, _, _ = socket.recv_fds(hand, 8, 1)
    ours: list[float] = []
    base: list[float] = []
    # Sleeper and waker on CPUs of their own: what is compared is the way of waking.
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    view = Mapping(fds[0], int.from_bytes(size, "little"), writable=False)
    left, right = socket.socketpair()
    waiter = GateWaiter(view, event_fd, left.fileno())
    try:
        for epoch in range(1, rounds + 1):
            mine.send_bytes(b"bare")
            os.eventfd_read(event_fd)
            base.append((time.monotonic_ns() - clock.load_u64(0)) * US)
            mine.send_bytes(b"gate")
            outcome, _ = waiter.wait_free(0, epoch - 1, 5 * SECOND, spin_ns=0)
            ours.append((time.monotonic_ns() - clock.load_u64(0)) * US)
            assert outcome == "free", outcome
        mine.send_bytes(b"end")
        process.join(5)
    finally:
        process.kill()
        os.sched_setaffinity(0, cpus)
        waiter.close()
        left.close()
        right.close()
        os.close(event_fd)
        os.close(clock_fd)
    return [
        compare(
            "sleeping shim woken by its gate",
            "latency",
            ours,
            base,
            unit="us",
            target=TARGET,
            better=Better.LOWER,
        )
    ]
