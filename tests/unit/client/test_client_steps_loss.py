"""Steps whose blocks kvd keeps: what becomes of them when the connection, or kvd, ends."""

from __future__ import annotations

from functools import partial

import pytest

from engine_shim.client import KeptStep
from kvd.wire import messages as msg
from kvd.wire.slot_items import (
    AcquiredItem,
    WrittenItem,
)
from tests.unit.client.fake_kvd import FakeKvd
from tests.unit.client.kept import (
    LOADS,
    SAVES,
    Connect,
    began,
    closings,
    opened,
)
from tests.unit.client.test_client_loss import closed_door
from tests.unit.client.waiting import attached, lost, refusal


def test_the_same_kvd_goes_on_with_a_step(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    loads, saves = opened(client)
    tenancy = began(client, loads)
    kvd.hang_up()
    attached(client, 2)
    client.slots.load_ended(tenancy, True)
    client.slots.written(tenancy, 3, SAVES, kept=saves)
    assert client.slots.answer_to_save(tenancy, "s") is saves.answer
    other, answer = client.slots.begin(1, 4, LOADS, kept=loads)
    assert answer is loads.answer
    for kept in (loads, saves):
        client.slots.close_step(kept)
    client.slots.abandon(other)
    client.slots.save_ended(tenancy, "s", True)
    client.flush()
    assert closings(kvd) == [1, 2]


def test_another_kvd_keeps_nothing_of_a_step(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd]
) -> None:
    client = connect()
    desk = client.slots
    loads, saves = opened(client)
    loading, saving = began(client, loads, 0), desk.begin(1, 3)[0]
    heard = desk.written(saving, 3, SAVES, kept=saves)
    kvds.append(kvd.successor())
    attached(client, 2)
    assert kvds[-1].hellos[0].slots[1].savers == ["s"], "it may be copying already"
    assert refusal(lambda: desk.check_loaded(loading)).code == "pool_lost"
    assert refusal(lambda: desk.save_started(saving, "s")).code == "pool_lost"
    assert heard.wait(5) in ("", "pool_lost")  # the old one may have heard of it
    desk.abandon(loading)
    desk.save_ended(saving, "s", False)
    desk.computed(saving)
    kvds[-1].free(0, 1)
    fresh, answer = desk.begin(0, 3, LOADS, kept=loads)
    assert answer is not loads.answer
    assert refusal(lambda: desk.written(saving._replace(), 3, SAVES, kept=saves))
    armed = desk.written(fresh, 3, SAVES, kept=saves)
    assert desk.answer_to_save(fresh, "s") is armed
    assert (loads.copies, saves.copies) == (0, 0)
    for kept in (loads, saves):
        desk.close_step(kept)
    client.flush()
    assert AcquiredItem(0, 1, 3, LOADS) in kvds[-1].seen
    assert WrittenItem(0, 1, 3, SAVES) in kvds[-1].seen
    assert closings(kvds[-1]) == [1, 2], "in case that it was asked"


def test_nothing_is_saved_for_the_sake_of_a_step_while_the_connection_is_lost(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect()
    _, saves = opened(client)
    tenancy, _ = client.slots.begin(0, 3)
    closed_door(kvd)
    lost(client)
    armed = client.slots.written(tenancy, 3, SAVES, kept=saves)
    assert client.slots.answer_to_save(tenancy, "s") is armed
    kvd.on_attach = None
    assert armed.wait(5) == ""
    assert client.slots.save_started(tenancy, "s") is None


@pytest.mark.parametrize("code", ["", "already_armed", "block_not_reserved", "span_busy"])
def test_a_save_of_which_the_next_kvd_was_not_told_is_not_copied(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd], code: str
) -> None:
    """It is announced when the next kvd has been told of the slots, and before it is heard.

    What that one says to it is not why it failed.
    """
    client = connect()
    _, saves = opened(client)
    tenancy, _ = client.slots.begin(0, 3)
    client.flush()
    kvd.stop()
    lost(client)
    started: list[str] = []

    def meanwhile(new: FakeKvd, frame: msg.Hello) -> msg.ServerFrame:
        client.slots.written(tenancy, 3, SAVES, kept=saves)
        error = refusal(lambda: client.slots.save_started(tenancy, "s", 0.0))
        started.append(error.code)
        return new.usual(frame)

    def prepare(fake: FakeKvd) -> None:
        fake.on(msg.Hello, partial(meanwhile, fake))
        fake.code_of = lambda item: code

    kvds.append(kvd.successor(prepare=prepare))
    attached(client, 2)
    client.flush()
    assert started == ["deadline_exceeded"]
    assert refusal(lambda: client.slots.save_started(tenancy, "s")).code == "pool_lost"


def test_a_save_that_was_announced_between_two_hellos_is_lost_with_its_pool(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd]
) -> None:
    """The first hello is turned away, the second says that it is armed; then it comes as an event
    besides."""
    client = connect()
    _, saves = opened(client)
    tenancy, _ = client.slots.begin(0, 3)
    client.flush()
    kvd.stop()
    lost(client)

    def away(new: FakeKvd, frame: msg.Hello) -> msg.ServerFrame:
        new.as_usual(msg.Hello)
        client.slots.written(tenancy, 3, SAVES, kept=saves)
        return msg.Error(frame.request_no, new.boot_id, "starting")

    def prepare(fake: FakeKvd) -> None:
        fake.on(msg.Hello, partial(away, fake))
        fake.code_of = lambda item: "already_armed" if isinstance(item, WrittenItem) else ""

    new = kvd.successor(prepare=prepare)
    kvds.append(new)
    attached(client, 2)
    client.flush()
    assert [hello.slots[0].savers for hello in new.hellos] == [[], ["s"]]
    assert new.seen == [WrittenItem(0, 0, 3, SAVES)]
    assert refusal(lambda: client.slots.save_started(tenancy, "s")).code == "pool_lost"


def test_a_step_that_the_next_kvd_was_asked_for_is_closed_there(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd]
) -> None:
    client = connect()
    kvd.stop()
    lost(client)
    steps: list[KeptStep] = []

    def meanwhile(new: FakeKvd, frame: msg.Hello) -> msg.ServerFrame:
        steps.append(client.slots.open_step(LOADS))
        return new.usual(frame)

    new = kvd.successor(prepare=lambda fake: fake.on(msg.Hello, partial(meanwhile, fake)))
    kvds.append(new)
    attached(client, 2)
    assert steps[0].answer.wait(5) == ""
    assert client.slots.begin(0, 3, LOADS, kept=steps[0])[1] is not steps[0].answer
    client.slots.close_step(steps[0])
    client.flush()
    assert closings(new) == [1]
