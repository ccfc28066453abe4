"""The client and the real daemon: refusals, and work through one pool and real gates."""

from __future__ import annotations

from functools import partial

import pytest

from engine_shim.client import Tenancy
from kvd.wire.layout import BlockLayoutSpec, Part
from kvd.wire.slot_items import LoadItem, SaveItem
from tests.integration.client.rig import ROW, TOKENS, Connect, digest, save_block
from tests.integration.daemon import Daemon
from tests.unit.client.waiting import Background, refusal, until

# Refusals -------------------------------------------------------------------------------------


def test_second_layout_is_refused_at_once(connect: Connect) -> None:
    connect("e0")
    other = BlockLayoutSpec("other", "f16", TOKENS, [[Part("main", 2 * ROW)]] * 2)
    error = refusal(lambda: connect("e1", layout=other))
    assert error.code == "layout_mismatch"


def test_refusals_of_the_machine_reach_the_caller(connect: Connect) -> None:
    client = connect()
    assert refusal(lambda: client.await_transfer("t")).code == "transfer_unknown"
    assert refusal(lambda: client.renew("nobody")).code == "request_unknown"
    assert refusal(lambda: client.reserve("r", 1 << 20)).code == "limit_reached"
    assert refusal(lambda: client.reserve("r", client.num_blocks + 1)).code == "reserve_too_large"
    assert refusal(lambda: client.region_destroy("g")).code == "region_unknown"
    assert refusal(lambda: client.lookup("", [digest(1)])).code == "frame_malformed"
    assert client.commit([7], [digest(1)], [TOKENS]) == ["block_not_reserved"]
    loads = [LoadItem("r", [3], TOKENS)]
    assert refusal(lambda: client.slots.acquire(0, 0, loads)).code == "block_not_reserved"
    assert client.slots.acquire(0).epoch == 1  # the refused tenancy was given back


def test_wait_for_a_transfer_ends_at_the_deadline(connect: Connect) -> None:
    client = connect()
    client.region_create("g", 2, 4, TOKENS, ROW)
    client.expect("t-1", "g", [0], TOKENS, 2, 60)
    assert refusal(lambda: client.await_transfer("t-1", 0.05)).code == "deadline_exceeded"
    client.drop_transfer("t-1")
    assert refusal(lambda: client.await_transfer("t-1")).code == "transfer_failed"


# Work -----------------------------------------------------------------------------------------


def test_what_one_request_saved_another_finds_and_loads(connect: Connect) -> None:
    client = connect()
    assert client.pool is not None
    block = save_block(client, "r1", 5)
    client.unpin("r1")
    assert client.lookup("r2", [digest(5), digest(6)]) == [block]
    for layer in range(2):
        tenancy = client.slots.acquire(layer, layer, [LoadItem("r2", [block], TOKENS)])
        at = block * client.block_stride + layer * 64
        assert client.pool.read_bytes(at, TOKENS * ROW) == bytes([5 + layer]) * TOKENS * ROW
        client.slots.load_ended(tenancy, True)
        assert client.slots.computed(tenancy).wait(5) == ""
    statistics = client.statistics()
    assert statistics.events_refused == 0
    assert statistics.slots_busy == 0


def test_load_waits_for_the_save_that_it_needs(connect: Connect) -> None:
    client = connect()
    (block,) = client.reserve("r", 1)
    saving = client.slots.acquire(0)
    client.slots.written(saving, 0, [SaveItem("s", [block], [TOKENS])])
    loads = [LoadItem("r", [block], TOKENS)]
    loading = Background(lambda: client.slots.acquire(1, 0, loads))
    until(lambda: client.statistics().events_refused > 2)
    client.slots.save_ended(saving, "s", True)
    tenancy = loading.wait()
    assert not isinstance(tenancy, str)
    assert client.statistics().events_refused > 0


def test_save_waits_for_another_rank_that_loads_its_block(connect: Connect) -> None:
    first, second = connect(tp_size=2), connect(rank=1, tp_size=2)
    (block,) = first.reserve("r", 1)

    def save(tokens: int) -> Tenancy:
        tenancy = first.slots.acquire(0, 0)
        first.slots.written(tenancy, 0, [SaveItem("s", [block], [tokens])])
        return tenancy

    saving = save(1)
    first.slots.save_started(saving, "s")
    first.slots.save_ended(saving, "s", True)
    first.slots.computed(saving)
    loading = second.slots.acquire(0, 0, [LoadItem("r", [block], 1)])
    saving = save(2)
    started = Background(lambda: first.slots.save_started(saving, "s"))
    agreed = Background(lambda: first.slots.confirm(saving).code)
    until(lambda: first.statistics().events_refused > 1)
    second.slots.load_ended(loading, True)
    assert agreed.wait() == ""
    started.wait()
    first.slots.save_ended(saving, "s", True)
    first.slots.computed(saving)
    second.slots.computed(loading)
    tenancy = second.slots.acquire(1, 0, [LoadItem("r", [block], 2)])
    second.slots.load_ended(tenancy, True)
    assert second.slots.computed(tenancy).wait(5) == ""


def test_sleeper_is_woken_when_the_last_hold_goes(connect: Connect) -> None:
    client = connect()
    (block,) = client.reserve("r", 1)
    first = client.slots.acquire(0)
    client.slots.written(first, 0, [SaveItem("s", [block], [TOKENS])])
    client.slots.computed(first)
    client.flush()
    sleeper = Background(lambda: client.slots.acquire(0).epoch)
    assert refusal(lambda: client.slots.acquire(0, deadline_s=0.02)).code == "deadline_exceeded"
    client.slots.save_ended(first, "s", True)
    assert sleeper.wait() == 1


def test_kvd_asks_about_a_long_computation_and_believes_the_answer(connect: Connect) -> None:
    client = connect()
    tenancy = client.slots.acquire(0)
    until(lambda: client.statistics().queries > 0)
    assert refusal(lambda: client.slots.acquire(0, deadline_s=0.05)).code == "deadline_exceeded"
    assert client.slots.computed(tenancy).wait(5) == ""
    assert client.slots.acquire(0).epoch == 1


def test_region_is_real_memory_shared_by_whoever_asks(connect: Connect) -> None:
    client = connect()
    region = client.region_create("rows", 2, 4, TOKENS, ROW)
    assert region.size >= 2 * 4 * TOKENS * ROW
    region.write_bytes(0, b"rows")
    assert client.allocated("rows", [(0, 1), (9, 1)]) == ["", "block_outside"]
    client.region_destroy("rows")
    assert region.closed


def test_goodbye_lets_the_next_life_in_at_once(connect: Connect, daemon: Daemon) -> None:
    first = connect()
    first.slots.computed(first.slots.acquire(0))
    first.goodbye()
    assert connect().slots.acquire(0).epoch == 0


def test_the_end_of_a_with_says_goodbye(connect: Connect, daemon: Daemon) -> None:
    with connect() as first:
        first.reserve("r", first.num_blocks)
    again = connect()
    assert len(again.reserve("r", again.num_blocks)) == again.num_blocks


def test_an_exception_in_a_with_does_not(connect: Connect, daemon: Daemon) -> None:
    def fail() -> None:
        with connect(engine="other") as first:
            first.reserve("r", 1)
            _ = 1 // 0

    with pytest.raises(ZeroDivisionError):
        fail()
    mine = connect()
    assert refusal(lambda: mine.reserve("r", mine.num_blocks)).code == "pool_full"


def test_two_threads_hammering_requests_and_slots(connect: Connect) -> None:
    client = connect()

    def requests(name: str) -> None:
        for number in range(100):
            blocks = client.reserve(f"{name}{number}", 2)
            assert len(set(blocks)) == 2
            client.abort(f"{name}{number}")

    def slots(slot: int) -> None:
        for epoch in range(150):
            tenancy = client.slots.acquire(slot)
            assert tenancy.epoch == epoch
            client.slots.computed(tenancy)

    threads = [Background(partial(requests, name)) for name in "ab"]
    threads += [Background(partial(slots, slot)) for slot in range(2)]
    assert [thread.wait() for thread in threads] == [None] * 4
    statistics = client.statistics()
    assert statistics.requests == {"ok": 400}
    assert (statistics.events_refused, statistics.replies_unknown) == (0, 0)
