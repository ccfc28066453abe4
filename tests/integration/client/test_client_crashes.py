"""The client and the real daemon: killed, stopped and cut off, at rest and under load."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from functools import partial

from engine_shim.client import KvdClient, KvdRefused, LinkState
from kvd.wire.slot_items import LoadItem, SaveItem
from tests.integration.client.rig import TOKENS, Connect, digest, save_block
from tests.integration.daemon import Daemon
from tests.unit.client.waiting import Background, attached, lost, refusal, until


def acquire_epoch(client: KvdClient, slot: int) -> int:
    """Wait for the slot, however long kvd is away."""
    return client.slots.acquire(slot, deadline_s=20).epoch


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
