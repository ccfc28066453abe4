"""A save lets the loads go first that began before it, and waits for no others."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from engine_shim.copy_order import CopyOrder

LONG = 5.0


def test_without_loads_a_save_goes_at_once() -> None:
    assert CopyOrder().wait_for_loads(0.0)


def test_a_save_waits_for_the_loads_that_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_shim.copy_order.HOLD_SECONDS", LONG)
    order = CopyOrder()
    order.load_begins()
    order.load_begins()
    assert not order.wait_for_loads(0.0)
    went = threading.Event()

    def save() -> None:
        if order.wait_for_loads(LONG):
            went.set()

    saver = threading.Thread(target=save)
    saver.start()
    order.load_ended()
    assert not order.wait_for_loads(0.0)
    order.load_ended()
    saver.join(LONG)
    assert went.is_set()


def test_a_load_that_begins_later_does_not_overtake(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be waiting for the very slot that the save keeps."""
    monkeypatch.setattr("engine_shim.copy_order.HOLD_SECONDS", LONG)
    order = CopyOrder()
    waits = threading.Event()
    wait_for = order._changed.wait_for

    def tell_and_wait(predicate: Callable[[], bool], seconds: float) -> bool:
        waits.set()
        return wait_for(predicate, seconds)

    monkeypatch.setattr(order._changed, "wait_for", tell_and_wait)
    order.load_begins()
    results: list[bool] = []
    saver = threading.Thread(target=lambda: results.append(order.wait_for_loads(LONG)))
    saver.start()
    assert waits.wait(LONG)
    order.load_begins()
    order.load_ended()
    saver.join(LONG)
    assert results == [True]


def test_a_load_that_hangs_holds_no_save_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_shim.copy_order.HOLD_SECONDS", 0.001)
    order = CopyOrder()
    order.load_begins()
    assert not order.wait_for_loads(LONG)


def test_open_saves_are_counted() -> None:
    order = CopyOrder()
    order.save_begins()
    order.save_begins()
    order.save_ended()
    assert order.saves_open == 1


def test_whoever_closes_waits_for_open_saves() -> None:
    order = CopyOrder()
    assert order.wait_for_saves(0.0)
    order.save_begins()
    assert not order.wait_for_saves(0.0)
    saver = threading.Thread(target=order.save_ended)
    saver.start()
    assert order.wait_for_saves(LONG)
    saver.join(LONG)
