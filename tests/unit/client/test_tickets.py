"""What a ticket calls when it is settled, or nobody will settle it."""

from __future__ import annotations

import threading

from engine_shim.client.tickets import Ticket


def test_a_call_comes_with_the_last_item_and_once() -> None:
    calls: list[str] = []
    ticket = Ticket(threading.Lock(), 2)
    ticket.then(lambda: calls.append("called"))
    ticket.settle("")
    assert calls == []
    ticket.settle("refused")
    ticket.give_up("closed")
    assert calls == ["called"]
    assert ticket.wait(0) == "refused"


def test_a_call_comes_when_nobody_will_answer_any_more() -> None:
    calls: list[str] = []
    ticket = Ticket(threading.Lock(), 1)
    ticket.then(lambda: calls.append("called"))
    ticket.give_up("unreachable")
    ticket.resume()
    ticket.settle("")
    assert calls == ["called"]


def test_a_call_comes_at_once_when_there_is_nothing_to_wait_for() -> None:
    calls: list[str] = []
    settled, given_up = Ticket(threading.Lock(), 0), Ticket(threading.Lock(), 1)
    given_up.give_up("closed")
    settled.then(lambda: calls.append("settled"))
    given_up.then(lambda: calls.append("given up"))
    assert calls == ["settled", "given up"]


def test_a_call_for_riding_items_pushes_them() -> None:
    pushes: list[str] = []
    Ticket(threading.Lock(), 1, lambda: pushes.append("pushed")).then(lambda: None)
    assert pushes == ["pushed"]
