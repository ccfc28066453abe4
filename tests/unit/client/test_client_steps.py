"""Steps whose blocks kvd keeps as a whole: what is said when, and who closes them."""

from __future__ import annotations

import os

import pytest

from engine_shim.client import KvdRefused
from kvd.wire import messages as msg
from kvd.wire.slot_items import (
    AcquiredItem,
    ComputedItem,
    LoadEndedItem,
    LoadItem,
    SaveEndedItem,
    SaveItem,
    SlotItem,
    StepClosedItem,
    StepOpenedItem,
    WrittenItem,
)
from tests.unit.client.fake_kvd import FakeKvd
from tests.unit.client.kept import (
    FEWER,
    LOADS,
    SAVES,
    Connect,
    barrier,
    began,
    closings,
    opened,
    refuse,
)
from tests.unit.client.waiting import Background, refusal, until

HOUR_NS = 3_600_000_000_000


@pytest.fixture
def slow_rides(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rides is sent only with something else."""
    monkeypatch.setattr("engine_shim.client.events.RIDE_NS", HOUR_NS)


# What is said ---------------------------------------------------------------------------------


def test_copies_of_a_step_wait_for_its_answer_and_for_no_other(
    connect: Connect, kvd: FakeKvd, slow_rides: None
) -> None:
    client = connect(contributes=True)
    desk = client.slots
    loads, saves = opened(client)
    tenancy, answer = desk.begin(0, 3, LOADS, kept=loads)
    assert answer is loads.answer
    begun = desk.check_loaded(tenancy)
    assert begun is not None
    desk.written(tenancy, 3, SAVES, kept=saves)
    assert desk.answer_to_save(tenancy, "s") is saves.answer
    heard = desk.save_started(tenancy, "s", 0.0)
    assert heard is not None
    barrier(client)
    assert kvd.seen == [StepOpenedItem(1, LOADS), StepOpenedItem(2, [], SAVES)], "the rest rides"
    assert [begun.is_settled, heard.is_settled] == [False, False]
    desk.load_ended(tenancy, True)
    desk.computed(tenancy)
    desk.close_step(loads)
    desk.close_step(saves)
    desk.save_ended(tenancy, "s", True)
    client.flush()
    *told, closed = kvd.seen[2:]
    ended = SaveEndedItem(0, 0, "s", True)
    assert [item for item in told if item not in (ended, StepClosedItem(1))] == [
        AcquiredItem(0, 0, 3, LOADS),
        LoadEndedItem(0, 0, True),
        WrittenItem(0, 0, 3, SAVES),
        ComputedItem(0, 0),
    ]
    assert told.index(StepClosedItem(1)) > told.index(LoadEndedItem(0, 0, True))
    assert ended in told
    assert closed == StepClosedItem(2)
    assert (begun.wait(5), heard.wait(5)) == ("", "")


def test_some_of_the_copies_of_a_step_are_named_and_wait_no_longer(
    connect: Connect, kvd: FakeKvd, slow_rides: None
) -> None:
    client = connect()
    loads, saves = opened(client)
    some = [LoadItem("r", [2], 4)]
    tenancy, answer = client.slots.begin(0, 3, some, kept=loads)
    assert answer is loads.answer
    client.slots.written(tenancy, 3, FEWER, kept=saves)
    assert client.slots.answer_to_save(tenancy, "s") is saves.answer
    barrier(client)
    assert kvd.seen[2:] == [], "it rides"
    client.flush()
    assert kvd.seen[2:] == [AcquiredItem(0, 0, 3, some), WrittenItem(0, 0, 3, FEWER)]
    assert (loads.copies, saves.copies) == (1, 1)


def test_a_layer_that_copies_nothing_counts_for_no_step(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    loads, saves = opened(client)
    tenancy, _ = client.slots.begin(0, 3, kept=loads)
    client.slots.written(tenancy, 3, kept=saves)
    client.slots.computed(tenancy)
    assert (loads.copies, saves.copies) == (0, 0)
    client.slots.close_step(loads)
    client.slots.close_step(saves)
    client.flush()
    assert closings(kvd) == [1, 2]


def test_a_step_that_is_refused_is_asked_for_by_layer(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    refuse(kvd, StepOpenedItem, "span_busy")
    loads, saves = client.slots.open_step(LOADS), client.slots.open_step((), SAVES)
    assert (loads.answer.wait(5), saves.answer.wait(5)) == ("span_busy", "span_busy")
    tenancy, answer = client.slots.begin(0, 3, LOADS, kept=loads)
    assert answer.wait(5) == ""
    assert client.slots.check_loaded(tenancy) is None
    armed = client.slots.written(tenancy, 3, SAVES, kept=saves)
    assert client.slots.answer_to_save(tenancy, "s") is armed
    assert client.slots.save_started(tenancy, "s") is None
    for kept in (loads, saves):
        client.slots.close_step(kept)
    client.flush()
    asked = [AcquiredItem(0, 0, 3, LOADS), WrittenItem(0, 0, 3, SAVES)]
    assert kvd.told[2:] == [*asked, StepClosedItem(1), StepClosedItem(2)]


def test_a_save_waits_for_a_step_that_has_no_answer_yet(connect: Connect, kvd: FakeKvd) -> None:
    """Refused, it depends on its own announcement."""
    client = connect(resend_s=60.0)
    held = kvd.silent_on(msg.Events)
    saves = client.slots.open_step((), SAVES)
    tenancy, _ = client.slots.begin(0, 3)
    armed = client.slots.written(tenancy, 3, SAVES, kept=saves)
    assert client.slots.answer_to_save(tenancy, "s") is saves.answer
    assert refusal(lambda: client.slots.save_started(tenancy, "s", 0.02)).code == (
        "deadline_exceeded"
    )
    refuse(kvd, StepOpenedItem, "span_busy")
    kvd.as_usual(msg.Events)
    kvd.answer_late(held[0])
    assert saves.answer.wait(5) == "span_busy"
    started = Background(lambda: client.slots.save_started(tenancy, "s"))
    for frame in held[1:]:
        kvd.answer_late(frame)
    assert (started.wait(), armed.wait(5)) == (None, "")
    assert WrittenItem(0, 0, 3, SAVES) in kvd.seen


def test_a_load_whose_step_is_refused_is_heard_for_what_was_said_to_itself(
    connect: Connect, kvd: FakeKvd
) -> None:
    """Asked for before the step had an answer, and refused at first: what counts came later."""
    client = connect(resend_s=60.0)
    held = kvd.silent_on(msg.Events)
    loads = client.slots.open_step(LOADS)
    tenancy, answer = client.slots.begin(0, 3, LOADS, kept=loads)
    assert answer is loads.answer
    until(lambda: len(held) == 1)
    codes = {StepOpenedItem: ["span_unwritten"], AcquiredItem: ["span_busy"]}
    kvd.code_of = lambda item: (codes.get(type(item)) or [""]).pop()
    kvd.as_usual(msg.Events)
    kvd.answer_late(held[0])
    assert answer.wait(5) == "span_unwritten"
    own = client.slots.answer_to_begin(tenancy)
    assert own is not answer
    assert own.wait(5) == "span_busy"
    client.slots.await_loads(tenancy, 3, LOADS, own, 5)
    assert client.slots.check_loaded(tenancy) is None


@pytest.mark.parametrize(
    ("kind", "code"), [(AcquiredItem, "block_poisoned"), (WrittenItem, "span_busy")]
)
def test_what_kvd_refuses_of_a_kept_step_is_heard_by_who_asks(
    connect: Connect, kvd: FakeKvd, kind: type[SlotItem], code: str
) -> None:
    client = connect()
    loads, saves = opened(client)
    refuse(kvd, kind, code)
    tenancy = began(client, loads)
    if kind is WrittenItem:
        client.slots.load_ended(tenancy, True)
        client.slots.written(tenancy, 3, SAVES, kept=saves)
    client.flush()
    if kind is WrittenItem:
        assert refusal(lambda: client.slots.save_started(tenancy, "s")).code == code
    else:
        assert refusal(lambda: client.slots.check_loaded(tenancy)).code == code


# The end of a step ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["ended", "abandoned"])
def test_a_step_is_closed_once_behind_the_end_of_its_last_copy(
    connect: Connect, kvd: FakeKvd, how: str
) -> None:
    client = connect()
    desk = client.slots
    loads, saves = opened(client)
    first, second = began(client, loads, 0), began(client, loads, 1)
    desk.load_ended(first, True)
    desk.written(first, 3, SAVES, kept=saves)
    for _ in range(2):
        desk.close_step(loads)
        desk.close_step(saves)
    client.flush()
    assert closings(kvd) == []
    if how == "ended":
        desk.load_ended(second, True)
        desk.load_ended(second, True)
    desk.abandon(second)
    desk.abandon(first)
    client.flush()
    assert closings(kvd) == [1]
    desk.save_ended(first, "s", False)
    desk.close_step(saves)
    client.flush()
    assert closings(kvd) == [1, 2]
    assert kvd.seen[-2:] == [SaveEndedItem(0, 0, "s", False), StepClosedItem(2)]
    assert (loads.copies, saves.copies) == (0, 0)
    assert [loads.is_kept, saves.is_kept] == [False, False]


def test_nothing_begins_for_the_sake_of_a_step_that_is_closing(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect()
    loads, saves = opened(client)
    client.slots.close_step(loads)
    client.slots.close_step(saves)
    tenancy, answer = client.slots.begin(0, 3, LOADS, kept=loads)
    assert answer is not loads.answer
    armed = client.slots.written(tenancy, 3, SAVES, kept=saves)
    assert client.slots.answer_to_save(tenancy, "s") is armed
    client.flush()
    assert kvd.seen[-2:] == [AcquiredItem(0, 0, 3, LOADS), WrittenItem(0, 0, 3, SAVES)]


def test_a_step_that_is_closed_before_its_answer_is_closed_all_the_same(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect(resend_s=60.0)
    held = kvd.silent_on(msg.Events)
    client.slots.close_step(client.slots.open_step(LOADS))
    until(lambda: bool(held))
    kvd.as_usual(msg.Events)
    kvd.answer_late(held[0])
    client.flush()
    assert kvd.seen == [StepOpenedItem(1, LOADS), StepClosedItem(1)]


# What is refused here -------------------------------------------------------------------------


def test_a_step_that_fits_no_frame_is_not_asked_for(connect: Connect, kvd: FakeKvd) -> None:
    kvd.frame_bytes_max = 8192
    client = connect()
    large = [LoadItem("r", [1 << 20] * 2000, 8000)]
    assert refusal(lambda: client.slots.open_step(large)).code == "frame_too_large"
    wrong = [SaveItem("", [1], [1], ["r"])]
    assert refusal(lambda: client.slots.open_step((), wrong)).code == "frame_malformed"
    assert client.slots.open_step(LOADS).answer.wait(5) == ""
    assert kvd.seen == [StepOpenedItem(1, LOADS)]


def test_a_step_waits_for_no_room(connect: Connect, kvd: FakeKvd) -> None:
    client = connect(num_slots=4, events_max=2, resend_s=60.0)
    kvd.silent_on(msg.Events)
    for slot in range(2):
        client.slots.acquire(slot)
    assert refusal(lambda: client.slots.open_step(LOADS, (), 0.0)).code == "busy"


def test_a_closed_client_opens_no_step_and_closes_any(connect: Connect) -> None:
    client = connect()
    loads, saves = opened(client)
    tenancy = began(client, loads)
    client.close()
    assert refusal(lambda: client.slots.open_step(LOADS)).code == "closed"
    client.slots.abandon(tenancy)
    for kept in (loads, saves):
        client.slots.close_step(kept)
    assert (loads.copies, loads.closed, saves.closed) == (0, True, True)


def test_a_forked_child_neither_opens_nor_closes_a_step(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    loads, _ = opened(client)
    pid = os.fork()
    if pid == 0:
        codes = []
        for call in (client.slots.open_step, lambda: client.slots.close_step(loads)):
            try:
                call()
            except KvdRefused as error:
                codes.append(error.code)
        os._exit(0 if codes == ["process_forked"] * 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    client.flush()
    assert closings(kvd) == []
    client.slots.close_step(loads)
    client.flush()
    assert closings(kvd) == [1]
