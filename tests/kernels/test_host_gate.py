"""GateWaiter: refusals, what counts as free, sleeping and waking."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    from tests.kernels.conftest import Gate, Sleeper

SECOND_NS = 1_000_000_000
LONG_NS = 60 * SECOND_NS  # never reached: a wait of this length that ends was woken
SLOTS = 63


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
    sleeper = gate.sleeper(0, after=9)
    sleeper.until_asleep()
    gate.release(1, 1)  # a wake for somebody else
    gate.release(0, 9)  # and one that repeats the old word
    sleeper.until_asleep()
    assert sleeper.is_alive()
    gate.release(0, 10)
    assert sleeper.outcome() == ("free", 10)


def test_a_quarantine_ends_a_wait(gate: Gate) -> None:
    gate.put(0, 4, WORD_HELD)
    sleeper = gate.sleeper(0, after=4)
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
    sleepers = [gate.sleeper(slot) for slot in range(12)]
    for sleeper in sleepers:
        sleeper.until_asleep()
    for slot in range(12):
        gate.put(slot, slot + 1, WORD_FREE)
    os.eventfd_write(gate.event_fd, 1)
    assert [sleeper.outcome() for sleeper in sleepers] == [("free", s + 1) for s in range(12)]
    assert gate.waiter.statistics().wakes == 1


def test_sleepers_for_other_slots_sleep_on(gate: Gate) -> None:
    sleepers = [gate.sleeper(slot) for slot in range(6)]
    for slot in (3, 0, 5, 1, 4, 2):
        sleepers[slot].until_asleep()
        gate.release(slot, 1)
        assert sleepers[slot].outcome() == ("free", 1)
        assert [s.is_alive() for s in sleepers].count(True) == gate_left(sleepers)
    assert gate.waiter.statistics().waits == 6


def gate_left(sleepers: list[Sleeper]) -> int:
    return sum(sleeper.result is None for sleeper in sleepers)


@pytest.mark.slow
@pytest.mark.parametrize("short", [0, 1, 2])
def test_whoever_times_out_hands_the_lead_on(gate: Gate, short: int) -> None:
    """One of three sleepers, the leader or not, times out; the others are still woken."""
    sleepers = []
    for number in range(3):
        timeout = 200_000_000 if number == short else LONG_NS
        sleepers.append(gate.sleeper(number, timeout_ns=timeout))
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


def until_polling(task: int) -> None:
    """Return once a thread of this process sleeps in ppoll, which only the leader does."""
    call = Path(f"/proc/self/task/{task}/syscall")
    while call.read_text().split()[0] not in ("271", "73"):  # x86-64, aarch64
        pass


class _Interrupted(Exception):
    pass


@contextmanager
def interrupted_when(ready: Callable[[], None]) -> Iterator[None]:
    """Interrupt what this thread does inside the block, by a signal, once `ready` has returned."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise _Interrupted

    me = threading.get_ident()

    def send() -> None:
        ready()
        signal.pthread_kill(me, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(_Interrupted):
            yield
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_reaches_python_while_the_leader_sleeps(gate: Gate) -> None:
    me = threading.get_native_id()
    begin = time.monotonic_ns()
    with interrupted_when(lambda: until_polling(me)):
        gate.waiter.wait_free(0, 0, LONG_NS, spin_ns=0)
    assert time.monotonic_ns() - begin < LONG_NS // 2
    gate.release(0, 1)
    assert gate.waiter.wait_free(0, 0, LONG_NS, spin_ns=0) == ("free", 1)


def test_a_leader_that_leaves_hands_the_lead_on(gate: Gate) -> None:
    me = threading.get_native_id()
    followers: list[Sleeper] = []

    def gather_followers() -> None:
        until_polling(me)
        for slot in (1, 2):
            followers.append(gate.sleeper(slot))
            followers[-1].until_asleep()

    with interrupted_when(gather_followers):
        gate.waiter.wait_free(0, 0, LONG_NS, spin_ns=0)
    for slot in (2, 1):
        gate.release(slot, 1)
        assert followers[slot - 1].outcome() == ("free", 1)
