"""Steps that kvd keeps, for tests."""

from __future__ import annotations

from collections.abc import Callable

from engine_shim.client import KeptStep, KvdClient, Tenancy
from kvd.wire.slot_items import LoadItem, SaveItem, SlotItem, StepClosedItem
from tests.unit.client.fake_kvd import FakeKvd

Connect = Callable[..., KvdClient]

LOADS = [LoadItem("r", [1, 2], 8)]
SAVES = [SaveItem("s", [3, 4], [4, 4], ["r", "r"])]
FEWER = [SaveItem("s", [3], [4], ["r"])]


def opened(client: KvdClient) -> tuple[KeptStep, KeptStep]:
    """A step of loads and one of saves, both with a yes."""
    loads, saves = client.slots.open_step(LOADS), client.slots.open_step((), SAVES)
    assert (loads.answer.wait(5), saves.answer.wait(5)) == ("", "")
    return loads, saves


def began(client: KvdClient, kept: KeptStep, slot: int = 0) -> Tenancy:
    """A tenancy whose loads are those of the step."""
    return client.slots.begin(slot, 3, LOADS, kept=kept)[0]


def barrier(client: KvdClient) -> None:
    """Whatever was to be sent without company has arrived."""
    client.lookup("r", [])


def refuse(kvd: FakeKvd, kind: type[SlotItem], code: str) -> None:
    """Refuse events of one kind."""
    kvd.code_of = lambda item: code if isinstance(item, kind) else ""


def closings(kvd: FakeKvd) -> list[int]:
    return [item.step for item in kvd.seen if isinstance(item, StepClosedItem)]
