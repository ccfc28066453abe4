"""kvd comes back, the same or another: nothing is lost, forged or taken twice."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial

import pytest

from engine_shim.client import KvdClient
from kvd.wire import attach
from kvd.wire import messages as msg
from kvd.wire.gate_layout import STATE_FREE, STATE_HELD
from kvd.wire.slot_items import (
    AcquiredItem,
    ComputedItem,
    LoadEndedItem,
    LoadItem,
    ReadItem,
    SaveEndedItem,
    SaveItem,
    WrittenItem,
)
from tests.unit.client.fake_kvd import FakeKvd
from tests.unit.client.waiting import Background, attached, lost, refusal, until

Connect = Callable[..., KvdClient]

LOADS = [LoadItem("r", [1, 2], 8)]
SAVES = [SaveItem("a", [1], [4]), SaveItem("b", [2], [4])]
READS = [ReadItem("t-1", "host:1", 0, 8, [0, 1])]
STARTING = attach.Refused("starting", {"percent": "1"})


def closed_door(kvd: FakeKvd) -> None:
    """kvd hangs up, and lets nobody in until `on_attach` is reset."""

    def close() -> None:
        kvd.on_attach = lambda message: STARTING
        kvd._hang_up()

    kvd.do(close)


# The same kvd again ---------------------------------------------------------------------------


def test_same_kvd_gets_every_event_once_and_blocks_stay_valid(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect()
    pool = client.pool
    region = client.region_create("g", 1, 1, 1, 1)
    tenancy = client.slots.acquire(0)
    client.flush()

    def vanish(frame: msg.Events) -> None:
        kvd.usual(frame)
        kvd.on_attach = lambda message: STARTING
        kvd._hang_up()

    kvd.code_of = lambda item: "block_poisoned" if isinstance(item, WrittenItem) else ""
    kvd.on(msg.Events, vanish)  # it does what is asked, and dies before it says so
    written = client.slots.written(tenancy, 3, SAVES)
    lost(client)
    computed = client.slots.computed(tenancy)
    kvd.as_usual(msg.Events)
    kvd.on_attach = None
    assert written.wait(5) == "block_poisoned"  # not '', though it was sent again
    assert computed.wait(5) == ""
    assert kvd.seen == [AcquiredItem(0, 0), WrittenItem(0, 0, 3, SAVES), ComputedItem(0, 0)]
    assert client.generation == 1
    assert client.pool is pool
    assert pool is not None
    assert not pool.closed
    assert not region.closed


def test_same_kvd_that_forgot_the_member_counts_as_another(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    client.slots.computed(client.slots.acquire(0))
    client.flush()

    def forget() -> None:
        kvd.next_no = 0
        kvd.words.clear()
        kvd._hang_up()

    kvd.do(forget)
    attached(client, 2)
    assert client.generation == 2
    assert client.slots.acquire(0).epoch == 1


# Another kvd ----------------------------------------------------------------------------------


def test_restarted_kvd_is_told_exactly_what_runs(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd]
) -> None:
    client = connect(num_slots=6)
    desk = client.slots
    kvd.publish(5, 9, STATE_HELD)
    computing = desk.acquire(0)
    saving = desk.acquire(1)
    desk.written(saving, 3, SAVES, READS)
    desk.computed(saving)
    desk.save_ended(saving, "a", True)
    done = desk.acquire(2)
    desk.computed(done)
    released = desk.acquire(3)
    desk.written(released, 4, [], READS)
    desk.computed(released)
    client.flush()
    kvd.publish(1, 0, STATE_HELD)
    kvd.publish(3, 1, STATE_FREE)
    kvds.append(kvd.successor())
    attached(client, 2)
    (hello,) = kvds[-1].hellos
    assert hello.slots == [
        msg.SlotAnnounce(0, 0, True, 0, computing=True),
        msg.SlotAnnounce(1, 0, False, 0, False, ["b"], 3, READS),
        msg.SlotAnnounce(2, 0, True, 0),
        msg.SlotAnnounce(3, 1, True, 0, layer=4),
        msg.SlotAnnounce(4, 0, True, -1),
        msg.SlotAnnounce(5, 9, False, -1),
    ]
    assert client.generation == 2
    assert desk.acquire(2).epoch == 1
    assert desk.acquire(3).epoch == 1
    assert desk.acquire(5).epoch == 9
    desk.computed(computing)


def test_events_that_the_old_kvd_never_answered_are_void_for_the_new_one(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd]
) -> None:
    client = connect(resend_s=60.0)
    tenancy = client.slots.acquire(0)
    client.flush()
    kvd.silent_on(msg.Events)
    written = client.slots.written(tenancy, 3, SAVES)
    kvd.stop()
    lost(client)
    ended = client.slots.save_ended(tenancy, "a", True)
    kvds.append(kvd.successor())
    attached(client, 2)
    assert (written.wait(5), ended.wait(5)) == ("pool_lost", "pool_lost")
    assert kvds[-1].hellos[0].slots[0].savers == ["b"]
    assert client.slots.save_ended(tenancy, "b", True).wait(5) == ""
    assert client.slots.computed(tenancy).wait(5) == ""
    assert kvds[-1].seen == [SaveEndedItem(0, 0, "b", True), ComputedItem(0, 0)]
    assert client.statistics().events_replaced == 2


def test_numbers_go_on_where_the_new_kvd_says(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd]
) -> None:
    client = connect()
    kvd.stop()
    lost(client)
    kvds.append(kvd.successor())
    kvds[-1].next_no = 1000
    attached(client, 2)
    client.slots.acquire(0)
    client.flush()
    assert [frame.first_no for frame in kvds[-1].of(msg.Events)] == [1000]


def test_what_ends_after_the_announcement_arrives_as_an_event(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd]
) -> None:
    client = connect()
    tenancy = client.slots.acquire(0)
    client.slots.written(tenancy, 3, SAVES)
    client.flush()
    kvd.stop()
    lost(client)

    def meanwhile(new: FakeKvd, frame: msg.Hello) -> msg.ServerFrame:
        client.slots.save_ended(tenancy, "a", True)
        return new.usual(frame)

    new = kvd.successor(prepare=lambda fake: fake.on(msg.Hello, partial(meanwhile, fake)))
    kvds.append(new)
    attached(client, 2)
    client.flush()
    assert new.hellos[-1].slots[0].savers == ["a", "b"]
    assert new.seen == [SaveEndedItem(0, 0, "a", True)]


def test_what_ends_after_a_hello_whose_answer_was_lost_is_not_lost(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd]
) -> None:
    client = connect(attempt_s=0.05)
    tenancy = client.slots.acquire(0)
    client.slots.written(tenancy, 3, SAVES)
    client.flush()
    kvd.stop()
    lost(client)

    def deaf(new: FakeKvd, frame: msg.Hello) -> None:
        new.as_usual(msg.Hello)
        new.usual(frame)  # it goes by this hello; the next one tells it nothing
        client.slots.save_ended(tenancy, "a", True)

    new = kvd.successor(prepare=lambda fake: fake.on(msg.Hello, partial(deaf, fake)))
    kvds.append(new)
    attached(client, 2)
    client.flush()
    assert [hello.slots[0].savers for hello in new.hellos] == [["a", "b"], ["b"]]
    assert new.seen == [SaveEndedItem(0, 0, "a", True)]


def test_memory_of_the_old_kvd_is_unmapped_once_nobody_looks_at_it(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd]
) -> None:
    client = connect()
    pool, region = client.pool, client.region_create("g", 1, 1, 1, 1)
    assert pool is not None
    view = pool.view()
    kvds.append(kvd.successor())
    attached(client, 2)
    assert client.pool is not pool
    until(lambda: region.closed)
    until(lambda: client.statistics().mappings_retired == 1)
    assert not pool.closed
    view.release()
    kvds.append(kvds[-1].successor())
    attached(client, 3)
    until(lambda: pool.closed)
    assert client.statistics().mappings_retired == 0


@pytest.mark.parametrize("has_view", [False, True])
def test_a_region_that_is_forgotten_is_unmapped_without_a_word_to_kvd(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd], has_view: bool
) -> None:
    client = connect()
    region = client.region_create("g", 1, 1, 1, 1)
    if has_view:
        view = region.view()
        kvds.append(kvd.successor())
        attached(client, 2)
        until(lambda: client.statistics().mappings_retired == 1)
        assert not region.closed
        view.release()
    asked = len(kvds[-1].frames)
    client.region_forget("g")
    until(lambda: region.closed)
    until(lambda: client.statistics().mappings_retired == 0)
    assert len(kvds[-1].frames) == asked
    assert client.region_create("g", 1, 1, 1, 1) is not region
    client.region_forget("another")


def test_view_that_is_alive_at_the_end_is_named_and_close_can_be_called_again(
    connect: Connect,
) -> None:
    client = connect()
    assert client.pool is not None
    view = client.pool.view()
    with pytest.raises(BufferError):
        client.close()
    view.release()
    client.close()
    assert client.pool.closed


# Blocks of an older life ----------------------------------------------------------------------


def test_loads_that_a_restart_interrupts_give_the_slot_back(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd]
) -> None:
    client = connect()
    kvd.silent_on(msg.Events)
    call = Background(lambda: client.slots.acquire(0, 3, LOADS))
    until(lambda: bool(kvd.of(msg.Events)))
    kvds.append(kvd.successor())
    assert call.wait() == "pool_lost"
    client.flush()
    assert kvds[-1].seen == [LoadEndedItem(0, 0, False), ComputedItem(0, 0, False)]
    assert client.statistics().slots_busy == 0


def test_loads_that_wait_for_a_span_do_not_ask_the_next_kvd_for_it(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd]
) -> None:
    client = connect()
    kvd.code_of = lambda item: "span_busy"
    call = Background(lambda: client.slots.acquire(0, 3, LOADS))
    until(lambda: client.statistics().events_refused > 2)
    kvds.append(kvd.successor())
    assert call.wait() == "pool_lost"
    client.flush()
    assert not [item for item in kvds[-1].seen if isinstance(item, AcquiredItem)]


def test_loads_that_the_next_kvd_was_asked_for_are_lost_with_their_pool(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd]
) -> None:
    """They are asked for again when the next kvd has been told of the slots already."""
    client = connect()
    kvd.code_of = lambda item: "span_busy"
    tenancy, ticket = client.slots.begin(0, 3, LOADS)
    assert ticket.wait(5) == "span_busy"
    kvd.stop()
    lost(client)
    calls: list[Background] = []

    def meanwhile(new: FakeKvd, frame: msg.Hello) -> msg.ServerFrame:
        calls.append(Background(lambda: client.slots.await_loads(tenancy, 3, LOADS, ticket, 20.0)))
        until(lambda: client.statistics().events_unacked == 1)
        return new.usual(frame)

    def prepare(fake: FakeKvd) -> None:
        fake.on(msg.Hello, partial(meanwhile, fake))
        fake.code_of = lambda item: "block_not_reserved"

    kvds.append(kvd.successor(prepare=prepare))
    attached(client, 2)
    assert calls[0].wait() == "pool_lost"
    assert AcquiredItem(0, 0, 3, LOADS) in kvds[-1].seen


def test_saves_of_an_older_life_are_refused_and_do_not_start(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd]
) -> None:
    client = connect()
    early, late = client.slots.acquire(0), client.slots.acquire(1)
    client.slots.written(early, 3, SAVES)
    client.flush()
    kvds.append(kvd.successor())
    attached(client, 2)
    assert refusal(lambda: client.slots.save_started(early, "a")).code == "pool_lost"
    assert refusal(lambda: client.slots.written(late, 3, SAVES)).code == "pool_lost"
    assert client.slots.written(late, 3, [], READS).wait(5) == ""


# Again and again ------------------------------------------------------------------------------


def test_many_restarts_under_load_never_give_a_slot_twice_and_leave_nothing_open(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd]
) -> None:
    client = connect(num_slots=1)
    epochs: list[int] = []
    inside: list[int] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            tenancy = client.slots.acquire(0, deadline_s=10)
            inside.append(tenancy.epoch)
            assert len(inside) == 1, "two tenancies at once"
            epochs.append(tenancy.epoch)
            inside.pop()
            client.slots.computed(tenancy)

    def releasing(fake: FakeKvd) -> FakeKvd:
        """Release the slot when computing has ended, as kvd does."""

        def take(frame: msg.Events) -> msg.ServerFrame:
            before = len(fake.seen)
            reply = fake.usual(frame)
            for item in fake.seen[before:]:
                if isinstance(item, ComputedItem) and item.epoch == fake.words[0][0]:
                    fake.words[0] = (item.epoch + 1, STATE_FREE)
                    assert fake.page is not None
                    fake.page.set(0, *fake.words[0])
                    os.eventfd_write(fake._event_fd, 1)
            return reply

        fake.on(msg.Events, take)
        return fake

    releasing(kvd)
    threads = [Background(lambda: work()) for _ in range(2)]
    until(lambda: len(epochs) > 10)
    open_fds = len(os.listdir("/proc/self/fd"))
    for life in range(2, 12):
        kvds.append(kvds[-1].successor(prepare=releasing))
        attached(client, life)
        had = len(epochs)
        until(lambda had=had: len(epochs) > had + 10)  # type: ignore[misc]
    stop.set()
    assert [thread.wait() for thread in threads] == [None, None]
    assert epochs == sorted(set(epochs))
    assert client.generation == 11
    until(lambda: len(os.listdir("/proc/self/fd")) <= open_fds)
