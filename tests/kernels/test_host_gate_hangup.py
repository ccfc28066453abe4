"""GateWaiter: the end of the connection, and close()."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from kvd_kernels.host import WORD_HELD, GateWaiter

if TYPE_CHECKING:
    from tests.kernels.conftest import Gate

LONG_NS = 60_000_000_000  # never reached: a wait of this length that ends was woken


def test_the_end_of_the_connection_wakes_all_and_lasts(gate: Gate) -> None:
    gate.put(1, 6, WORD_HELD)
    sleepers = [gate.sleeper(slot) for slot in range(8)]
    for sleeper in sleepers:
        sleeper.until_asleep()
    assert not gate.waiter.hung_up()
    gate.peer.close()
    assert {sleeper.outcome() for sleeper in sleepers} == {("hangup", 0), ("hangup", 6)}
    gate.release(2, 50)
    assert gate.waiter.wait_free(2, 0, LONG_NS) == ("hangup", 50)
    assert gate.waiter.hung_up()
    assert gate.waiter.statistics().hangups == 9


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_data_on_the_connection_is_left_alone(gate: Gate, kind: socket.SocketKind) -> None:
    peer, connection = socket.socketpair(socket.AF_UNIX, kind)
    with peer, connection:
        waiter = GateWaiter(gate.page, gate.event_fd, connection.fileno())
        peer.send(b"for somebody else")
        assert waiter.wait_free(0, 0, 1_000_000, spin_ns=0) == ("timeout", 0)
        assert not waiter.hung_up()
        assert connection.recv(64) == b"for somebody else"
        peer.send(b"unread")
        peer.shutdown(socket.SHUT_WR)
        assert waiter.wait_free(0, 0, LONG_NS, spin_ns=0) == ("hangup", 0)
        waiter.close()


def test_the_end_of_a_pipe_is_a_hangup(gate: Gate) -> None:
    read_end, write_end = os.pipe()
    waiter = GateWaiter(gate.page, gate.event_fd, read_end)
    os.close(read_end)
    assert not waiter.hung_up()
    os.close(write_end)
    assert waiter.hung_up()
    assert waiter.wait_free(0, 0, LONG_NS) == ("hangup", 0)
    waiter.close()


def test_close_wakes_all_and_ends_later_waits(gate: Gate) -> None:
    sleepers = [gate.sleeper(slot) for slot in range(8)]
    for sleeper in sleepers:
        sleeper.until_asleep()
    gate.waiter.close()
    assert {sleeper.outcome() for sleeper in sleepers} == {("hangup", 0)}
    gate.waiter.close()
    assert gate.waiter.hung_up()
    gate.release(0, 1)
    assert gate.waiter.wait_free(0, 0, LONG_NS) == ("hangup", -1)


@pytest.mark.slow
def test_close_returns_only_when_every_thread_has_left(make_gate: Callable[[], Gate]) -> None:
    """A thread that had not left would read the page after it was unmapped, and crash."""
    for _ in range(40):
        gate = make_gate()
        sleepers = [gate.sleeper(slot) for slot in range(3)]
        for sleeper in sleepers:
            sleeper.until_asleep()
        gate.waiter.close()
        gate.page.close()
        assert {sleeper.outcome() for sleeper in sleepers} == {("hangup", 0)}


def test_close_lets_go_of_page_and_connection(gate: Gate) -> None:
    gate.waiter.close()
    gate.page.close()
    gate.connection.close()
    assert gate.peer.recv(1) == b""
