"""Acquiring: a wait ends in time, nothing is taken twice, loads start only with kvd's consent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from engine_shim.client import KvdClient, SlotQuarantined, Tenancy
from kvd.wire import messages as msg
from kvd.wire.gate_layout import STATE_HELD, STATE_QUARANTINED
from kvd.wire.slot_items import (
    AcquiredItem,
    ComputedItem,
    LoadEndedItem,
    LoadItem,
    SaveItem,
    WrittenItem,
)
from tests.unit.client.fake_kvd import FakeKvd
from tests.unit.client.waiting import refusal, until

Connect = Callable[..., KvdClient]

LOADS = [LoadItem("r", [1, 2], 8)]
SAVES = [SaveItem("s", [1, 2], [4, 4])]


def settled(client: KvdClient) -> KvdClient:
    """Every event is acknowledged."""
    client.flush()
    return client


# Acquire --------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", [-1, 2])
def test_slot_outside_the_ring(connect: Connect, slot: int) -> None:
    error = refusal(lambda: connect().slots.acquire(slot))
    assert error.code == "slot_unknown"
    assert "outside the 2 slots of member e0/w0" in str(error)


def test_held_slot_is_waited_for_until_the_deadline(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    kvd.publish(0, 0, STATE_HELD)
    error = refusal(lambda: client.slots.acquire(0, deadline_s=0.02))
    assert error.code == "deadline_exceeded"
    assert "the wait for slot 0" in str(error)
    assert client.statistics().gate_waits == {"timeout": 1}
    assert not kvd.seen


def test_quarantined_slot_asks_for_a_spare(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    kvd.publish(1, 3, STATE_QUARANTINED)
    with pytest.raises(SlotQuarantined) as caught:
        client.slots.acquire(1)
    assert caught.value.slot == 1
    assert "spare" in str(caught.value)


def test_free_word_of_the_last_tenancy_is_not_taken_again(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    tenancy = client.slots.acquire(0)
    assert tenancy == Tenancy(0, 0, 1)
    client.slots.computed(tenancy)
    settled(client)
    assert refusal(lambda: client.slots.acquire(0, deadline_s=0.02)).code == "deadline_exceeded"
    kvd.free(0, 1)
    assert client.slots.acquire(0).epoch == 1


def test_sleeper_is_woken_by_the_gate(connect: Connect, kvd: FakeKvd) -> None:
    client = connect(spin_us=0)
    kvd.publish(0, 0, STATE_HELD)
    got: list[Tenancy] = []
    sleeper = threading.Thread(target=lambda: got.append(client.slots.acquire(0)))
    sleeper.start()
    kvd.free(0, 7)
    sleeper.join()
    assert got == [Tenancy(0, 7, 1)]


def test_one_free_word_goes_to_one_of_two_threads(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    kvd.publish(0, 0, STATE_HELD)
    got: list[int] = []

    def one() -> None:
        tenancy = client.slots.acquire(0)
        got.append(tenancy.epoch)
        client.slots.computed(tenancy)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    kvd.free(0, 1)
    until(lambda: bool(got))
    kvd.free(0, 2)
    for thread in threads:
        thread.join()
    assert got == [1, 2]


def test_slot_is_not_taken_while_our_own_copy_reads_it(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    kvd.code_of = lambda item: "block_poisoned" if isinstance(item, WrittenItem) else ""
    tenancy = client.slots.acquire(0)
    client.slots.written(tenancy, 3, SAVES)
    client.slots.computed(tenancy)
    settled(client)
    kvd.free(0, 1)  # kvd armed nothing, so it released the slot at once
    error = refusal(lambda: client.slots.acquire(0, deadline_s=0.02))
    assert error.code == "deadline_exceeded"
    assert "last use of slot 0 by this process" in str(error)
    got: list[int] = []
    waiter = threading.Thread(target=lambda: got.append(client.slots.acquire(0).epoch))
    waiter.start()
    client.slots.save_ended(tenancy, "s", ok=False)
    waiter.join()
    assert got == [1]


# Loads ----------------------------------------------------------------------------------------


def test_loads_start_only_after_the_answer(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    asked = kvd.silent_on(msg.Events)
    got: list[Tenancy] = []
    thread = threading.Thread(target=lambda: got.append(client.slots.acquire(0, 3, LOADS)))
    thread.start()
    until(lambda: bool(asked))
    assert not got
    kvd.tell(msg.Seen(asked[0].request_no, kvd.boot_id, 1))
    thread.join()
    assert got == [Tenancy(0, 0, 1)]


def test_several_slots_are_asked_for_before_the_first_answer(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect(num_slots=4, resend_s=60.0)
    asked = kvd.silent_on(msg.Events)
    taken = [client.slots.begin(slot, slot, LOADS) for slot in range(4)]
    assert [tenancy.slot for tenancy, _ in taken] == [0, 1, 2, 3]
    assert not any(ticket.is_settled for _, ticket in taken)
    until(lambda: bool(asked))
    heard: list[tuple[int, str]] = []
    answered = threading.Event()

    def hear(slot: int) -> None:
        heard.append((slot, threading.current_thread().name))
        if len(heard) == len(taken):
            answered.set()

    for tenancy, ticket in taken:
        ticket.then(partial(hear, tenancy.slot))
    assert not heard
    kvd.as_usual(msg.Events)
    kvd.answer_late(asked[0])
    assert answered.wait(5)
    assert [slot for slot, _ in heard] == [0, 1, 2, 3]
    assert {thread for _, thread in heard} == {"kvd-client"}
    for tenancy, ticket in taken:
        client.slots.await_loads(tenancy, tenancy.slot, LOADS, ticket)


def test_begun_loads_that_are_refused_give_the_slot_back(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    kvd.code_of = lambda item: "block_poisoned" if isinstance(item, AcquiredItem) else ""
    tenancy, ticket = client.slots.begin(0, 3, LOADS)
    assert ticket.wait(5) == "block_poisoned"
    assert client.statistics().slots_busy == 1, "it is the caller's until it asks"
    error = refusal(lambda: client.slots.await_loads(tenancy, 3, LOADS, ticket))
    assert error.code == "block_poisoned"
    assert client.statistics().slots_busy == 0


def test_span_that_is_being_saved_is_waited_for(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    codes = ["span_busy", "span_unwritten", "span_busy", ""]
    kvd.code_of = lambda item: codes.pop(0)
    tenancy = client.slots.acquire(0, 3, LOADS)
    assert kvd.seen == [AcquiredItem(0, 0, 3, LOADS)] * 4
    assert tenancy.epoch == 0
    assert client.statistics().events_refused == 3


def test_span_that_stays_busy_gives_the_slot_back(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    kvd.code_of = lambda item: "span_busy" if isinstance(item, AcquiredItem) else ""
    error = refusal(lambda: client.slots.acquire(0, 3, LOADS, deadline_s=0.3))
    assert error.code == "span_busy"
    settled(client)
    assert kvd.seen[-2:] == [LoadEndedItem(0, 0, False), ComputedItem(0, 0, False)]
    assert client.statistics().slots_busy == 0


@pytest.mark.parametrize("code", ["block_poisoned", "request_ended", "layer_unmapped"])
def test_refused_loads_give_the_slot_back(connect: Connect, kvd: FakeKvd, code: str) -> None:
    client = connect()
    kvd.code_of = lambda item: code if isinstance(item, AcquiredItem) else ""
    error = refusal(lambda: client.slots.acquire(0, 3, LOADS))
    assert error.code == code
    settled(client)
    expected = [AcquiredItem(0, 0, 3, LOADS), LoadEndedItem(0, 0, False), ComputedItem(0, 0, False)]
    assert kvd.seen == expected
    kvd.free(0, 1)
    assert client.slots.acquire(0).epoch == 1


def test_loads_that_are_never_answered_give_the_slot_back(connect: Connect, kvd: FakeKvd) -> None:
    client = connect(resend_s=60.0)
    kvd.silent_on(msg.Events)
    error = refusal(lambda: client.slots.acquire(0, 3, LOADS, deadline_s=0.02))
    assert error.code == "deadline_exceeded"
    assert client.statistics().slots_busy == 0
    assert client.statistics().events_unacked == 3


def test_blocks_of_another_life_are_not_loaded(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    error = refusal(lambda: client.slots.acquire(0, 3, LOADS, boot_id=bytes(16)))
    assert error.code == "pool_lost"
    assert not kvd.seen
    assert client.slots.acquire(0, 3, LOADS, boot_id=client.boot_id).epoch == 0


@pytest.mark.parametrize(
    "load", [LoadItem("", [1], 1), LoadItem("r", [-1], 1), LoadItem("r", [1], -1)]
)
def test_loads_that_kvd_could_not_read_are_refused_before(
    connect: Connect, kvd: FakeKvd, load: LoadItem
) -> None:
    error = refusal(lambda: connect().slots.acquire(0, 3, [load]))
    assert error.code == "frame_malformed"
    assert "AcquiredItem" in str(error)
    assert not kvd.seen
