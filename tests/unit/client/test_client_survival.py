"""kvd dies and its memory does not: maps stay, and copies that outlived kvd are not trusted."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from engine_shim.client import KvdClient
from kvd.wire.slot_items import LoadItem
from tests.unit.client.fake_kvd import FakeKvd
from tests.unit.client.waiting import attached, refusal

Connect = Callable[..., KvdClient]

LOADS = [LoadItem("r", [1, 2], 8)]


def test_a_load_is_trusted_while_kvd_lives(connect: Connect) -> None:
    client = connect()
    client.slots.check_loaded(client.slots.acquire(0, 3, LOADS))


def test_the_death_counts_from_the_moment_it_happens(connect: Connect, kvd: FakeKvd) -> None:
    """Asked right after the death, whether the client's own thread has seen it or not."""
    client = connect()
    tenancy = client.slots.acquire(0, 3, LOADS)
    kvd.do(kvd._hang_up)
    error = refusal(lambda: client.slots.check_loaded(tenancy))
    assert error.code == "pool_lost"


def test_a_load_of_the_last_life_is_not_trusted_in_the_next_one(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd]
) -> None:
    client = connect()
    tenancy = client.slots.acquire(0, 3, LOADS)
    kvds.append(kvd.successor())
    attached(client, 2)
    assert refusal(lambda: client.slots.check_loaded(tenancy)).code == "pool_lost"


def test_a_broken_connection_to_a_kvd_that_lived_on_costs_nothing(
    connect: Connect, kvd: FakeKvd
) -> None:
    client = connect()
    tenancy = client.slots.acquire(0, 3, LOADS)
    client.flush()
    kvd.do(kvd._hang_up)
    attached(client, 2)
    client.slots.check_loaded(tenancy)


@pytest.mark.parametrize("same_memory", [True, False])
def test_maps_stay_while_the_files_are_the_same(
    connect: Connect, kvd: FakeKvd, kvds: list[FakeKvd], same_memory: bool
) -> None:
    client = connect()
    pool, region = client.pool, client.region_create("g", 1, 1, 1, 1)
    kvds.append(kvd.successor(keeps_memory=same_memory))
    attached(client, 2)
    assert (client.pool is pool) == same_memory
    assert (client.region_create("g", 1, 1, 1, 1) is region) == same_memory
    assert client.generation == 2, "block numbers of the last life are void either way"


def test_memory_that_is_not_used_any_more_is_unmapped(
    connect: Connect, kvds: list[FakeKvd]
) -> None:
    client = connect()
    client.region_create("g", 1, 1, 1, 1)
    before = len(os.listdir("/proc/self/map_files"))
    for turn in range(3):
        kvds.append(kvds[-1].successor(keeps_memory=True))
        attached(client, 2 + turn)
        client.region_create("g", 1, 1, 1, 1)
        client._core.retired.finish()
    assert len(os.listdir("/proc/self/map_files")) <= before + 1
