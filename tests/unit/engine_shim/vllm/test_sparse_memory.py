"""A rank's region and hot buffers: both there or neither, and made anew when kvd has lost them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import pytest

from engine_shim.client import KvdClient, KvdRefused
from engine_shim.client.session import LinkState
from engine_shim.device import Device, DeviceCode, DeviceError
from engine_shim.device_cpu import CpuDevice
from engine_shim.device_memory import MemfdMemory
from engine_shim.hot import HotOptions
from engine_shim.hot_rows import row_view
from engine_shim.testing import Fail, FaultyDevice, Rule
from engine_shim.vllm.sparse_memory import SparseMemory
from engine_shim.vllm.sparse_plan import SparsePlan
from kvd_kernels.host import Mapping
from tests.unit.engine_shim.vllm.test_sparse_plan import planner

PLAN = planner().plan(1 << 20)


class Client:
    """A kvd that makes a region when it has said all of `refusals`."""

    def __init__(self, *refusals: str) -> None:
        self.state = LinkState.ATTACHED
        self.refusals = list(refusals)
        self.memory: list[MemfdMemory] = []
        self.forgotten: list[str] = []

    def wait_attached(self, deadline_s: float) -> int:
        """See `KvdClient`."""
        assert deadline_s > 0
        return 1

    def region_create(self, region: str, *shape: object) -> Mapping:
        """See `KvdClient`."""
        assert region == "e-kv"
        if self.refusals:
            raise KvdRefused(self.refusals.pop(0))
        self.memory.append(MemfdMemory(PLAN.region.num_bytes, "region"))
        return self.memory[-1].mapping

    def region_forget(self, region: str) -> None:
        """See `KvdClient`."""
        self.forgotten.append(region)


Clients = Callable[..., Client]


@pytest.fixture
def clients() -> Iterator[Clients]:
    """Makes clients, and closes what they handed out."""
    made: list[Client] = []

    def make(*refusals: str) -> Client:
        made.append(Client(*refusals))
        return made[-1]

    yield make
    for memory in (one for client in made for one in client.memory):
        memory.close()


@pytest.fixture
def device() -> Iterator[Device]:
    made = CpuDevice()
    yield made
    made.close(1_000_000_000)


def memory_of(client: Client, device: Device, plan: SparsePlan = PLAN) -> SparseMemory:
    """Two hot buffers."""
    sizes = plan.hot
    options = HotOptions(sizes.slots, sizes.scratch_rows, sizes.num_buffers, 100_000_000)
    return SparseMemory(cast(KvdClient, client), "e-kv", plan, device, options)


def test_what_may_pass_is_waited_for(clients: Clients, device: Device) -> None:
    """Memory is short while other ranks have the lost region mapped."""
    client = clients("memory_short", "starting", "busy")
    memory = memory_of(client, device)
    hot, region = memory.open(10.0)
    region[:4] = b"rows"
    assert client.memory[0].read_bytes(0, 4) == b"rows"
    assert hot.layout == PLAN.hot
    memory.close()


@pytest.mark.parametrize(
    ("refusals", "deadline_s"), [(["region_exists"], 10.0), (["memory_short"] * 99, 0.12)]
)
def test_what_does_not_pass_is_raised_and_may_be_tried_again(
    refusals: list[str], deadline_s: float, clients: Clients, device: Device
) -> None:
    client = clients(*refusals)
    memory = memory_of(client, device)
    with pytest.raises(KvdRefused, match=refusals[0]):
        memory.open(deadline_s)
    client.refusals.clear()
    memory.open(deadline_s)
    memory.close()


def test_a_lost_connection_is_waited_for_by_the_next_attempt(
    clients: Clients, device: Device
) -> None:
    client = clients("unreachable")
    client.state = LinkState.LOST
    memory = memory_of(client, device)
    memory.open(10.0)
    memory.close()
    client.refusals, client.state = ["unreachable"], LinkState.CLOSED
    with pytest.raises(KvdRefused, match="unreachable"):
        memory.open(10.0)


def test_another_region_follows_a_lost_one_with_other_hot_buffers(
    clients: Clients, device: Device
) -> None:
    client = clients()
    memory = memory_of(client, device)
    first, _ = memory.open(1.0)
    memory.lose()
    assert client.forgotten == ["e-kv"]
    with pytest.raises(ValueError, match="closed"):
        first.memory.read_bytes(0, 1)
    memory.lose()
    second, region = memory.open(1.0)
    region[:4] = b"rows"
    assert second is not first
    assert [one.read_bytes(0, 4) for one in client.memory] == [bytes(4), b"rows"]
    memory.close()
    memory.close()


def test_a_load_that_failed_unheard_does_not_keep_the_buffers(clients: Clients) -> None:
    device = FaultyDevice(CpuDevice(), [Rule(Fail(), stream="hot", kind="copy", nth=1)])
    memory = memory_of(clients(), device)
    hot, _ = memory.open(1.0)
    handle = hot.open("r", [0, 1, 2])
    for layer in range(PLAN.region.num_layers):
        rows = bytes(6 * PLAN.region.row_bytes)
        hot.land(handle, layer, 0, row_view(rows, PLAN.region.row_bytes))
    hot.begin_step(handle, 0, 6, 7)
    hot.select(handle, 0, [[1, 2]])
    memory.lose()
    memory.open(1.0)
    memory.close()


def test_buffers_whose_copy_does_not_end_are_kept(
    clients: Clients, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_of(client := clients(), device)
    hot, _ = memory.open(1.0)

    def stuck() -> None:
        raise DeviceError(DeviceCode.TIMEOUT, "a copy runs")

    monkeypatch.setattr(hot, "shut", stuck)
    with pytest.raises(DeviceError, match="a copy runs"):
        memory.lose()
    assert client.forgotten == [], "the region is mapped as long as a copy may read it"
    monkeypatch.undo()
    memory.lose()
    assert client.forgotten == ["e-kv"]
