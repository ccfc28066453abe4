"""The pool outlives kvd: what was acknowledged is a hit after kill -9, with the right bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvd.wire.layout import BlockLayoutSpec, Part
from tests.integration.held_kvd import HeldKvd
from tests.integration.live_kvd import MIB, until
from tests.integration.member_process import Nursery
from tests.integration.raw_frames import LAYOUT, RawMember, digest, save_block

COUNT = 8


@pytest.fixture
def kvd() -> Iterator[HeldKvd]:
    with HeldKvd() as made:
        yield made


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made


def attached(kvd: HeldKvd, layout: BlockLayoutSpec = LAYOUT, engine: str = "e") -> RawMember:
    """A member that has said hello."""
    member = RawMember(kvd.runtime_dir, engine, num_slots=3)
    member.hello(layout)
    return member


def content(number: int, length: int) -> bytes:
    """What is written into block `number`."""
    return bytes([number + 1]) * length


def fill(kvd: HeldKvd, numbers: range) -> dict[int, int]:
    """Save and commit a block for each number; returns where they are."""
    blocks = {}
    with attached(kvd) as member:
        stride = stride_of(kvd)
        assert member.pool is not None
        for number in numbers:
            blocks[number] = save_block(member, f"r{number}", number)
            member.pool.write_bytes(blocks[number] * stride, content(number, stride))
            member.unpin(f"r{number}")
    until(lambda: kvd.sessions()["member"] == 0)
    return blocks


def stride_of(kvd: HeldKvd) -> int:
    """Bytes from one block to the next."""
    stride = kvd.status()["pool"]["block_bytes"]
    assert isinstance(stride, int)
    return stride


def check(kvd: HeldKvd, blocks: dict[int, int]) -> None:
    """Every block is a hit where it was, with the bytes that it had."""
    with attached(kvd) as member:
        stride = stride_of(kvd)
        assert member.pool is not None
        for number, block in blocks.items():
            assert member.lookup("again", digest(number)) == [block]
            assert member.pool.read_bytes(block * stride, stride) == content(number, stride)
        member.unpin("again")
    status = kvd.status()
    assert status["invariants"]["ok"], status["invariants"]


def counts(kvd: HeldKvd) -> dict[str, int]:
    """Blocks by state."""
    blocks = kvd.status()["pool"]["blocks"]
    assert isinstance(blocks, dict)
    return blocks


def test_what_was_committed_is_found_after_a_crash(kvd: HeldKvd) -> None:
    blocks = fill(kvd, range(COUNT))
    for turn in range(3):
        kvd.crash()
        kvd.start()
        assert kvd.counter("blocks_adopted") == COUNT, turn
        check(kvd, blocks)
    more = fill(kvd, range(COUNT, 2 * COUNT))
    assert not set(more.values()) & set(blocks.values())
    check(kvd, {**blocks, **more})


def test_what_was_not_committed_is_freed_when_its_writer_is_dead(
    kvd: HeldKvd, nursery: Nursery
) -> None:
    pid = nursery.start(kvd.runtime_dir, "saving")
    held = counts(kvd)
    assert held["filling"] > 0
    kvd.crash()
    kvd.start()
    assert counts(kvd)["filling"] == held["filling"], "its writer lives and may still write"
    nursery.kill(pid)
    until(lambda: counts(kvd)["filling"] == 0)
    assert kvd.status()["invariants"]["ok"]


def test_a_writer_that_died_while_kvd_was_down(kvd: HeldKvd, nursery: Nursery) -> None:
    pid = nursery.start(kvd.runtime_dir, "saving")
    kvd.crash()
    nursery.kill(pid)
    kvd.start()
    assert counts(kvd)["filling"] == 0
    assert kvd.counter("members_died") == 1
    assert kvd.status()["invariants"]["ok"]


def test_a_stop_as_asked_leaves_nothing(kvd: HeldKvd) -> None:
    fill(kvd, range(COUNT))
    with os.fdopen(os.pidfd_open(kvd.holder_pid()), "rb"):
        assert kvd.stop() == 0
        until(lambda: kvd.holder_pid() == 0)
    assert sorted(os.listdir(kvd.runtime_dir)) == ["kvd.lock"]


def test_a_holder_gives_up_when_no_kvd_comes(kvd: HeldKvd) -> None:
    kvd.crash()
    assert kvd.holder_pid()
    other = HeldKvd("pool.hold_ttl=1s")
    with closing(other):
        other.start()
        other.crash()
        until(lambda: other.holder_pid() == 0)


def test_status_says_who_holds(kvd: HeldKvd) -> None:
    memory = kvd.status()["memory"]
    assert memory["survives"] == ["engine", "daemon"]
    assert memory["owner"] == "holder"
    assert "holder" in memory["note"]
    kvd.crash()
    kvd.start()
    assert kvd.status()["memory"]["survives"] == ["engine", "daemon"]
    assert "taken over" in kvd.status()["memory"]["last_life"]


def test_kvctl_tells_of_a_holder_while_kvd_is_down(kvd: HeldKvd) -> None:
    command = [sys.executable, "-m", "kvd.cli.kvctl", "status"]
    command += ["--runtime-dir", str(kvd.runtime_dir)]
    kvd.crash()
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 3
    assert "a holder keeps its memory meanwhile" in done.stderr
    kvd.kill_holder()


def test_a_new_holder_takes_the_place_of_one_that_died(kvd: HeldKvd) -> None:
    blocks = fill(kvd, range(COUNT))
    for _ in range(3):
        kvd.kill_holder()
        until(lambda: kvd.holder_pid() != 0)
    until(lambda: kvd.status()["memory"]["owner"] == "holder")
    kvd.crash()
    kvd.start()
    check(kvd, blocks)


@pytest.mark.parametrize(
    ("settings", "says", "adopted"),
    [
        (("pool.size=1MiB",), "it is smaller now", True),
        (("pool.size=8MiB",), "dropped", False),
        (("pool.block_count_max=16",), "16 blocks instead of", True),
    ],
)
def test_another_configuration(
    kvd: HeldKvd, settings: tuple[str, ...], says: str, adopted: bool
) -> None:
    blocks = fill(kvd, range(COUNT))
    kvd.crash()
    kvd.configure(*settings)
    kvd.start()
    until(lambda: says in kvd.log())
    assert says in kvd.status()["memory"]["last_life"]
    if adopted:
        check(kvd, {number: b for number, b in blocks.items() if b < counts(kvd)["total"]})
    else:
        assert counts(kvd)["ready"] == 0
    fill(kvd, range(100, 110))


@pytest.mark.parametrize("wrong", ["pool.size=64TiB", "pool.numa_node=77", "pool.sise=1GiB"])
def test_a_start_that_is_refused_costs_nothing(kvd: HeldKvd, wrong: str) -> None:
    blocks = fill(kvd, range(COUNT))
    kvd.crash()
    command = [sys.executable, "-m", "kvd", *kvd.arguments, "--set", wrong]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "kept meanwhile" in done.stderr or wrong.startswith(("pool.numa", "pool.sise"))
    kvd.start()
    check(kvd, blocks)


def test_a_pool_that_was_made_smaller_stays_so(kvd: HeldKvd) -> None:
    fill(kvd, range(COUNT))
    kvd.configure("pool.size=1MiB")
    for _ in range(2):
        kvd.crash()
        kvd.start()
        (pool,) = [region for region in kvd.status()["regions"] if region["name"] == "pool"]
        assert pool["populated_bytes"] == pool["got_bytes"] == MIB
        assert kvd.resident_bytes("pool") == MIB
    kvd.configure("pool.size=4MiB")
    kvd.crash()
    kvd.start()
    assert kvd.resident_bytes("pool") == 4 * MIB
    assert counts(kvd)["total"] == 4 * MIB // stride_of(kvd)
    fill(kvd, range(100, 100 + COUNT))


def test_another_layout_starts_over(kvd: HeldKvd) -> None:
    fill(kvd, range(COUNT))
    kvd.crash()
    kvd.start()
    other = BlockLayoutSpec("other", "f", 4, [[Part("main", 256)]] * 3)
    with attached(kvd, other) as member:
        assert member.lookup("r", digest(1)) == []
    assert counts(kvd)["ready"] == 0
    until(lambda: kvd.sessions()["member"] == 0)
    kvd.crash()
    kvd.start()
    assert counts(kvd)["ready"] == 0


def test_a_damaged_header_is_never_served(kvd: HeldKvd) -> None:
    blocks = fill(kvd, range(COUNT))
    kvd.damage_header(blocks[3])
    kvd.crash()
    kvd.start()
    with attached(kvd) as member:
        assert member.lookup("r", digest(3)) == []
    assert kvd.counter("blocks_torn") == 1
    check(kvd, {number: block for number, block in blocks.items() if number != 3})


def test_damaged_metadata_drops_the_pool(kvd: HeldKvd) -> None:
    fill(kvd, range(COUNT))
    kvd.damage_superblock()
    kvd.crash()
    kvd.start()
    assert "dropped" in kvd.status()["memory"]["last_life"]
    assert counts(kvd)["ready"] == 0
    fill(kvd, range(COUNT))


def test_a_kvd_that_contradicts_itself_leaves_the_pool_alone(kvd: HeldKvd) -> None:
    blocks = fill(kvd, range(COUNT))
    kvd.crash()
    kvd.start_broken('InvariantError(["block 3 is free twice"])')
    with closing(RawMember(kvd.runtime_dir, "e")) as member:
        member.hello(LAYOUT)
        assert kvd.process is not None
        assert kvd.process.wait(20) == 70
    assert kvd.holder_pid(), "it did not stop as asked: the memory is kept"
    kvd.start()
    check(kvd, blocks)
