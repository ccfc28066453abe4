"""What goes well in a tenancy is told in as few items as it can be, and never too early."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from engine_shim.client import KvdClient, Tenancy
from kvd.wire import messages as msg
from kvd.wire.slot_items import (
    ACQUIRED,
    COMPUTED,
    DID_MAX,
    LOADED,
    SAVED,
    WRITTEN,
    AcquiredItem,
    BadSumItem,
    ComputedItem,
    LoadEndedItem,
    LoadItem,
    PoisonedItem,
    SaveEndedItem,
    SaveItem,
    SlotItem,
    StepClosedItem,
    UsedItem,
    WrittenItem,
)
from tests.unit.client.fake_kvd import FakeKvd
from tests.unit.client.kept import FEWER, LOADS, SAVES, Connect, barrier, began, opened
from tests.unit.client.test_client_loss import closed_door
from tests.unit.client.waiting import attached, lost, refusal, until

HOUR_NS = 3_600_000_000_000


@pytest.fixture(autouse=True)
def _slow_rides(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rides is sent only with something else."""
    monkeypatch.setattr("engine_shim.client.events.RIDE_NS", HOUR_NS)


def told(kvd: FakeKvd) -> list[SlotItem]:
    """What came behind two steps."""
    return kvd.told[2:]


def test_all_of_a_tenancy_is_one_item(connect: Connect, kvd: FakeKvd) -> None:
    client = connect(contributes=True)
    desk = client.slots
    loads, saves = opened(client)
    tenancy = began(client, loads)
    desk.load_ended(tenancy, True)
    heard = desk.written(tenancy, 3, SAVES, kept=saves)
    desk.computed(tenancy, rides=True)
    assert desk.save_ended(tenancy, "s", True, rides=True) is heard
    for kept in (loads, saves):
        desk.close_step(kept)
    client.flush()
    assert told(kvd) == [
        UsedItem(0, 0, 3, DID_MAX, loads.number, saves.number, "s"),
        StepClosedItem(1),
        StepClosedItem(2),
    ]
    assert heard.wait(5) == ""


@pytest.mark.parametrize("what", ["loads", "saves"])
def test_it_is_one_item_though_kvd_had_not_answered_the_step(
    connect: Connect, kvd: FakeKvd, what: str
) -> None:
    client = connect(contributes=True, resend_s=60.0)
    desk, held = client.slots, kvd.silent_on(msg.Events)
    loads, saves = (LOADS, ()) if what == "loads" else ((), SAVES)
    step = desk.open_step(loads, saves)
    tenancy, _ = desk.begin(0, 3, loads, kept=step if loads else None)
    if saves:
        desk.written(tenancy, 3, saves, kept=step)
        desk.computed(tenancy, rides=True)
    until(lambda: len(held) == 1)
    kvd.as_usual(msg.Events)
    kvd.answer_late(held[0])
    assert step.answer.wait(5) == ""
    if loads:
        desk.load_ended(tenancy, True)
        desk.written(tenancy, 3)
        desk.computed(tenancy, rides=True)
    else:
        desk.save_ended(tenancy, "s", True, rides=True)
    client.flush()
    assert kvd.told[1:] == [
        UsedItem(0, 0, 3, ACQUIRED | LOADED | WRITTEN | COMPUTED, 1)
        if loads
        else UsedItem(0, 0, 3, ACQUIRED | WRITTEN | COMPUTED | SAVED, 0, 1, "s")
    ]


def test_some_of_the_copies_of_a_step_are_named_in_full(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    loads, saves = opened(client)
    some = [LoadItem("r", [2], 4)]
    tenancy, _ = client.slots.begin(0, 3, some, kept=loads)
    client.slots.written(tenancy, 3, FEWER, kept=saves)
    client.flush()
    assert told(kvd) == [AcquiredItem(0, 0, 3, some), WrittenItem(0, 0, 3, FEWER)]


def test_tenancies_of_one_slot_are_told_apart_and_in_order(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    desk = client.slots
    for _ in range(2):
        tenancy = desk.acquire(0, 3, early=True)
        desk.written(tenancy, 3)
        desk.computed(tenancy, rides=True)
    client.flush()
    did = ACQUIRED | WRITTEN | COMPUTED
    assert kvd.told == [UsedItem(0, 0, 3, did), UsedItem(0, 1, 3, did)]


def test_what_was_sent_is_not_added_to(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    desk = client.slots
    _, saves = opened(client)
    tenancy, _ = desk.begin(0, 3)
    desk.written(tenancy, 3, SAVES, kept=saves)
    client.flush()
    desk.computed(tenancy)
    desk.save_ended(tenancy, "s", True)
    client.flush()
    assert told(kvd) == [
        UsedItem(0, 0, 3, ACQUIRED | WRITTEN, 0, saves.number),
        UsedItem(0, 0, -1, COMPUTED | SAVED, 0, 0, "s"),
    ]


def test_a_step_is_closed_behind_the_end_of_its_last_copy(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    desk = client.slots
    loads, saves = opened(client)
    tenancy = began(client, loads)
    desk.close_step(loads)
    client.flush()
    desk.load_ended(tenancy, True)
    client.flush()
    assert told(kvd)[1:] == [UsedItem(0, 0, -1, LOADED), StepClosedItem(loads.number)]
    desk.written(tenancy, 3, SAVES, kept=saves)
    desk.computed(tenancy)
    desk.close_step(saves)
    client.flush()
    desk.save_ended(tenancy, "s", True)
    client.flush()
    ended = UsedItem(0, 0, -1, SAVED, 0, 0, "s")
    assert told(kvd)[-2:] == [ended, StepClosedItem(saves.number)]


def test_an_item_under_way_is_not_added_to_however_late_its_answer(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect(resend_s=0.02)
    desk = client.slots
    tenancy = desk.acquire(0, 3)
    held = kvd.silent_on(msg.Events)
    desk.written(tenancy, 3)
    ticket = desk.poisoned(tenancy)
    ended = desk.computed(tenancy)
    assert ended is not ticket
    while len(held) < 3:
        ticket.wait(0.01)
    kvd.as_usual(msg.Events)
    client.flush()
    assert kvd.told == [
        UsedItem(0, 0, 3, ACQUIRED | WRITTEN),
        PoisonedItem(0, 0),
        UsedItem(0, 0, -1, COMPUTED),
    ]


def bad_load(client: KvdClient, tenancy: Tenancy) -> SlotItem:
    client.slots.load_ended(tenancy, True, [BadSumItem(1, 2, 3)])
    return LoadEndedItem(0, 0, True, [BadSumItem(1, 2, 3)])


def failed_load(client: KvdClient, tenancy: Tenancy) -> SlotItem:
    client.slots.load_ended(tenancy, False)
    return LoadEndedItem(0, 0, False)


def poisoned(client: KvdClient, tenancy: Tenancy) -> SlotItem:
    client.slots.load_ended(tenancy, True)
    client.slots.poisoned(tenancy)
    return PoisonedItem(0, 0)


def named_saves(client: KvdClient, tenancy: Tenancy) -> SlotItem:
    client.slots.load_ended(tenancy, True)
    client.slots.written(tenancy, 3, SAVES)
    return WrittenItem(0, 0, 3, SAVES)


@pytest.mark.parametrize("other", [bad_load, failed_load, poisoned, named_saves])
def test_nothing_is_told_before_what_happened_before_it(
    connect: Connect, kvd: FakeKvd, other: Callable[[KvdClient, Tenancy], SlotItem]
) -> None:
    """Nothing is sent meanwhile."""
    client = connect(contributes=True)
    loads, _ = opened(client)
    tenancy = began(client, loads)
    closed_door(kvd)
    lost(client)
    item = other(client, tenancy)
    client.slots.computed(tenancy, rides=True)
    kvd.on_attach = None
    attached(client, 2)
    client.flush()
    at = told(kvd).index(item)
    assert told(kvd)[at + 1 :] == [UsedItem(0, 0, -1, COMPUTED)]
    first = told(kvd)[0]
    assert isinstance(first, UsedItem)
    assert first.did in (ACQUIRED, ACQUIRED | LOADED)


@pytest.mark.parametrize("how", ["computed", "saved", "abandoned"])
def test_what_did_not_go_well_is_an_event_of_its_own(
    connect: Connect, kvd: FakeKvd, how: str
) -> None:
    client = connect()
    desk = client.slots
    _, saves = opened(client)
    tenancy, _ = desk.begin(0, 3)
    if how == "saved":
        desk.written(tenancy, 3, SAVES, kept=saves)
        desk.save_ended(tenancy, "s", False)
    elif how == "computed":
        desk.computed(tenancy, False)
    else:
        desk.abandon(tenancy)
    client.flush()
    first, *rest = told(kvd)
    assert isinstance(first, UsedItem)
    failed = SaveEndedItem(0, 0, "s", False) if how == "saved" else ComputedItem(0, 0, False)
    assert rest == [failed]


def test_a_save_with_counts_or_checksums_or_a_long_name_says_so(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect(num_slots=3)
    desk = client.slots
    long = "\N{SNOWMAN}" * 60
    cases = [("s", (3,), b""), ("s", (), b"1234"), (long, (), b"")]
    for slot, (name, tokens, sums) in enumerate(cases):
        tenancy = desk.acquire(slot, 3)
        desk.written(tenancy, 3, [SaveItem(name, [1], [4])])
        desk.computed(tenancy)
        desk.save_ended(tenancy, name, True, tokens, sums)
    client.flush()
    ends = [item for item in kvd.told if isinstance(item, SaveEndedItem)]
    assert ends == [
        SaveEndedItem(0, 0, "s", True, [3]),
        SaveEndedItem(1, 0, "s", True, [], b"1234"),
        SaveEndedItem(2, 0, long, True),
    ]


def test_a_tenancy_that_is_written_for_another_layer_is_told_in_two(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect()
    tenancy = client.slots.acquire(0, 3)
    client.slots.written(tenancy, 5)
    client.flush()
    assert kvd.told == [UsedItem(0, 0, 3, ACQUIRED), UsedItem(0, 0, 5, WRITTEN)]


@pytest.mark.parametrize("layer", [-2, 1 << 70])
def test_a_layer_that_is_none_is_refused_and_nothing_is_told(
    connect: Connect, kvd: FakeKvd, layer: int
) -> None:
    client = connect()
    tenancy = client.slots.acquire(0)
    assert refusal(lambda: client.slots.written(tenancy, layer)).code == "frame_malformed"
    client.flush()
    assert kvd.told == [UsedItem(0, 0, -1, ACQUIRED)]


def test_the_end_behind_an_announcement_is_told_to_the_next_kvd(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd]
) -> None:
    """Its beginning was never sent: the hello tells it, and the end must not be told with it."""
    client = connect()
    desk = client.slots
    _, saves = opened(client)
    tenancy, _ = desk.begin(0, 3)
    desk.written(tenancy, 3, SAVES, kept=saves)
    barrier(client)
    assert told(kvd) == []
    kvd.stop()
    lost(client)

    def meanwhile(new: FakeKvd, frame: msg.Hello) -> msg.ServerFrame:
        desk.computed(tenancy)
        desk.save_ended(tenancy, "s", False)
        return new.usual(frame)

    new = kvd.successor(prepare=lambda fake: fake.on(msg.Hello, partial(meanwhile, fake)))
    kvds.append(new)
    attached(client, 2)
    client.flush()
    (said,) = new.hellos[-1].slots[:1]
    assert (said.computing, said.savers) == (True, ["s"])
    assert new.told == [UsedItem(0, 0, -1, COMPUTED), SaveEndedItem(0, 0, "s", False)]


def test_the_same_kvd_is_told_the_rest_of_what_it_did_not_hear(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect()
    tenancy = client.slots.acquire(0, 3)
    kvd.hang_up()
    attached(client, 2)
    client.slots.written(tenancy, 3)
    client.slots.computed(tenancy)
    client.flush()
    assert AcquiredItem(0, 0, 3) in kvd.seen
    assert kvd.seen[-2:] == [WrittenItem(0, 0, 3), ComputedItem(0, 0)]


@pytest.mark.parametrize("kind", [AcquiredItem, WrittenItem, ComputedItem])
def test_a_refusal_of_any_part_is_heard(
    connect: Connect, kvd: FakeKvd, kind: type[SlotItem]
) -> None:
    client = connect()
    desk = client.slots
    kvd.code_of = lambda item: "poisoned" if isinstance(item, kind) else ""
    tenancy = desk.acquire(0, 3)
    written, ended = desk.written(tenancy, 3), desk.computed(tenancy)
    assert [written.wait(5), ended.wait(5)] == ["poisoned", "poisoned"]
    assert client.statistics().events_refused == 1
