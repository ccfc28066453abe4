"""No wake is lost: between threads, among many sleepers, and across processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.kernels.conftest import Gate

LONG_NS = 60_000_000_000  # never reached: a wait of this length that ends was woken


def ping_pong(gate: Gate, other: Gate, rounds: int, spin_ns: int) -> None:
    """Two threads take turns, `rounds` waits each; nothing repeats a lost wake."""
    failures: list[object] = []

    def echo() -> None:
        for epoch in range(1, rounds + 1):
            got = gate.waiter.wait_free(0, epoch - 1, LONG_NS, spin_ns=spin_ns)
            if got != ("free", epoch):
                failures.append(got)
                return
            other.release(0, epoch)

    thread = threading.Thread(target=echo)
    thread.start()
    for epoch in range(1, rounds + 1):
        gate.release(0, epoch)
        got = other.waiter.wait_free(0, epoch - 1, LONG_NS, spin_ns=spin_ns)
        if got != ("free", epoch):
            failures.append(got)
            break
    gate.waiter.close()
    thread.join(30)
    assert not failures


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "spin_ns"), [(25_000, 0), (25_000, 50_000)])
def test_no_wake_is_lost_between_two_threads(
    make_gate: Callable[[], Gate], rounds: int, spin_ns: int
) -> None:
    ping_pong(make_gate(), make_gate(), rounds, spin_ns)


@pytest.mark.slow
def test_no_wake_is_lost_among_many_sleepers(make_gate: Callable[[], Gate]) -> None:
    """Six threads share a waiter; each acknowledges its wake before its next one is sent."""
    gate, other = make_gate(), make_gate()
    threads, rounds = 6, 6000
    failures: list[object] = []

    def wait(slot: int, epoch: int) -> tuple[str, int]:
        # Short waits make the lead change hands at every moment; nothing saves the long ones.
        if slot % 2:
            return gate.waiter.wait_free(slot, epoch - 1, LONG_NS, spin_ns=0)
        while True:
            got = gate.waiter.wait_free(slot, epoch - 1, 30_000 + slot * 20_000, spin_ns=0)
            if got[0] != "timeout":
                return got

    def serve(slot: int) -> None:
        for epoch in range(1, rounds + 1):
            got = wait(slot, epoch)
            if got != ("free", epoch):
                failures.append((slot, got))
            other.release(slot, epoch)

    workers = [threading.Thread(target=serve, args=(slot,)) for slot in range(threads)]
    for worker in workers:
        worker.start()
    for epoch in range(1, rounds + 1):
        for slot in range(threads):
            gate.release((slot * 5 + epoch) % threads, epoch)
        for slot in range(threads):
            assert other.waiter.wait_free(slot, epoch - 1, LONG_NS, spin_ns=0) == ("free", epoch)
    for worker in workers:
        worker.join(30)
    assert not failures


_MEMBER_SCRIPT = """
import sys
from kvd_kernels.host import GateWaiter, Mapping
page_fd, event_fd, hangup_fd, size, rounds = map(int, sys.argv[1:])
try:
    Mapping(page_fd, size, writable=True)
except PermissionError:
    pass
else:
    raise SystemExit("the seal did not hold")
waiter = GateWaiter(Mapping(page_fd, size, writable=False), event_fd, hangup_fd)
for epoch in range(1, rounds + 1):
    got = waiter.wait_free(7, epoch - 1, 60 * 10**9, spin_ns=0)
    if got != ("free", epoch):
        raise SystemExit(f"round {epoch}: {got}")
    print(epoch, flush=True)
print(*waiter.wait_free(7, rounds, 60 * 10**9), flush=True)
"""


@pytest.mark.slow
def test_a_member_process_sees_words_through_its_read_only_page(gate: Gate) -> None:
    rounds = 200
    fds = (gate.page_fd, gate.event_fd, gate.connection.fileno())
    arguments = [*fds, gate.page.size, rounds]
    gate.waiter.close()  # the eventfd has one consumer
    with subprocess.Popen(
        [sys.executable, "-c", _MEMBER_SCRIPT, *map(str, arguments)],
        pass_fds=fds,
        stdout=subprocess.PIPE,
        text=True,
    ) as member:
        gate.connection.close()
        assert member.stdout is not None
        for epoch in range(1, rounds + 1):
            gate.release(7, epoch)
            assert member.stdout.readline() == f"{epoch}\n"
        gate.peer.close()
        assert member.stdout.readline() == f"hangup {rounds}\n"
    assert member.returncode == 0
