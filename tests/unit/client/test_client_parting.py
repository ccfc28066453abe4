"""The end of a `with`: when goodbye is said, and that it holds nobody up."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from engine_shim.client import KvdClient
from engine_shim.client import client as client_module
from engine_shim.client.session import LinkState
from kvd.wire import messages as msg
from tests.unit.client.fake_kvd import FakeKvd

Connect = Callable[..., KvdClient]


def test_goodbye_is_said_after_every_event(connect: Connect, kvd: FakeKvd) -> None:
    with connect() as client:
        client.slots.computed(client.slots.acquire(0))
    assert client.state is LinkState.CLOSED
    assert isinstance(kvd.frames[-1], msg.Goodbye)


def test_an_exception_closes_only(connect: Connect, kvd: FakeKvd) -> None:
    client = connect()
    with pytest.raises(ZeroDivisionError), client:
        _ = 1 // 0
    assert client.state is LinkState.CLOSED
    assert not kvd.of(msg.Goodbye)


def test_a_slot_in_use_closes_only(connect: Connect, kvd: FakeKvd) -> None:
    with connect() as client:
        client.slots.acquire(0)
    assert client.state is LinkState.CLOSED
    assert not kvd.of(msg.Goodbye)


def test_it_is_said_once(connect: Connect, kvd: FakeKvd) -> None:
    with connect() as client:
        client.goodbye()
    with connect() as client:
        client.close()
    assert len(kvd.of(msg.Goodbye)) == 1


@pytest.mark.parametrize("kind", [msg.Goodbye, msg.Events])
def test_a_kvd_that_hangs_is_not_waited_for(
    connect: Connect, kvd: FakeKvd, kind: type[msg.Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PARTING_S", 0.05)
    kvd.silent_on(kind)
    with connect() as client:
        client.slots.computed(client.slots.acquire(0))
        begin = time.monotonic()
    assert time.monotonic() - begin < 2
    assert client.state is LinkState.CLOSED


def test_a_kvd_that_is_gone_is_not_waited_for(connect: Connect, kvd: FakeKvd) -> None:
    with connect() as client:
        kvd.stop()
        begin = time.monotonic()
    assert time.monotonic() - begin < 3
    assert client.state is LinkState.CLOSED
