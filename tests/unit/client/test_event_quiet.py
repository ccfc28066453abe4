"""Batches for whose answer nobody waits, and the reply that answers them with others."""

from __future__ import annotations

from engine_shim.client.events import QUIET_MAX
from tests.unit.client.test_event_stream import ALL, ONE, RESEND, made, post, report


def test_batches_of_reports_alone_are_quiet_unless_somebody_asks() -> None:
    stream = made()
    report(stream, 1)
    assert stream.take(1, 0, ALL).is_quiet
    post(stream, 2)
    report(stream, 3)
    assert not stream.take(2, 0, ALL).is_quiet, "one of them is waited for"
    report(stream, 4)
    stream.push()
    assert not stream.take(3, 0, ALL).is_quiet
    report(stream, 5)
    assert stream.take(4, 0, ALL).is_quiet


def test_one_reply_answers_the_quiet_batches_before_it() -> None:
    stream = made()
    tickets = [report(stream, 1), report(stream, 2, 3)]
    stream.take(1, 0, ONE)
    stream.take(2, 0, ALL)
    tickets.append(post(stream, 4))
    stream.take(3, 0, ALL)
    assert stream.seen(3, 4, ["span_busy"], 0)
    assert [ticket.wait(0) for ticket in tickets] == ["", "", "span_busy"]
    assert len(stream) == 0
    assert not stream.is_under_way
    assert (stream.counts.acked, stream.counts.refused, stream.counts.strays) == (4, 1, 0)
    assert stream.seen(1, 4, ()), "it was answered already"
    assert stream.counts.strays == 1


def test_a_reply_answers_nothing_before_what_it_names() -> None:
    stream = made()
    tickets = [report(stream, 0), report(stream, 1), post(stream, 2)]
    for number in range(3):
        stream.take(number + 1, 0, ONE)
    assert stream.seen(3, 3, (), 1)
    assert [ticket.is_settled for ticket in tickets] == [False, True, True]
    for since in (-1, 2, 3, 77):
        stream = made()
        first, last = report(stream, 1), post(stream, 2)
        stream.take(1, 0, ONE)
        stream.take(2, 0, ONE)
        assert stream.seen(2, 2, (), since)
        assert [first.is_settled, last.is_settled] == [False, True]


def test_quiet_batches_hold_up_nothing_but_more_of_their_kind() -> None:
    """kvd takes its time with their answer: a step's end must not wait for that."""
    stream = made(window=1)
    for number in range(QUIET_MAX):
        report(stream, number)
        assert stream.is_due(0)
        assert stream.take(number, 0, ALL).is_quiet
    report(stream, 7)
    assert not stream.is_due(0)
    post(stream, 8)
    assert stream.is_due(0)
    assert stream.take(10, 0, ALL).first_no == QUIET_MAX
    assert stream.is_under_way
    post(stream, 9)
    assert not stream.is_due(0), "what is waited for gathers behind what is waited for"
    assert stream.seen(10, QUIET_MAX + 2, (), 0)
    assert stream.is_due(0)
    stream.take(11, 0, ALL)
    for number in range(QUIET_MAX):
        report(stream, number)
        assert not stream.is_due(0)
    assert stream.seen(11, QUIET_MAX + 3, ())
    assert stream.is_due(0)


def test_quiet_batches_have_room_again_when_all_is_sent_again() -> None:
    stream = made(window=1)
    for number in range(QUIET_MAX):
        report(stream, number)
        stream.take(number, 0, ALL)
    stream.tick(RESEND)
    again = stream.take(10, RESEND, ALL)
    assert (again.first_no, len(again.items), again.is_quiet) == (0, QUIET_MAX, True)
    assert stream.seen(QUIET_MAX - 1, QUIET_MAX, (), 0), "of the turn before"
    report(stream, 7)
    assert stream.is_due(RESEND)
    stream.take(11, RESEND, ALL)
    report(stream, 8)
    assert not stream.is_due(RESEND)
