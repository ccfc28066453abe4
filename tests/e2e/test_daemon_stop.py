"""The ends of `kvd`: asked, asked twice, killed, and by its own fault; nothing is left of it."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from engine_shim.reference.demo.processes import kill, pause
from kvd.wire import messages as msg
from tests.integration.live_kvd import MIB, LiveKvd, until
from tests.integration.member_process import STAGES, Nursery
from tests.integration.raw_frames import LAYOUT, RawMember

LOCK = "kvd.lock"
SOCKETS = ["admin.sock", "attach.sock", "engine.sock"]
POOL_BYTES = 128 * MIB


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made


def shared_memory() -> int:
    """Shmem of /proc/meminfo, bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no Shmem")


def left(kvd: LiveKvd) -> list[str]:
    """Names in its runtime directory, [] when there is none."""
    return sorted(os.listdir(kvd.runtime_dir)) if kvd.runtime_dir.is_dir() else []


def held(inodes: set[int]) -> list[str]:
    """Mappings of these files in any process."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            for line in maps.read_text().splitlines():
                if "/memfd:kvd-" in line and int(line.split()[4]) in inodes:
                    found.append(f"{maps}: {line}")
    return found


def in_shm() -> set[str]:
    """Names in /dev/shm that could be kvd's."""
    return {name for name in os.listdir("/dev/shm") if "kvd" in name}


def readiness(kvd: LiveKvd) -> dict[str, Any]:
    """What /readyz says, {} while nobody answers."""
    try:
        document = kvd.get("/readyz")[1]
    except OSError:
        return {}
    assert isinstance(document, dict)
    return document


# Asked to stop ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_at_random_moments(number: signal.Signals) -> None:
    """From the first import on, over populating, to work: it ends with 0 and takes all along.

    Before it has made anything the signal itself may end it; there is nothing to take along then.
    """
    draw = random.Random(int(number))
    for turn in range(8):
        kvd = LiveKvd("pool.populate_step=2MiB", f"pool.size={POOL_BYTES // MIB}MiB")
        try:
            kvd.start(wait=turn == 7)
            pause(draw.random() * 0.8 if turn else 0)
            code = kvd.stop(number)
            assert code in (0, -number), kvd.log()
            assert left(kvd) == ([LOCK] if code == 0 else [])
            assert code or "Traceback" not in kvd.log()
            assert turn < 7 or not code, "it was ready"
        finally:
            kvd.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_memory_is_populated(number: signal.Signals) -> None:
    kvd = LiveKvd("pool.populate_step=2MiB", "pool.size=2GiB")
    with closing(kvd):
        kvd.start(wait=False)
        until(lambda: 0 < readiness(kvd).get("percent", 0) < 90, "it populates")
        assert kvd.stop(number) == 0
        assert left(kvd) == [LOCK]
        assert '"event": "ready"' not in kvd.log()


def test_a_second_signal_forces_the_end() -> None:
    """Asked once it waits for the step of populating under way; asked twice it does not."""
    kvd = LiveKvd("pool.populate_step=64GiB", "pool.size=2GiB")
    with closing(kvd):
        kvd.start(wait=False)
        until(lambda: (kvd.runtime_dir / "engine.sock").exists(), "it listens")
        assert kvd.process is not None
        kvd.process.terminate()
        until(lambda: readiness(kvd).get("phase") == "stopping", "it stops")
        assert kvd.stop() == 1
    with LiveKvd() as other:
        assert other.stop() == 0


def test_engines_are_told_that_it_stops(nursery: Nursery) -> None:
    with LiveKvd("regions.size_max=1MiB") as kvd:
        with RawMember(kvd.runtime_dir, "e", "w2", num_slots=3) as member:
            member.hello(LAYOUT)
            member.call(msg.RegionCreate(*member.head(), "g", 1, 8, 4, 16))
            member.call(msg.Expect(*member.head(), "t", "g", [0], 4, 1, 60_000))
            waiting = msg.AwaitTransfer(*member.head(), "t")
            member.zmq.send(member.encode(waiting))
            until(lambda: kvd.status()["transfers"]["waiters"] == 1)
            pid = nursery.start(kvd.runtime_dir, "working", "busy")
            assert kvd.stop() == 0
            reply = member.decode(member.zmq.recv())
            assert isinstance(reply, msg.Error)
            assert (reply.code, reply.request_no) == ("stopping", waiting.request_no)
            assert member.socket.recv(1) == b"", "the attach connection is still open"
            nursery.kill(pid)
            member.close()
        assert left(kvd) == [LOCK]


# Killed -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_with_its_engines_it_leaves_nothing_behind(nursery: Nursery) -> None:
    """At random points from the start to work; no name is left, and nobody has its memory."""
    draw = random.Random(3)
    names = in_shm()
    kvd = LiveKvd(f"pool.size={POOL_BYTES // MIB}MiB", "pool.populate_step=2MiB")
    with closing(kvd):
        for turn in range(6):
            kvd.start(wait=turn % 2 == 0)
            pids = []
            if turn % 2 == 0:
                stages = draw.sample(STAGES[1:], 2)
                pids = [nursery.start(kvd.runtime_dir, s, f"e{i}") for i, s in enumerate(stages)]
            pause(draw.random() * 0.4)
            memory = kvd.memory_inodes()
            assert memory or not pids
            assert kvd.process is not None
            kill(kvd.process)
            for pid in pids:
                nursery.kill(pid)
            assert set(left(kvd)) <= {LOCK, *SOCKETS}
            assert in_shm() == names
            assert held(memory) == []
        kvd.start()
        assert kvd.stop() == 0
        assert left(kvd) == [LOCK]


@pytest.mark.slow
def test_twenty_crashes_and_starts_cost_nothing(nursery: Nursery) -> None:
    """The whole host's shared memory is looked at, which others use as well; twenty pools that
    stay are far more than that.
    """
    crashes = 20
    shmem, names = shared_memory(), in_shm()
    kvd = LiveKvd(f"pool.size={POOL_BYTES // MIB}MiB")
    sizes = []
    with closing(kvd):
        for _ in range(crashes):
            kvd.start()
            pid = nursery.start(kvd.runtime_dir, "saving")
            sizes.append((kvd.num_fds(), kvd.rss_bytes()))
            assert kvd.process is not None
            kill(kvd.process)
            nursery.kill(pid)
            assert left(kvd) == [*SOCKETS, LOCK]
        assert in_shm() == names
        until(lambda: shared_memory() < shmem + crashes * POOL_BYTES // 2, "the memory comes back")
    assert max(fds for fds, _ in sizes) - min(fds for fds, _ in sizes) <= 2, sizes
    assert max(rss for _, rss in sizes) - sizes[0][1] < 16 * MIB, sizes


# Its own fault ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ('InvariantError(["block 3 is free twice"])', "block 3 is free twice"),
        ('KeyError("slot7")', "KeyError: 'slot7'"),
    ],
)
def test_a_kvd_that_contradicts_itself_stops(error: str, says: str) -> None:
    """Half a step may be done: it says why, answers who waits, and does not go on."""
    kvd = LiveKvd()
    with closing(kvd):
        kvd.start_broken(error)
        member = RawMember(kvd.runtime_dir, "e")
        member.hello(LAYOUT)
        assert kvd.process is not None
        assert kvd.process.wait(20) == 70, kvd.log()
        assert f"kvd: it contradicts itself and stops: {says}" in kvd.log()
        assert left(kvd) == [LOCK]
        member.close()
