"""What a ticket calls when it is settled, or nobody will settle it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from engine_shim.client.tickets import Calls, Ticket


def made_by(calls: Calls) -> list[str]:
    """What the calls that are due do, each in its turn, with the lock free."""
    made: list[str] = []
    while calls:
        call = calls.popleft()
        call()
        made.append("called")
    return made


def test_a_call_comes_with_the_last_item_and_once() -> None:
    calls: Calls = deque()
    lock = threading.Lock()
    ticket = Ticket(lock, 2, calls)
    ticket.then(lambda: None)
    with lock:
        ticket.settle("")
        assert not calls
        ticket.settle("refused")
        ticket.give_up("closed")
    assert made_by(calls) == ["called"]
    assert ticket.wait(0) == "refused"


def test_a_call_may_use_the_client() -> None:
    calls: Calls = deque()
    lock, heard = threading.Lock(), list[str]()
    ticket = Ticket(lock, 1, calls)
    ticket.then(lambda: heard.append(ticket.wait(0)))
    with lock:
        ticket.settle("refused")
    assert heard == []
    assert made_by(calls) == ["called"]
    assert heard == ["refused"]


def test_a_call_comes_when_nobody_will_answer_any_more() -> None:
    calls: Calls = deque()
    ticket = Ticket(threading.Lock(), 1, calls)
    ticket.then(lambda: None)
    ticket.give_up("unreachable")
    ticket.resume()
    ticket.settle("")
    assert made_by(calls) == ["called"]


def test_a_call_comes_at_once_when_there_is_nothing_to_wait_for() -> None:
    calls: list[str] = []
    settled, given_up = Ticket(threading.Lock(), 0), Ticket(threading.Lock(), 1)
    given_up.give_up("closed")
    settled.then(lambda: calls.append("settled"))
    given_up.then(lambda: calls.append("given up"))
    assert calls == ["settled", "given up"]


def test_a_call_for_riding_items_pushes_them() -> None:
    pushes: list[str] = []
    ticket = Ticket(threading.Lock(), 1, push=lambda: pushes.append("pushed"))
    ticket.then(lambda: None)
    assert pushes == ["pushed"]


def test_all_who_asked_are_called_in_their_order() -> None:
    calls: Calls = deque()
    lock, heard = threading.Lock(), list[str]()
    ticket = Ticket(lock, 1, calls)
    for name in ("first", "second", "third"):
        ticket.then(partial(heard.append, name))
    with lock:
        ticket.settle("")
    assert made_by(calls) == ["called"] * 3
    ticket.then(lambda: heard.append("late"))
    assert heard == ["first", "second", "third", "late"]


def test_who_asks_again_after_nobody_would_answer_is_called_with_the_answer() -> None:
    calls: Calls = deque()
    lock, heard = threading.Lock(), list[str]()
    ticket = Ticket(lock, 1, calls)
    ticket.then(lambda: heard.append(ticket.wait(0)))
    with lock:
        ticket.give_up("unreachable")
    assert made_by(calls) == ["called"]
    with lock:
        ticket.resume()
    ticket.then(lambda: heard.append(ticket.wait(0)))
    with lock:
        ticket.settle("refused")
    assert made_by(calls) == ["called"]
    assert heard == ["unreachable", "refused"]


def test_a_call_that_rides_pushes_nothing_and_comes_all_the_same() -> None:
    pushes, calls = list[str](), deque[Callable[[], None]]()
    lock = threading.Lock()
    ticket = Ticket(lock, 1, calls, push=lambda: pushes.append("pushed"))
    ticket.then(lambda: None, rides=True)
    assert not pushes
    ticket.then(lambda: None)
    assert pushes == ["pushed"]
    with lock:
        ticket.settle("")
    assert made_by(calls) == ["called"] * 2
