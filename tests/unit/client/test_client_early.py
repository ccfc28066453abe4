"""Slots that are taken by the member's own word, before kvd's gate says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_shim.client import KvdClient, SlotQuarantined, Tenancy
from kvd.wire import messages as msg
from kvd.wire.gate_layout import STATE_FREE, STATE_HELD, STATE_QUARANTINED
from kvd.wire.slot_items import (
    AcquiredItem,
    ComputedItem,
    LoadItem,
    ReadItem,
    SaveEndedItem,
    SaveItem,
    WrittenItem,
)
from tests.unit.client.fake_kvd import FakeKvd
from tests.unit.client.test_client_loss import closed_door
from tests.unit.client.waiting import Background, lost, refusal, until

Connect = Callable[..., KvdClient]

SAVES = [SaveItem("s", [1, 2], [4, 4])]
READS = [ReadItem("t-1", "host:1", 0, 8, [0, 1], [1, 2])]


def saved(client: KvdClient, *, rides: bool = False) -> Tenancy:
    """Take slot 0, and do all of a tenancy with a save."""
    desk = client.slots
    tenancy = desk.acquire(0, early=True)
    desk.written(tenancy, 3, SAVES)
    desk.computed(tenancy)
    desk.save_started(tenancy, "s")
    desk.save_ended(tenancy, "s", True, rides=rides)
    return tenancy


def waits(client: KvdClient, *, early: bool) -> bool:
    """Whether slot 0 cannot be taken now."""
    return refusal(lambda: client.slots.acquire(0, early=early, deadline_s=0.05)).code == (
        "deadline_exceeded"
    )


def test_a_slot_of_ours_alone_is_taken_before_kvd_has_released_it(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect()
    saved(client)
    assert waits(client, early=False), "who does not ask for it waits for the word"
    assert client.slots.acquire(0, early=True).epoch == 1
    client.flush()
    assert kvd.seen == [
        AcquiredItem(0, 0),
        WrittenItem(0, 0, 3, SAVES),
        ComputedItem(0, 0),
        SaveEndedItem(0, 0, "s", True),
        AcquiredItem(0, 1),
    ]
    assert client.statistics().gate_waits["early"] == 1


def test_a_member_may_be_any_number_of_epochs_ahead(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    assert [saved(client, rides=True).epoch for _ in range(5)] == list(range(5))
    kvd.publish(0, 2, STATE_FREE)
    tenancy = client.slots.acquire(0, early=True)
    assert tenancy.epoch == 5
    kvd.publish(0, 5, STATE_FREE)
    assert waits(client, early=False), "the word of the tenancy that is in use"
    assert waits(client, early=True)
    client.slots.computed(tenancy)
    kvd.publish(0, 6, STATE_FREE)
    assert client.slots.acquire(0).epoch == 6


def test_a_slot_that_was_offered_waits_for_the_word(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    desk = client.slots
    tenancy = desk.acquire(0)
    desk.written(tenancy, 3, SAVES, READS)
    desk.computed(tenancy, rides=True)
    desk.save_ended(tenancy, "s", True, rides=True)
    assert waits(client, early=True)
    kvd.publish(0, 1, STATE_FREE)
    assert desk.acquire(0, early=True).epoch == 1


def test_a_save_that_kvd_refused_is_waited_for_as_any(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    desk = client.slots
    kvd.code_of = lambda item: "block_poisoned" if isinstance(item, WrittenItem) else ""
    tenancy = desk.acquire(0)
    desk.written(tenancy, 3, SAVES)
    desk.computed(tenancy)
    assert waits(client, early=True)
    desk.save_ended(tenancy, "s", False)
    assert desk.acquire(0, early=True).epoch == 1


def test_the_end_of_the_last_use_wakes_who_waits_for_it(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    desk = client.slots
    tenancy = desk.acquire(0)
    desk.written(tenancy, 3, SAVES)
    waiting = Background(lambda: desk.acquire(0, early=True).epoch)
    desk.save_ended(tenancy, "s", True)
    assert waiting.result is None
    desk.computed(tenancy)
    assert waiting.wait() == 1


def test_refused_loads_leave_the_slot_to_the_next(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    kvd.code_of = lambda item: "block_poisoned" if isinstance(item, AcquiredItem) else ""
    loads = [LoadItem("r", [1, 2], 8)]
    assert refusal(lambda: client.slots.acquire(0, 3, loads, early=True)).code == "block_poisoned"
    assert client.slots.acquire(0, early=True).epoch == 1


@pytest.mark.parametrize("over", [True, False], ids=["over", "in use"])
def test_a_quarantined_slot_is_not_taken(connect: Connect, kvd: FakeKvd, over: bool) -> None:
    client = connect()
    desk = client.slots
    tenancy = desk.acquire(0)
    desk.written(tenancy, 3, SAVES)
    desk.computed(tenancy)
    if over:
        desk.save_ended(tenancy, "s", True)
    kvd.publish(0, 0, STATE_QUARANTINED)
    with pytest.raises(SlotQuarantined):
        desk.acquire(0, early=True)


def test_nothing_is_taken_while_kvd_is_away(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    saved(client)
    closed_door(kvd)
    lost(client)
    error = refusal(lambda: client.slots.acquire(0, early=True, deadline_s=0.05))
    assert error.code == "deadline_exceeded"
    assert "attaching" in str(error)


def test_a_step_of_an_earlier_life_takes_nothing(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    saved(client)
    error = refusal(lambda: client.slots.acquire(0, early=True, boot_id=bytes(16)))
    assert error.code == "pool_lost"


def test_what_rides_arrives_by_itself(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    saved(client, rides=True)
    until(lambda: SaveEndedItem(0, 0, "s", True) in kvd.seen)


def test_the_end_of_a_save_does_not_ride_where_others_read(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    tenancy = client.slots.acquire(0)
    client.slots.written(tenancy, 3, SAVES, READS).wait(5)
    client.slots.save_ended(tenancy, "s", True, rides=True)
    client.slots.computed(tenancy, rides=True)
    until(lambda: ComputedItem(0, 0) in kvd.seen)
    assert len(kvd.of(msg.Events)) > 1
    kvd.publish(0, 1, STATE_HELD)
