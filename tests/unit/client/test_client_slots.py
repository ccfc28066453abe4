"""The steps of a tenancy: each arrives once and in order, and kvd's questions get the truth."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_shim.client import KvdClient
from kvd.wire import messages as msg
from kvd.wire.slot_items import (
    AcquiredItem,
    ComputedItem,
    LoadEndedItem,
    LoadItem,
    PoisonedItem,
    ReadItem,
    SaveEndedItem,
    SaveItem,
    StepItem,
    WrittenItem,
)
from tests.unit.client.fake_kvd import FakeKvd
from tests.unit.client.waiting import Background, refusal, until

Connect = Callable[..., KvdClient]

LOADS = [LoadItem("r", [1, 2], 8)]
SAVES = [SaveItem("s", [1, 2], [4, 4])]


def settled(client: KvdClient) -> KvdClient:
    """Every event is acknowledged."""
    client.flush()
    return client


# A tenancy's steps ----------------------------------------------------------------------------


def test_a_whole_tenancy_arrives_in_order(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    desk = client.slots
    reads = [ReadItem("t-1", "host:1", 0, 8, [0, 1], [1, 2])]
    tenancy = desk.acquire(1, 3, LOADS)
    desk.load_ended(tenancy, True)
    desk.written(tenancy, 3, SAVES, reads)
    desk.save_started(tenancy, "s")
    desk.computed(tenancy)
    assert desk.save_ended(tenancy, "s", True, [4, 2]).wait(5) == ""
    assert desk.poisoned(tenancy).wait(5) == ""
    assert kvd.seen == [
        AcquiredItem(1, 0, 3, LOADS),
        LoadEndedItem(1, 0, True),
        WrittenItem(1, 0, 3, SAVES, reads),
        ComputedItem(1, 0, True),
        SaveEndedItem(1, 0, "s", True, [4, 2]),
        PoisonedItem(1, 0),
    ]
    frames = kvd.of(msg.Events)
    assert {(f.boot_id, f.incarnation) for f in frames} == {
        (kvd.boot_id, client.identity.incarnation)
    }


def test_save_does_not_start_before_kvd_keeps_both_ends(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    kvd.code_of = lambda item: "block_not_reserved" if isinstance(item, WrittenItem) else ""
    tenancy = client.slots.acquire(0)
    client.slots.written(tenancy, 3, SAVES)
    error = refusal(lambda: client.slots.save_started(tenancy, "s"))
    assert error.code == "block_not_reserved"
    kvd.silent_on(msg.Events)
    other = client.slots.acquire(1)
    client.slots.written(other, 3, SAVES)
    error = refusal(lambda: client.slots.save_started(other, "s", 0.02))
    assert error.code == "deadline_exceeded"


def test_a_save_of_what_others_load_is_announced_again(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    codes = ["", "span_busy", "span_busy", "", ""]
    kvd.code_of = lambda item: codes.pop(0)
    tenancy = client.slots.acquire(0)
    client.slots.written(tenancy, 3, SAVES)
    saving = Background(lambda: client.slots.save_started(tenancy, "s"))
    assert client.slots.confirm(tenancy).wait(5) == ""
    saving.wait()
    client.slots.computed(tenancy)
    settled(client)
    said = WrittenItem(0, 0, 3, SAVES)
    assert kvd.seen == [AcquiredItem(0, 0), said, said, said, ComputedItem(0, 0, True)]


def test_a_save_of_what_others_load_for_ever_is_refused(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    kvd.code_of = lambda item: "span_busy" if isinstance(item, WrittenItem) else ""
    tenancy = client.slots.acquire(0)
    client.slots.written(tenancy, 3, SAVES)
    saving = Background(lambda: refusal(lambda: client.slots.save_started(tenancy, "s")).code)
    assert client.slots.confirm(tenancy, 0.1).wait(5) == "span_busy"
    client.slots.computed(tenancy)
    assert saving.wait() == "span_busy", "nothing is announced any more"


def test_only_a_busy_span_is_announced_again(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    kvd.code_of = lambda item: "block_poisoned" if isinstance(item, WrittenItem) else ""
    tenancy = client.slots.acquire(0)
    client.slots.written(tenancy, 3, SAVES)
    assert client.slots.confirm(tenancy).wait(5) == "block_poisoned"
    assert kvd.seen == [AcquiredItem(0, 0), WrittenItem(0, 0, 3, SAVES)]


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (lambda d, t: d.confirm(t), "tenancy_misused"),
        (lambda d, t: d.computed(t._replace(epoch=9)), "tenancy_misused"),
        (lambda d, t: d.written(t._replace(slot=1), 3), "tenancy_misused"),
        (lambda d, t: d.load_ended(t._replace(generation=0), True), "tenancy_misused"),
        (lambda d, t: d.poisoned(t._replace(slot=99)), "tenancy_misused"),
        (lambda d, t: d.save_ended(t, "nobody", True), "tenancy_misused"),
        (lambda d, t: d.save_started(t, "nobody"), "tenancy_misused"),
        (lambda d, t: d.written(t, 3, SAVES * 2), "tenancy_misused"),
        (lambda d, t: d.written(t, -1), "frame_malformed"),
        (lambda d, t: d.written(t, 3, [SaveItem("", [1], [1])]), "frame_malformed"),
        (lambda d, t: d.written(t, 3, reads=[ReadItem("a b", "h:1", 0, 1, [])]), "frame_malformed"),
        (
            lambda d, t: d.written(t, 3, [SaveItem("s", [1 << 20] * 2000, [1] * 2000)]),
            "frame_too_large",
        ),
    ],
)
def test_misused_step_changes_nothing(
    connect: Connect, kvd: FakeKvd, step: Callable[..., object], code: str
) -> None:
    kvd.frame_bytes_max = 8192
    client = connect()
    tenancy = client.slots.acquire(0)
    assert refusal(lambda: step(client.slots, tenancy)).code == code
    assert client.slots.written(tenancy, 3, SAVES).wait(5) == ""
    assert client.slots.computed(tenancy).wait(5) == ""
    assert len(kvd.seen) == 3


def test_abandon_ends_loads_and_computing_once(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    tenancy = client.slots.acquire(0, 3, LOADS)
    client.slots.abandon(tenancy)
    client.slots.abandon(tenancy)
    settled(client)
    assert kvd.seen[1:] == [LoadEndedItem(0, 0, False), ComputedItem(0, 0, False)]


def test_goodbye_is_refused_while_a_slot_is_in_use(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    tenancy = client.slots.acquire(0)
    assert refusal(client.goodbye).code == "tenancy_misused"
    assert not kvd.of(msg.Goodbye)
    client.slots.computed(tenancy)
    client.goodbye()
    assert len(kvd.of(msg.Goodbye)) == 1
    assert isinstance(kvd.frames[-1], msg.Goodbye)  # after every event


# Batches, window, room ------------------------------------------------------------------------


def test_busy_is_waited_out_and_nothing_is_lost(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    busy = iter(["busy", "starting", "busy"])

    def sometimes(frame: msg.Events) -> msg.ServerFrame:
        code = next(busy, "")
        if code:
            return msg.Error(frame.request_no, kvd.boot_id, code)
        return kvd.usual(frame)

    kvd.on(msg.Events, sometimes)
    tenancy = client.slots.acquire(0)
    assert client.slots.computed(tenancy).wait(5) == ""
    assert kvd.seen == [AcquiredItem(0, 0), ComputedItem(0, 0)]
    assert client.statistics().events_resent > 0


def test_an_acquire_that_nothing_follows_arrives_by_itself(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    client.slots.acquire(0)
    until(lambda: kvd.seen == [AcquiredItem(0, 0)])
    client.slots.acquire(1)
    until(lambda: len(kvd.seen) == 2)


def test_flush_waits_for_no_company(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    tenancy = client.slots.acquire(0)
    client.slots.written(tenancy, 1)
    client.flush()
    assert kvd.seen == [AcquiredItem(0, 0, 1), WrittenItem(0, 0, 1)]


def test_events_that_ride_leave_room_for_others(connect: Connect, kvd: FakeKvd) -> None:
    client = connect(num_slots=8, events_max=1)
    for slot in range(8):
        client.slots.acquire(slot)
    settled(client)
    assert [item.slot for item in kvd.seen if not isinstance(item, StepItem)] == list(range(8))


def test_what_waits_goes_out_in_one_batch(connect: Connect, kvd: FakeKvd) -> None:
    client = connect(num_slots=64, window=1, resend_s=60.0)
    held = kvd.silent_on(msg.Events)
    client.slots.acquire(0)
    until(lambda: bool(held))
    for slot in range(1, 64):
        client.slots.acquire(slot)
    kvd.as_usual(msg.Events)
    kvd.answer_late(held[0])
    settled(client)
    assert [len(frame.items) for frame in kvd.of(msg.Events)] == [1, 63]
    assert [item.slot for item in kvd.seen if not isinstance(item, StepItem)] == list(range(64))


def test_batches_keep_kvds_limits(connect: Connect, kvd: FakeKvd) -> None:
    kvd.items_max, kvd.frame_bytes_max = 8, 8192
    client = connect(num_slots=32)
    saves = [SaveItem("s", [100_000] * 400, [16] * 400)]
    for slot in range(32):
        client.slots.written(client.slots.acquire(slot), 1, saves)
    settled(client)
    sizes = [len(frame.items) for frame in kvd.of(msg.Events)]
    assert max(sizes) <= 8
    assert [item.slot for item in kvd.seen if not isinstance(item, StepItem)] == [
        slot for slot in range(32) for _ in range(2)
    ]


def test_new_work_waits_when_too_much_is_unacknowledged_but_ends_never_do(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect(num_slots=4, events_max=3, resend_s=60.0)
    kvd.silent_on(msg.Events)
    tenancies = [client.slots.acquire(slot) for slot in range(3)]
    error = refusal(lambda: client.slots.acquire(3, deadline_s=0.02))
    assert error.code == "busy"
    assert "limit of 3 slot events" in str(error)
    error = refusal(lambda: client.slots.written(tenancies[0], 1, SAVES, deadline_s=0.02))
    assert error.code == "busy"
    for tenancy in tenancies:
        client.slots.computed(tenancy)
    assert client.statistics().events_unacked == 6


def test_missing_acknowledgement_is_asked_for_again(connect: Connect, kvd: FakeKvd) -> None:
    client = connect(resend_s=0.02)
    lost = iter([True, True])

    def lossy(frame: msg.Events) -> msg.ServerFrame | None:
        reply = kvd.usual(frame)
        return None if next(lost, False) else reply

    kvd.on(msg.Events, lossy)
    tenancy = client.slots.acquire(0)
    client.slots.computed(tenancy)
    settled(client)
    assert kvd.seen == [AcquiredItem(0, 0), ComputedItem(0, 0)]


# Questions ------------------------------------------------------------------------------------


def answers(kvd: FakeKvd) -> list[tuple[object, ...]]:
    return [
        (frame.slot, frame.epoch, frame.kind, frame.owner, frame.truth)
        for frame in kvd.of(msg.Answer)
        if isinstance(frame, msg.Answer)
    ]


def ask(kvd: FakeKvd, kind: str, owner: str, epoch: int = 0) -> tuple[object, ...]:
    """Ask the member, and wait for its answer."""
    before = len(answers(kvd))
    kvd.tell(msg.Query(0, kvd.boot_id, 0, epoch, kind, owner))
    until(lambda: len(answers(kvd)) > before)
    return answers(kvd)[-1]


def test_questions_are_answered_with_the_truth(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    desk = client.slots
    assert ask(kvd, "compute", "engine") == (0, 0, "compute", "engine", "never_started")
    tenancy = desk.acquire(0)
    assert ask(kvd, "compute", "engine")[-1] == "running"
    desk.written(tenancy, 3, SAVES)
    desk.computed(tenancy, ok=False).wait(5)
    assert ask(kvd, "compute", "engine")[-1] == "ended_failed"
    assert ask(kvd, "save", "s")[-1] == "running"
    desk.save_ended(tenancy, "s", True).wait(5)
    assert ask(kvd, "save", "s")[-1] == "ended_ok"
    assert ask(kvd, "save", "other")[-1] == "never_started"
    assert ask(kvd, "nonsense", "s")[-1] == "unknown"
    statistics = client.statistics()
    assert statistics.queries == 7
    assert statistics.replies_unknown == 0  # the replies to our answers are known


def test_end_counts_as_running_until_its_event_has_arrived(connect: Connect, kvd: FakeKvd) -> None:
    client = connect(resend_s=60.0)
    tenancy = client.slots.acquire(0)
    client.slots.written(tenancy, 3, SAVES).wait(5)
    held = kvd.silent_on(msg.Events)
    client.slots.save_ended(tenancy, "s", True, [4, 1])
    assert ask(kvd, "save", "s")[-1] == "running"
    until(lambda: bool(held))
    kvd.answer_late(held[0])
    until(lambda: client.statistics().events_unacked == 0)
    assert ask(kvd, "save", "s")[-1] == "ended_ok"
