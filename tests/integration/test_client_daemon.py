"""The client and the real daemon: one pool, real gates, crashes of the daemon."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from engine_shim.client import ClientOptions, KvdClient, KvdRefused, LinkState, MemberIdentity
from kvd.wire.layout import BlockLayoutSpec, Part
from kvd.wire.slot_items import LoadItem, SaveItem
from tests.integration.daemon import Daemon
from tests.unit.client.waiting import Background, attached, lost, refusal, until

TOKENS = 4
ROW = 16
LAYOUT = BlockLayoutSpec("model", "f16", TOKENS, [[Part("main", ROW)]] * 2)
"""Two layers; a span has 64 bytes, a block two spans."""

Connect = Callable[..., KvdClient]


@pytest.fixture(scope="module")
def short() -> Iterator[Path]:
    """A directory with a short path, for runtime directories."""
    with tempfile.TemporaryDirectory(prefix="kvdi-", dir="/tmp") as name:
        yield Path(name)


def settings_of_tests() -> dict[str, str]:
    """kvd asks early about what takes long; no engine ever leaves, so many may come."""
    return {
        "release__compute_deadline": "100ms",
        "release__query_interval": "10ms",
        "limits__engines": "64",
    }


@pytest.fixture(scope="module")
def shared(short: Path) -> Iterator[Daemon]:
    """A daemon for all tests that leave it alone."""
    made = Daemon(short / "shared", **settings_of_tests())
    made.start()
    yield made
    made.close()


@pytest.fixture
def daemon(short: Path) -> Iterator[Daemon]:
    """A daemon that a test may kill."""
    made = Daemon(short / "own", **settings_of_tests())
    made.start()
    yield made
    made.close()


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Open clients of one daemon; each test has an engine of its own."""
    kvd = request.getfixturevalue("daemon" if "daemon" in request.fixturenames else "shared")
    own = hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    clients: list[KvdClient] = []

    def connect(
        engine: str = own, num_slots: int = 8, layout: BlockLayoutSpec = LAYOUT
    ) -> KvdClient:
        identity = MemberIdentity(
            engine,
            "worker0",
            is_scheduler=True,
            rank=0,
            contributes=True,
            layout=layout,
            num_slots=num_slots,
        )
        options = ClientOptions(deadline_s=5.0, spin_us=0)
        client = KvdClient(identity, str(kvd.directory), options)
        clients.append(client)
        return client.open()

    yield connect
    for client in clients:
        client.close()


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def save_block(client: KvdClient, request: str, number: int) -> int:
    """Reserve a block, fill both layers through a slot, commit it."""
    assert client.pool is not None
    (block,) = client.reserve(request, 1)
    for layer in range(2):
        tenancy = client.slots.acquire(layer, layer)
        client.slots.written(tenancy, layer, [SaveItem("s", [block], [TOKENS])])
        client.slots.save_started(tenancy, "s")
        rows = bytes([number + layer]) * TOKENS * ROW
        client.pool.write_bytes(block * client.block_stride + layer * 64, rows)
        client.slots.save_ended(tenancy, "s", True, [TOKENS])
        client.slots.computed(tenancy)
    assert client.commit([block], [digest(number)], [TOKENS]) == [""]
    client.flush()
    return block


def acquire_epoch(client: KvdClient, slot: int) -> int:
    """Wait for the slot, however long kvd is away."""
    return client.slots.acquire(slot, deadline_s=20).epoch


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


@pytest.mark.xfail(
    strict=True, reason="kvd takes a new connection for the one of a member that said goodbye"
)
def test_goodbye_lets_the_next_life_in_at_once(connect: Connect, daemon: Daemon) -> None:
    first = connect()
    first.slots.computed(first.slots.acquire(0))
    first.goodbye()
    assert connect().slots.acquire(0).epoch == 0


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


# Losing the connection ------------------------------------------------------------------------


def test_killed_daemon_is_found_again_and_sleepers_continue(
    connect: Connect, daemon: Daemon
) -> None:
    client = connect()
    (block,) = client.reserve("r", 1)
    held = [client.slots.acquire(slot) for slot in range(8)]
    for tenancy in held:
        client.slots.written(tenancy, 0)
    client.flush()
    sleepers = [Background(partial(acquire_epoch, client, slot)) for slot in range(8)]
    daemon.kill()
    until(lambda: client.statistics().gate_waits.get("hangup", 0) == 8)
    assert refusal(lambda: client.lookup("r", [digest(1)])).code == "unreachable"
    early = [client.slots.computed(tenancy) for tenancy in held[:4]]
    known = daemon.log.count('"ready"')  # lines of a killed daemon may be missing
    daemon.start()
    until(lambda: daemon.log.count('"ready"') > known)
    ready = time.monotonic()
    attached(client, 2)
    assert time.monotonic() - ready < 2
    assert client.generation == 2
    assert [ticket.wait(5) for ticket in early] == ["pool_lost"] * 4
    for tenancy in held[4:]:
        assert client.slots.computed(tenancy).wait(5) == ""
    assert [sleeper.wait() for sleeper in sleepers] == [1] * 8
    assert client.lookup("r", [digest(1)]) == []
    client.slots.computed(held[0]._replace(epoch=1, generation=2))
    loads = [LoadItem("r", [block], TOKENS)]
    assert refusal(lambda: client.slots.acquire(0, 0, loads)).code == "block_not_reserved"


def test_running_save_survives_the_daemon_and_its_slot_is_not_given_away(
    connect: Connect, daemon: Daemon
) -> None:
    client = connect()
    (block,) = client.reserve("r", 1)
    tenancy = client.slots.acquire(0)
    client.slots.written(tenancy, 0, [SaveItem("s", [block], [TOKENS])])
    client.slots.save_started(tenancy, "s")
    client.slots.computed(tenancy)
    client.flush()
    daemon.kill()
    lost(client)
    daemon.start()
    attached(client, 2)
    assert refusal(lambda: client.slots.acquire(0, deadline_s=0.05)).code == "deadline_exceeded"
    assert client.slots.save_ended(tenancy, "s", True).wait(5) == ""
    again = client.slots.acquire(0)
    assert again.epoch == 1
    client.slots.computed(again)
    save_block(client, "r2", 9)


def test_daemon_that_lives_goes_on_where_it_was(connect: Connect) -> None:
    client = connect()
    block = save_block(client, "r", 3)
    tenancy = client.slots.acquire(2)
    cut_attach_connection(client)
    ticket = client.slots.computed(tenancy)
    attached(client, 2)
    assert ticket.wait(5) == ""
    assert client.generation == 1
    assert client.lookup("r", [digest(3)]) == [block]
    assert client.slots.acquire(2).epoch == 1


def cut_attach_connection(client: KvdClient) -> None:
    """Shut the connection down under the client, as an end of its peer would."""
    path = str(client._core.path)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            is_socket = os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
        if is_socket:
            with socket.socket(fileno=os.dup(fd)) as found:
                if found.family == socket.AF_UNIX and found.getpeername() == path:
                    found.shutdown(socket.SHUT_RDWR)
                    return
    raise AssertionError("no attach connection is open")


def test_stopped_daemon_costs_calls_their_deadline_and_nothing_else(
    connect: Connect, daemon: Daemon
) -> None:
    client = connect()
    daemon.signal(signal.SIGSTOP)
    try:
        tenancy = client.slots.acquire(0)  # the word says free: nobody has to be asked
        error = refusal(lambda: client.lookup("r", [digest(1)], deadline_s=0.05))
        assert error.code == "deadline_exceeded"
        ticket = client.slots.computed(tenancy)
        assert ticket.wait(0.05) == "deadline_exceeded"
        assert client.state is LinkState.ATTACHED
    finally:
        daemon.signal(signal.SIGCONT)
    assert ticket.wait(5) == ""
    assert client.lookup("r", [digest(1)]) == []
    until(lambda: client.statistics().replies_unknown == 1)
    assert client.statistics().attaches == 1


def test_daemon_killed_under_load_again_and_again(connect: Connect, daemon: Daemon) -> None:
    client = connect()
    stop = threading.Event()
    epochs: list[list[int]] = [[], []]

    def slots(slot: int) -> None:
        while not stop.is_set():
            tenancy = client.slots.acquire(slot, deadline_s=20)
            epochs[slot].append(tenancy.epoch)
            client.slots.computed(tenancy)

    def requests() -> None:
        codes = set()
        for number in itertools.count():
            if stop.is_set():
                break
            try:
                client.reserve(f"r{number}", 1)
                client.abort(f"r{number}")
            except KvdRefused as refused:
                codes.add(refused.code)
                stop.wait(0.001)
        assert codes <= {"unreachable"}

    threads = [Background(partial(slots, slot)) for slot in range(2)]
    threads.append(Background(requests))
    for life in range(2, 4):
        went_on(epochs[0])
        daemon.kill()
        daemon.start()
        attached(client, life)
    went_on(epochs[0])
    stop.set()
    assert [thread.wait() for thread in threads] == [None] * 3
    for seen in epochs:
        assert seen == sorted(set(seen))
    client.flush()
    assert client.statistics().slots_busy == 0


def went_on(epochs: list[int]) -> None:
    """Wait for twenty more tenancies."""
    had = len(epochs)
    until(lambda: len(epochs) > had + 20)
