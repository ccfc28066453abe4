"""The event stream, step by step: what is sent when, and what a reply settles."""

from __future__ import annotations

import threading

import pytest

from engine_shim.client.event_types import Batch
from engine_shim.client.events import RIDE_NS, EventStream
from engine_shim.client.tickets import Ticket
from kvd.wire.slot_items import ComputedItem, SlotItem

SECOND = 1_000_000_000
RESEND = 2 * SECOND
ITEMS = 12
"""Items that kvd takes in a batch, and remembers the codes of."""

SIZE = 10
ONE, ALL = SIZE, 1000
"""Bytes of a batch of one item, and of more items than a test has."""


def made(window: int = 4) -> EventStream:
    """A stream that was opened at number 0."""
    stream = EventStream(threading.Lock(), window, RESEND)
    stream.replace(0, 0, ITEMS)
    return stream


def item(number: int) -> SlotItem:
    return ComputedItem(0, number)


def post(stream: EventStream, *numbers: int) -> Ticket:
    return stream.append([item(number) for number in numbers], [SIZE] * len(numbers))


def report(stream: EventStream, *numbers: int) -> Ticket:
    """Post what nobody will wait for."""
    items = [item(number) for number in numbers]
    return stream.append(items, [SIZE] * len(numbers), is_awaited=False)


def test_nothing_is_due_before_it_is_open() -> None:
    stream = EventStream(threading.Lock(), 4)
    post(stream, 1)
    assert not stream.is_due(0)
    assert stream.next_due() is None
    stream.replace(5, 0, ITEMS)
    assert stream.take(1, 0, ALL).first_no == 5


@pytest.mark.parametrize(("next_no", "codes"), [(1, ()), (3, ()), (2, ["x"]), (2, ["", "", "x"])])
def test_reply_that_cannot_be_true_ends_the_session(next_no: int, codes: list[str]) -> None:
    stream = made()
    ticket = post(stream, 1, 2)
    stream.take(1, 0, ALL)
    post(stream, 3)
    assert not stream.seen(1, next_no, codes)
    assert not ticket.is_settled


@pytest.mark.parametrize("want", ["0", "2", "9", "", "x", "-1"])
def test_gap_at_a_number_that_is_not_missing_ends_the_session(want: str) -> None:
    stream = made()
    post(stream, 1, 2, 3)
    stream.take(1, 0, ONE)
    assert stream.seen(1, 1, ())
    stream.take(2, 0, ONE)
    assert not stream.refused(2, "out_of_order", want, 0)


def test_gap_is_filled_and_later_complaints_change_nothing() -> None:
    stream = made()
    tickets = [post(stream, number) for number in range(3)]
    for request_no in (1, 2, 3):
        stream.take(request_no, 0, ONE)
    assert stream.refused(2, "out_of_order", "0", 0)
    batch = stream.take(4, 0, ALL)
    assert (batch.first_no, len(batch.items)) == (0, 3)
    assert stream.refused(3, "out_of_order", "0", 0)
    assert not stream.is_due(0)
    assert stream.seen(4, 3, ())
    assert [ticket.wait(0) for ticket in tickets] == ["", "", ""]


def test_refusal_that_repeating_cannot_cure_ends_the_session() -> None:
    stream = made()
    post(stream, 1)
    stream.take(1, 0, ALL)
    assert not stream.refused(1, "frame_malformed", "", 0)


def test_unknown_reply_is_counted_and_changes_nothing() -> None:
    stream = made()
    ticket = post(stream, 1)
    assert stream.seen(77, 1, ())
    assert not ticket.is_settled
    assert stream.counts.strays == 1


def test_code_reaches_its_ticket_and_no_other() -> None:
    stream = made()
    first, second = post(stream, 1), post(stream, 2)
    stream.take(1, 0, ALL)
    assert stream.seen(1, 2, ["", "span_busy"])
    assert first.wait(0) == ""
    assert second.wait(0) == "span_busy"
    assert stream.counts.refused == 1


def test_ticket_of_many_items_has_the_first_refusal_of_any() -> None:
    stream = made()
    ticket = post(stream, 1, 2, 3)
    stream.take(1, 0, 2 * SIZE)
    stream.take(2, 0, ALL)
    assert stream.seen(1, 2, ["", "first"])
    assert ticket.wait(0) == "deadline_exceeded"
    assert stream.seen(2, 3, ["second"])
    assert ticket.wait(0) == "first"


def test_batch_is_cut_by_bytes() -> None:
    stream = made()
    post(stream, *range(10))
    assert len(stream.take(1, 0, 4 * SIZE + 5).items) == 4
    assert len(stream.take(2, 0, 1).items) == 1  # one item goes whatever its size


def test_no_more_is_under_way_than_kvd_remembers() -> None:
    stream = made()
    post(stream, *range(ITEMS + 3))
    assert len(stream.take(1, 0, 5 * SIZE).items) == 5
    assert len(stream.take(2, 0, ALL).items) == ITEMS - 5
    assert not stream.is_due(0)
    assert stream.seen(1, 5, ())
    assert len(stream.take(3, 0, ALL).items) == 3


def test_window_is_kept() -> None:
    stream = made(window=2)
    post(stream, *range(5))
    stream.take(1, 0, ONE)
    stream.take(2, 0, ONE)
    assert not stream.is_due(0)
    assert stream.seen(1, 1, ())
    assert stream.take(3, 0, ALL).first_no == 2


def test_reports_do_not_hold_up_what_somebody_waits_for() -> None:
    stream = made(window=1)
    report(stream, 1)
    stream.push()
    stream.take(1, 0, ALL)
    assert not stream.is_under_way, "nobody waits for it"
    report(stream, 2)
    assert not stream.is_due(0), "reports gather behind a report"
    ticket = post(stream, 3)
    assert stream.is_due(0)
    assert stream.take(2, 0, ALL) == Batch(1, [item(2), item(3)])
    assert stream.is_under_way
    post(stream, 4)
    assert not stream.is_due(0), "what is waited for gathers behind what is waited for"
    assert stream.seen(2, 3, ())
    assert ticket.wait(0) == ""
    assert stream.is_due(0)


def test_even_with_reports_no_more_than_two_windows_are_under_way() -> None:
    stream = made(window=2)
    report(stream, *range(4))
    stream.push()
    stream.take(1, 0, ONE)
    stream.take(2, 0, ONE)
    assert not stream.is_due(0)
    post(stream, 5)
    stream.take(3, 0, ONE)
    stream.take(4, 0, ONE)
    assert not stream.is_due(0)
    assert stream.seen(1, 1, ())
    assert stream.take(5, 0, ONE).first_no == 4


def test_a_report_that_is_late_is_sent_again_with_all_behind_it() -> None:
    stream = made(window=1)
    report(stream, 1)
    stream.take(1, 0, ALL)
    post(stream, 2)
    stream.take(2, 0, ALL)
    stream.tick(RESEND)
    assert not stream.is_under_way
    assert stream.take(3, RESEND, ALL) == Batch(0, [item(1), item(2)])
    assert stream.is_under_way
    assert stream.seen(2, 2, ()), "of the turn before: it settles, and frees no window"
    assert stream.is_under_way
    assert stream.seen(3, 2, ())
    assert not stream.is_under_way


def test_busy_pauses_longer_each_time_and_loses_nothing() -> None:
    stream = made()
    ticket = post(stream, 1)
    now, pauses = 0, []
    for request_no in range(1, 8):
        stream.take(request_no, now, ALL)
        assert stream.refused(request_no, "busy", "", now)
        assert not stream.is_due(now)
        due = stream.next_due()
        assert due is not None
        pauses.append(due - now)
        now = due
        stream.tick(now)
    assert pauses == sorted(pauses)
    assert pauses[0] == 20_000_000
    assert pauses[-1] == 500_000_000
    stream.take(9, now, ALL)
    assert stream.seen(9, 1, ())
    assert ticket.wait(0) == ""


def test_late_batch_is_sent_again_and_then_less_often() -> None:
    stream = made()
    post(stream, 1, 2)
    stream.take(1, 0, ONE)
    stream.take(2, 0, ONE)
    stream.tick(RESEND - 1)
    assert not stream.is_due(RESEND - 1)
    stream.tick(RESEND)
    assert stream.take(3, RESEND, ALL).first_no == 0
    assert stream.next_due() == RESEND + 2 * RESEND
    assert stream.counts.resent == 2


def test_reply_counts_however_late() -> None:
    stream = made()
    ticket = post(stream, 1)
    stream.take(1, 0, ALL)
    stream.tick(RESEND)
    stream.take(2, RESEND, ALL)
    assert stream.seen(1, 1, ["span_busy"])
    assert stream.seen(2, 1, ["span_busy"])
    assert ticket.wait(0) == "span_busy"
    assert stream.counts.acked == 1


def test_batch_whose_reply_was_lost_is_not_taken_for_done() -> None:
    stream = made()
    first, second = post(stream, 1), post(stream, 2)
    stream.take(1, 0, ONE)
    stream.take(2, 0, ONE)
    assert stream.seen(2, 2, ())
    assert second.wait(0) == ""
    assert not first.is_settled  # kvd has seen it, but what it said is not known
    post(stream, 3)
    stream.take(3, 0, ALL)
    stream.tick(RESEND)
    batch = stream.take(4, RESEND, ALL)
    assert (batch.first_no, batch.items) == (0, [item(1)])
    assert stream.take(5, RESEND, ALL).items == [item(3)]
    assert stream.seen(4, 3, ["span_busy"])
    assert first.wait(0) == "span_busy"


def test_same_kvd_again_gets_what_it_has_not_answered() -> None:
    stream = made()
    done = post(stream, 0)
    stream.take(1, 0, ALL)
    assert stream.seen(1, 1, ())
    sent = post(stream, 1)
    stream.take(2, 0, ALL)
    stream.close()
    later = post(stream, 2)
    assert not stream.is_due(0)
    stream.resume(2, ITEMS)
    batch = stream.take(3, 0, ALL)
    assert (batch.first_no, batch.items) == (1, [item(1), item(2)])
    assert stream.seen(3, 3, ["span_busy", ""])
    assert [ticket.wait(0) for ticket in (done, sent, later)] == ["", "span_busy", ""]


@pytest.mark.parametrize("number", [0, 3, 4])
def test_kvd_that_knows_less_or_more_cannot_be_resumed(number: int) -> None:
    stream = made()
    post(stream, 1, 2, 3)
    stream.take(1, 0, ONE)
    assert stream.seen(1, 1, ())
    stream.take(2, 0, ONE)
    assert stream.can_resume(1)
    assert stream.can_resume(2)
    assert not stream.can_resume(number)


def test_another_kvd_gets_only_what_came_after_the_announcement() -> None:
    stream = made()
    old = post(stream, 1, 2)
    stream.take(1, 0, ONE)
    stream.close()
    mark = stream.mark()
    new = post(stream, 3)
    stream.replace(40, mark, ITEMS)
    assert old.wait(0) == "pool_lost"
    batch = stream.take(2, 0, ALL)
    assert (batch.first_no, batch.items) == (40, [item(3)])
    assert stream.seen(2, 41, ())
    assert new.wait(0) == ""
    assert len(stream) == stream.bytes == 0
    assert stream.counts.replaced == 2


def test_ticket_lets_go_when_nobody_will_answer() -> None:
    stream = made()
    before = post(stream, 1)
    stream.give_up("unreachable")
    assert before.wait(5) == "unreachable"
    assert post(stream, 2).wait(5) == "unreachable"
    assert not before.is_settled
    stream.resume(0, ITEMS)
    assert before.wait(0) == "deadline_exceeded"


def test_waiter_is_woken_by_the_acknowledgement() -> None:
    lock = threading.Lock()
    stream = EventStream(lock, 4)
    stream.replace(0, 0, ITEMS)
    ticket = post(stream, 1)
    stream.take(1, 0, ALL)
    codes: list[str] = []
    sleeper = threading.Thread(target=lambda: codes.append(ticket.wait(5)))
    sleeper.start()
    with lock:
        assert stream.seen(1, 1, ["poisoned"])
    sleeper.join()
    assert codes == ["poisoned"]


def ride(stream: EventStream, number: int, now: int = 0) -> Ticket:
    return stream.append_riding([item(number)], [SIZE], now, lambda: None)


def test_riding_item_goes_with_the_next_one_in_order() -> None:
    stream = made()
    ride(stream, 1)
    assert not stream.is_due(0)
    post(stream, 2)
    assert stream.take(1, 0, ALL).items == [item(1), item(2)]
    ride(stream, 3)
    assert not stream.is_due(0)


def test_riding_item_goes_alone_when_nothing_takes_it_along() -> None:
    stream = made()
    ride(stream, 1)
    ride(stream, 2, RIDE_NS - 1)
    assert stream.next_due() == RIDE_NS
    stream.tick(RIDE_NS - 1)
    assert not stream.is_due(RIDE_NS - 1)
    stream.tick(RIDE_NS)
    assert stream.take(1, RIDE_NS, ALL).items == [item(1), item(2)]
    assert stream.next_due() == RIDE_NS + RESEND


def test_riding_item_that_went_along_is_sent_again_by_itself() -> None:
    stream = made()
    post(stream, 1)
    ride(stream, 2)
    stream.take(1, 0, ALL)
    assert stream.next_due() == RESEND
    stream.tick(RESEND)
    assert stream.take(2, RESEND, ALL).items == [item(1), item(2)]


def test_whoever_waits_for_a_riding_item_sends_it() -> None:
    stream = made()
    pushes: list[bool] = []
    ticket = stream.append_riding([item(1)], [SIZE], 0, lambda: pushes.append(stream.push()))
    assert ticket.wait(0) == "deadline_exceeded"
    assert pushes == [True]
    assert stream.take(1, 0, ALL).items == [item(1)]
    assert not stream.push()


def test_riding_item_goes_by_itself_after_a_reconnect() -> None:
    stream = made()
    ride(stream, 1)
    stream.close()
    assert stream.next_due() is None
    stream.resume(0, ITEMS)
    assert stream.is_due(0)
