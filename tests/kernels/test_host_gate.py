"""GateWaiter: refusals, what counts as free, sleeping and waking, hangup."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_kernels import reference
from kvd_kernels.host import (
    EPOCH_MAX,
    GATE_HEADER_BYTES,
    GATE_LINE_BYTES,
    WORD_CLOSED,
    WORD_FREE,
    WORD_HELD,
    WORD_QUARANTINED,
    GateWaiter,
    gate_word,
    split_word,
)

if TYPE_CHECKING:
    from tests.kernels.conftest import Gate

SECOND_NS = 1_000_000_000
LONG_NS = 60 * SECOND_NS  # never reached: a wait of this length that ends was woken
SLOTS = 63


# ppoll and futex on x86-64 and aarch64. Waiting for the interpreter lock is a futex, too; a test
# that takes that for sleep merely goes on a little early.
_SLEEPING_CALLS = {"271", "202", "73", "98"}


def until_asleep(task: int) -> None:
    """Return once the kernel says that a thread of this process sleeps in ppoll or on a futex."""
    where = Path(f"/proc/self/task/{task}")
    while True:
        state = (where / "stat").read_text().rpartition(")")[2].split()[0]
        if state == "S" and (where / "syscall").read_text().split()[0] in _SLEEPING_CALLS:
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


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", [-1, SLOTS, 2**63, 2**64])
def test_a_slot_outside_the_page_is_refused(gate: Gate, slot: int) -> None:
    with pytest.raises(IndexError, match=f"slot {slot} lies outside the gate page of {SLOTS}"):
        gate.waiter.wait_free(slot, 0, 0)


@pytest.mark.parametrize(
    ("after", "timeout", "spin", "text"),
    [
        (-2, 0, 0, "after_epoch is -2 "),
        (EPOCH_MAX + 1, 0, 0, f"after_epoch is {EPOCH_MAX + 1} "),
        (0, -1, 0, "timeout_ns is -1 "),
        (0, 2**64, 0, f"timeout_ns is {2**64} "),
        (0, 0, -1, "spin_ns is -1 "),
    ],
)
def test_times_and_epochs_that_cannot_be_are_refused(
    gate: Gate, after: int, timeout: int, spin: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        gate.waiter.wait_free(0, after, timeout, spin_ns=spin)
    assert gate.waiter.statistics().waits == 0


@pytest.mark.parametrize(
    ("first_word", "stride", "text"),
    [
        (64, 4, "stride is 4 "),
        (64, 12, "stride 12 must be multiples of 8"),
        (60, 64, "first_word 60 "),
        (-8, 64, "first_word is -8 "),
        (GATE_HEADER_BYTES + SLOTS * GATE_LINE_BYTES, 64, "lies outside the page"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(
    gate: Gate, first_word: int, stride: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        GateWaiter(
            gate.page,
            gate.event_fd,
            gate.connection.fileno(),
            first_word=first_word,
            stride=stride,
        )


def test_a_descriptor_that_is_not_open_is_refused(gate: Gate) -> None:
    spare = fcntl.fcntl(gate.event_fd, fcntl.F_DUPFD_CLOEXEC, 500)
    os.close(spare)  # far from the numbers that the next descriptors get
    with pytest.raises(OSError, match=f"event_fd {spare} cannot be duplicated"):
        GateWaiter(gate.page, spare, gate.connection.fileno())
    with pytest.raises(OSError, match=f"hangup_fd {spare} cannot be duplicated"):
        GateWaiter(gate.page, gate.event_fd, spare)


def test_a_closed_page_is_refused_and_a_page_in_use_stays_open(gate: Gate) -> None:
    with pytest.raises(BufferError, match="gate waiters"):
        gate.page.close()
    gate.waiter.close()
    gate.page.close()
    with pytest.raises(ValueError, match="closed"):
        GateWaiter(gate.page, gate.event_fd, gate.connection.fileno())


@pytest.mark.parametrize(("epoch", "state"), [(-1, 1), (EPOCH_MAX + 1, 1), (0, 4), (0, -1)])
def test_a_word_that_cannot_be_is_refused(epoch: int, state: int) -> None:
    with pytest.raises(ValueError, match=r"(epoch|state) is "):
        gate_word(epoch, state)


@pytest.mark.parametrize("word", [-1, 2**64])
def test_splitting_what_is_no_word_is_refused(word: int) -> None:
    with pytest.raises(ValueError, match=f"word is {word}"):
        split_word(word)


# --- what counts as free --------------------------------------------------------------------------


@given(st.integers(0, EPOCH_MAX), st.sampled_from([0, 1, 2, 3]))
def test_words_split_into_what_they_were_made_of(epoch: int, state: int) -> None:
    assert split_word(gate_word(epoch, state)) == (epoch, state)


@pytest.mark.parametrize("state", [WORD_CLOSED, WORD_FREE, WORD_HELD, WORD_QUARANTINED, 4, 255])
@pytest.mark.parametrize(
    ("epoch", "after"),
    [(0, -1), (0, 0), (7, 6), (7, 7), (7, 8), (EPOCH_MAX, EPOCH_MAX - 1), (EPOCH_MAX, EPOCH_MAX)],
)
def test_every_word_ends_a_wait_as_the_reference_says(
    gate: Gate, state: int, epoch: int, after: int
) -> None:
    word = epoch << 8 | state
    gate.writer.store_u64(GATE_HEADER_BYTES + 5 * GATE_LINE_BYTES, word)
    expected = reference.gate_outcome(word, after) or "timeout"
    assert gate.waiter.wait_free(5, after, 0) == (expected, epoch)


def test_each_slot_has_its_own_word(gate: Gate) -> None:
    for slot in range(SLOTS):
        gate.put(slot, slot + 1, WORD_FREE)
    for slot in range(SLOTS):
        assert gate.waiter.wait_free(slot, slot, 0) == ("free", slot + 1)


def test_another_layout_is_honoured(gate: Gate) -> None:
    waiter = GateWaiter(gate.page, gate.event_fd, gate.connection.fileno(), first_word=0, stride=8)
    gate.writer.store_u64(24, gate_word(3, WORD_FREE))
    assert waiter.wait_free(3, 2, 0) == ("free", 3)
    with pytest.raises(IndexError, match="512 slots"):
        waiter.wait_free(512, 0, 0)


# --- sleeping and waking --------------------------------------------------------------------------


def test_the_free_word_of_the_last_tenancy_does_not_end_a_wait(gate: Gate) -> None:
    gate.put(0, 9, WORD_FREE)
    sleeper = Sleeper(gate.waiter, 0, 9, LONG_NS)
    sleeper.until_asleep()
    gate.release(1, 1)  # a wake for somebody else
    gate.release(0, 9)  # and one that repeats the old word
    sleeper.until_asleep()
    assert sleeper.is_alive()
    gate.release(0, 10)
    assert sleeper.outcome() == ("free", 10)


def test_a_quarantine_ends_a_wait(gate: Gate) -> None:
    gate.put(0, 4, WORD_HELD)
    sleeper = Sleeper(gate.waiter, 0, 4, LONG_NS)
    sleeper.until_asleep()
    gate.put(0, 4, WORD_QUARANTINED)
    os.eventfd_write(gate.event_fd, 1)
    assert sleeper.outcome() == ("quarantined", 4)


def test_a_wait_ends_at_its_deadline(gate: Gate) -> None:
    gate.put(2, 8, WORD_HELD)
    assert gate.waiter.wait_free(2, 1, 5_000_000, spin_ns=0) == ("timeout", 8)
    assert gate.waiter.wait_free(2, 1, 1_000_000, spin_ns=SECOND_NS) == ("timeout", 8)
    counted = gate.waiter.statistics()
    assert (counted.waits, counted.timeouts, counted.wakes, counted.spins) == (2, 2, 0, 0)


def test_a_spinning_thread_needs_no_event(gate: Gate) -> None:
    gate.put(0, 1, WORD_HELD)
    result: list[tuple[str, int]] = []
    thread = threading.Thread(
        target=lambda: result.append(gate.waiter.wait_free(0, 0, LONG_NS, spin_ns=LONG_NS))
    )
    thread.start()
    gate.put(0, 1, WORD_FREE)  # no event
    thread.join(30)
    assert result == [("free", 1)]


def test_one_event_wakes_all_sleepers(gate: Gate) -> None:
    sleepers = [Sleeper(gate.waiter, slot, 0, LONG_NS) for slot in range(12)]
    for sleeper in sleepers:
        sleeper.until_asleep()
    for slot in range(12):
        gate.put(slot, slot + 1, WORD_FREE)
    os.eventfd_write(gate.event_fd, 1)
    assert [sleeper.outcome() for sleeper in sleepers] == [("free", s + 1) for s in range(12)]
    assert gate.waiter.statistics().wakes == 1


def test_sleepers_for_other_slots_sleep_on(gate: Gate) -> None:
    sleepers = [Sleeper(gate.waiter, slot, 0, LONG_NS) for slot in range(6)]
    for slot in (3, 0, 5, 1, 4, 2):
        sleepers[slot].until_asleep()
        gate.release(slot, 1)
        assert sleepers[slot].outcome() == ("free", 1)
        assert [s.is_alive() for s in sleepers].count(True) == gate_left(sleepers)
    assert gate.waiter.statistics().waits == 6


def gate_left(sleepers: list[Sleeper]) -> int:
    return sum(sleeper.result is None for sleeper in sleepers)


@pytest.mark.parametrize("short", [0, 1, 2])
def test_whoever_leaves_hands_the_lead_on(gate: Gate, short: int) -> None:
    """One of three sleepers, the leader or not, times out; the others are still woken."""
    sleepers = []
    for number in range(3):
        timeout = 20_000_000 if number == short else LONG_NS
        sleepers.append(Sleeper(gate.waiter, number, 0, timeout))
        sleepers[-1].until_asleep()
    assert sleepers[short].outcome() == ("timeout", 0)
    for number in range(3):
        if number != short:
            gate.release(number, 1)
            assert sleepers[number].outcome() == ("free", 1)


def test_an_event_before_the_wait_is_not_needed_and_does_no_harm(gate: Gate) -> None:
    os.eventfd_write(gate.event_fd, 5)
    gate.put(0, 1, WORD_HELD)
    assert gate.waiter.wait_free(0, 0, 1_000_000, spin_ns=0) == ("timeout", 1)
    assert gate.waiter.statistics().wakes == 1
    gate.release(0, 2)
    assert gate.waiter.wait_free(0, 0, LONG_NS, spin_ns=0) == ("free", 2)


class _Interrupted(Exception):
    pass


def test_a_signal_reaches_python_while_the_leader_sleeps(gate: Gate) -> None:
    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise _Interrupted

    me = threading.get_ident()
    my_task = threading.get_native_id()

    def send() -> None:
        until_asleep(my_task)
        signal.pthread_kill(me, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    sender = threading.Thread(target=send)
    begin = time.monotonic_ns()
    try:
        sender.start()
        with pytest.raises(_Interrupted):
            gate.waiter.wait_free(0, 0, LONG_NS, spin_ns=0)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic_ns() - begin < LONG_NS // 2
    gate.release(0, 1)
    assert gate.waiter.wait_free(0, 0, LONG_NS, spin_ns=0) == ("free", 1)


# --- hangup ---------------------------------------------------------------------------------------


def test_the_end_of_the_connection_wakes_all_and_lasts(gate: Gate) -> None:
    gate.put(1, 6, WORD_HELD)
    sleepers = [Sleeper(gate.waiter, slot, 0, LONG_NS) for slot in range(8)]
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
    sleepers = [Sleeper(gate.waiter, slot, 0, LONG_NS) for slot in range(8)]
    for sleeper in sleepers:
        sleeper.until_asleep()
    gate.waiter.close()
    gate.page.close()  # a thread that had not left would read unmapped memory
    assert {sleeper.outcome() for sleeper in sleepers} == {("hangup", 0)}
    gate.waiter.close()
    assert gate.waiter.hung_up()
    gate.release(0, 1)
    assert gate.waiter.wait_free(0, 0, LONG_NS) == ("hangup", -1)


def test_close_lets_go_of_page_and_connection(gate: Gate) -> None:
    gate.waiter.close()
    gate.page.close()
    gate.connection.close()
    assert gate.peer.recv(1) == b""
