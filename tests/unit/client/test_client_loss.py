"""The connection is lost: who waits is told or waits on, and in time it is given up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_shim.client import KvdClient, LinkState, Tenancy
from engine_shim.client.gate_view import GateView
from kvd.wire import attach
from kvd.wire import messages as msg
from kvd.wire.gate_layout import STATE_HELD
from kvd.wire.slot_items import (
    AcquiredItem,
    ComputedItem,
    LoadItem,
    ReadItem,
    SaveItem,
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


# Being told -----------------------------------------------------------------------------------


def test_eight_sleepers_all_wake_and_go_on_waiting_on_the_new_page(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect(num_slots=8, spin_us=0)
    for slot in range(8):
        kvd.publish(slot, 0, STATE_HELD)
    sleepers = [Background(lambda s=slot: client.slots.acquire(s)) for slot in range(8)]  # type: ignore[misc]
    closed_door(kvd)
    until(lambda: client.statistics().gate_waits.get("hangup", 0) == 8)
    lost(client)
    kvd.on_attach = None
    attached(client, 2)
    for slot in range(8):
        kvd.free(slot, 1)
    assert [sleeper.wait() for sleeper in sleepers] == [Tenancy(slot, 1, 1) for slot in range(8)]


def test_requests_under_way_end_at_once(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    asked = kvd.silent_on(msg.AwaitTransfer)
    also = kvd.silent_on(msg.Lookup)
    calls = [
        Background(lambda: client.await_transfer("t", deadline_s=60)),
        Background(lambda: client.lookup("r", [], deadline_s=60)),
    ]
    until(lambda: bool(asked) and bool(also))
    closed_door(kvd)
    assert [call.wait() for call in calls] == ["unreachable", "unreachable"]
    assert client.statistics().requests["unreachable"] == 2
    assert client.statistics().requests_open == 0


def test_while_the_connection_is_lost_nothing_is_asked_or_acquired(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect()
    closed_door(kvd)
    lost(client)
    error = refusal(lambda: client.lookup("r", []))
    assert error.code == "unreachable"
    assert str(kvd.directory / "attach.sock") in str(error)
    # The words of the old page still say free.
    assert refusal(lambda: client.slots.acquire(0, deadline_s=0.02)).code == "deadline_exceeded"
    assert not kvd.seen


def test_word_seen_before_but_taken_after_the_loss_is_void(
    connect: Connect, kvd: FakeKvd, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect()
    real = GateView.wait_free

    def late(view: GateView, slot: int, after: int, timeout_ns: int, spin_ns: int) -> object:
        outcome = real(view, slot, after, timeout_ns, spin_ns)
        closed_door(kvd)
        lost(client)
        return outcome

    monkeypatch.setattr(GateView, "wait_free", late)
    assert refusal(lambda: client.slots.acquire(0, deadline_s=0.1)).code == "deadline_exceeded"
    assert client.statistics().gate_waits == {"free": 1}
    assert client.statistics().slots_busy == 0
    monkeypatch.undo()
    kvd.on_attach = None
    assert client.slots.acquire(0).epoch == 0


def test_gate_whose_wake_up_is_broken_is_replaced(
    connect: Connect, kvd: FakeKvd, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect()
    real, broken = GateView.wait_free, [True]

    def once(view: GateView, slot: int, after: int, timeout_ns: int, spin_ns: int) -> object:
        if broken:
            broken.pop()
            return "hangup", 0
        return real(view, slot, after, timeout_ns, spin_ns)

    monkeypatch.setattr(GateView, "wait_free", once)
    assert client.slots.acquire(0).epoch == 0
    assert client.statistics().attaches == 2


@pytest.mark.parametrize(
    "code", ["stale_boot", "unauthorized", "engine_unknown", "stale_incarnation"]
)
def test_refusal_that_ends_the_session_leads_to_a_new_attach(
    connect: Connect, kvd: FakeKvd, code: str
) -> None:
    client = connect()
    kvd.on(msg.Lookup, lambda frame: msg.Error(frame.request_no, kvd.boot_id, code))
    assert refusal(lambda: client.lookup("r", [])).code == code
    attached(client, 2)
    kvd.as_usual(msg.Lookup)
    assert client.lookup("r", []) == [1, 2]


def test_frame_of_another_life_of_kvd_is_not_believed(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    kvd.on(msg.Lookup, lambda frame: msg.Found(frame.request_no, bytes(16), [9]))
    assert refusal(lambda: client.lookup("r", [])).code == "unreachable"
    attached(client, 2)


def test_forged_acknowledgement_ends_the_session_and_releases_nothing(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect()
    kvd.on(msg.Events, lambda frame: msg.Seen(frame.request_no, kvd.boot_id, 99))
    ticket = client.slots.computed(client.slots.acquire(0))
    until(lambda: len(kvd.hellos) > 1)
    kvd.as_usual(msg.Events)
    assert ticket.wait(5) == ""
    assert kvd.seen == [AcquiredItem(0, 0), ComputedItem(0, 0)]


def test_message_that_was_not_asked_for_on_the_attach_connection(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect()
    kvd.do(lambda: [c.send(b"hello") for c in kvd._connections.values()].clear())
    attached(client, 2)


# Giving up ------------------------------------------------------------------------------------


def test_kvd_that_stays_away_fails_the_client_and_retry_begins_again(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect(reconnect_deadline_s=0.2)
    kvd.publish(0, 0, STATE_HELD)
    tenancy = client.slots.acquire(1)
    client.flush()
    sleeper = Background(lambda: client.slots.acquire(0, deadline_s=60))
    closed_door(kvd)
    lost(client)
    ticket = client.slots.computed(tenancy)
    until(lambda: client.state is LinkState.FAILED)
    assert sleeper.wait() == "unreachable"
    assert ticket.wait(60) == "unreachable"
    error = refusal(lambda: client.lookup("r", []))
    assert error.code == "unreachable"
    assert "percent=1" in str(error)
    assert refusal(lambda: client.flush(60)).code == "unreachable"
    kvd.on_attach = None

    def tried_again() -> bool:
        client.retry()
        return client.state is LinkState.ATTACHED

    until(tried_again)
    assert ticket.wait(5) == ""
    assert kvd.seen == [AcquiredItem(1, 0), ComputedItem(1, 0)]


def test_refusal_that_no_retry_can_cure_fails_at_once(connect: Connect, kvd: FakeKvd) -> None:
    client = connect(reconnect_deadline_s=60.0)

    def turn() -> None:
        kvd.on(msg.Hello, lambda frame: msg.Error(frame.request_no, kvd.boot_id, "layout_mismatch"))
        kvd._hang_up()

    kvd.do(turn)
    until(lambda: client.state is LinkState.FAILED)
    assert "layout_mismatch" in str(refusal(lambda: client.lookup("r", [])))


def test_close_while_lost_ends_sleepers(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    closed_door(kvd)
    lost(client)
    sleeper = Background(lambda: client.slots.acquire(0, deadline_s=60))
    client.close()
    assert sleeper.wait() == "closed"
