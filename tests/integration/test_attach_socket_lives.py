"""Members that die, come again, or are not who they say: what a real kvd keeps of them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Protocol

import pytest

from engine_shim.reference.demo.processes import pause
from kvd.wire import attach
from kvd.wire import messages as msg
from kvd.wire.gate_layout import STATE_CLOSED, STATE_FREE, STATE_HELD, split_word, word_offset
from kvd.wire.slot_items import (
    AcquiredItem,
    ComputedItem,
    SaveEndedItem,
    SaveItem,
    SlotItem,
    WrittenItem,
)
from tests.capabilities import lacking
from tests.integration.live_kvd import MIB, LiveKvd, until
from tests.integration.member_process import STAGES, Nursery
from tests.integration.raw_attach import RawAttach, member_message
from tests.integration.raw_frames import (
    LAYOUT,
    RawMember,
    digest,
    epochs,
    refusal,
    save_block,
)

NOBODY = 65_534
ALLOWED = 61_234
INCARNATION = 99


@pytest.fixture(scope="module")
def kvd() -> Iterator[LiveKvd]:
    with LiveKvd("regions.size_max=1MiB", f"server.allowed_uids={ALLOWED}") as made:
        # The directory above the runtime directory is a private one of this test.
        made.runtime_dir.parent.chmod(0o711)
        yield made


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made


class Join(Protocol):
    """Attaches as member w of an engine; who has not left by then leaves when the test ends."""

    def __call__(self, engine: str = "e", *, num_slots: int = 3, incarnation: int = 0) -> RawMember:
        """Attach; nothing is said yet."""


@pytest.fixture
def join(kvd: LiveKvd, nothing_left: None) -> Iterator[Join]:
    with ExitStack() as stack:

        def join(engine: str = "e", *, num_slots: int = 3, incarnation: int = 0) -> RawMember:
            client = RawMember(
                kvd.runtime_dir, engine, "w", num_slots=num_slots, incarnation=incarnation
            )
            return stack.enter_context(client)

        yield join


@pytest.fixture(autouse=True)
def nothing_left(kvd: LiveKvd) -> Iterator[None]:
    """What members had is gone after each test: engines, sessions, descriptors, blocks, regions."""
    num_fds = kvd.num_fds()
    yield
    empty(kvd, num_fds)


def empty(kvd: LiveKvd, num_fds: int) -> None:
    """Wait until nothing of any member is left."""
    until(lambda: kvd.status()["engines_total"] == 0, "engines left")
    until(
        lambda: kvd.num_fds() <= num_fds, f"{num_fds} descriptors before, now {kvd.descriptors()}"
    )
    status = kvd.status()
    blocks = status["pool"]["blocks"]
    assert (blocks["filling"], blocks["poisoned"], status["pool"]["pinned_blocks"]) == (0, 0, 0)
    assert (status["slots"]["total"], status["transfers"]["incoming_open"]) == (0, 0)
    assert status["transfers"]["waiters"] == 0
    assert [region["name"] for region in status["regions"]] == ["pool", "pool-meta", "record"][
        : len(status["regions"])
    ]
    assert kvd.sessions() == {"member": 0, "reader": 0}
    assert status["invariants"]["ok"], status["invariants"]


# Deaths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_member_leaves_nothing(kvd: LiveKvd, nursery: Nursery, stage: str) -> None:
    with RawMember(kvd.runtime_dir, "witness", num_slots=3) as witness:
        witness.hello(LAYOUT)
        before = witness.reserve("r", 3)
        died = kvd.counter("members_died")
        pid = nursery.start(kvd.runtime_dir, stage)
        assert kvd.sessions()["member"] == 2
        nursery.kill(pid)
        until(lambda: kvd.sessions()["member"] == 1, "its session")
        assert kvd.counter("members_died") == died + (stage != "attached")
        until(lambda: kvd.status()["pool"]["blocks"]["filling"] == 3, "its blocks")
        assert kvd.status()["slots"]["total"] == 3
        assert len({*before, *witness.reserve("r", 2)}) == 5


def test_twenty_kills_cost_nothing(kvd: LiveKvd, nursery: Nursery) -> None:
    """At random moments of its work; memory and descriptors stay where they were."""
    draw = random.Random(5)
    num_fds = kvd.num_fds()
    rss = []
    for number in range(20):
        pid = nursery.start(kvd.runtime_dir, "working", f"e{number % 3}")
        pause(draw.random() * 0.02)
        nursery.kill(pid)
        empty(kvd, num_fds)
        rss.append(kvd.rss_bytes())
    assert max(rss) - rss[3] < 4 * MIB, rss


def test_what_a_dead_engine_stored_is_found_by_others(kvd: LiveKvd, nursery: Nursery) -> None:
    with RawMember(kvd.runtime_dir, "e0", num_slots=1) as first:
        first.hello(LAYOUT)
        stored = save_block(first, "r", 501)
    pid = nursery.start(kvd.runtime_dir, "saving", "e1")
    nursery.kill(pid)
    until(lambda: kvd.status()["engines_total"] == 0)
    with RawMember(kvd.runtime_dir, "e2") as other:
        other.hello(LAYOUT)
        assert other.lookup("r", digest(501)) == [stored]


def test_the_next_life_is_let_in_once_the_old_one_is_dead(
    kvd: LiveKvd, nursery: Nursery, join: Join
) -> None:
    pid = nursery.start(kvd.runtime_dir, "saving")
    client = join()
    error = refusal(lambda: client.hello(LAYOUT))
    assert (error.code, error.context["pid"]) == ("engine_busy", str(pid))
    nursery.kill(pid)
    until(lambda: kvd.status()["engines_total"] == 0)
    client.hello(LAYOUT)
    assert epochs(client) == [0, 0, 0]


def test_a_member_that_dies_before_its_attach_is_looked_at(kvd: LiveKvd, nursery: Nursery) -> None:
    """kvd is stopped meanwhile: connection, message and end reach it at once."""
    assert kvd.process is not None
    pid = nursery.start(kvd.runtime_dir, "attached", "e0")
    kvd.pause()
    try:
        with RawAttach(kvd.runtime_dir) as connection:
            connection.socket.send(member_message("gone"))
        nursery.kill(pid)
    finally:
        kvd.resume()
    until(lambda: kvd.sessions()["member"] == 0)


# The same life again ------------------------------------------------------------------------------


def test_the_same_life_attaches_again_and_finds_its_slots(kvd: LiveKvd, join: Join) -> None:
    """The old token and page are void; kvd's own books are the truth."""
    first = join()
    first.hello(LAYOUT)
    (block,) = first.reserve("r", 1)
    items: list[SlotItem] = [
        WrittenItem(0, 0, 0, [SaveItem("s", [block], [4])]),
        ComputedItem(0, 0),
        AcquiredItem(1, 0),
        ComputedItem(1, 0),
    ]
    assert first.events(items) == []
    before = states(first)
    again = join(incarnation=first.incarnation)
    assert first.code(msg.Renew(*first.head(), "r")) == "unauthorized"
    assert states(again) == [(0, STATE_CLOSED)] * 3
    ended: list[SlotItem] = [SaveEndedItem(0, 0, "s", True)]
    assert again.code(again.events_frame(ended)) == "engine_unknown"
    reply = again.hello(LAYOUT, slots=[msg.SlotAnnounce(0, 50, True, 49)])
    assert (reply.epochs, reply.next_no) == ([0, 1, 0], 4)
    assert states(again) == [(0, STATE_HELD), (1, STATE_FREE), (0, STATE_FREE)]
    assert again.events(ended) == []
    assert states(again) == [(1, STATE_FREE), (1, STATE_FREE), (0, STATE_FREE)]
    assert states(first) == before, "the old page must not change any more"
    assert kvd.sessions()["member"] == 1


def states(client: RawMember) -> list[tuple[int, int]]:
    """(epoch, state) of three slots, as the page says."""
    assert client.page is not None
    return [split_word(client.page.load_u64(word_offset(slot))) for slot in range(3)]


def test_a_lost_connection_of_a_living_member_keeps_what_it_has(kvd: LiveKvd, join: Join) -> None:
    client = join()
    client.hello(LAYOUT)
    (block,) = client.reserve("r", 1)
    client.events([WrittenItem(0, 0, 0, [SaveItem("s", [block], [4])])])
    client.socket.close()
    until(lambda: kvd.status()["engines"][0]["silent_members"] == 1)
    status = kvd.status()
    assert (status["slots"]["held"], status["pool"]["blocks"]["filling"]) == (1, 1)
    assert client.events([SaveEndedItem(0, 0, "s", True), ComputedItem(0, 0)]) == []
    assert epochs(client) == [1, 0, 0]
    again = join(incarnation=client.incarnation)
    again.hello(LAYOUT)
    assert kvd.status()["engines"][0]["silent_members"] == 0


@pytest.mark.parametrize("num_slots", [0, 2, 4])
def test_the_same_life_with_other_slots_is_refused(join: Join, num_slots: int) -> None:
    """Its page could not show the slots that are on the books."""
    first = join()
    first.hello(LAYOUT)
    first.events([AcquiredItem(2, 0)])
    error = refusal(lambda: join(num_slots=num_slots, incarnation=first.incarnation))
    assert (error.code, error.context["count"]) == ("slot_unknown", "3")
    assert first.events([ComputedItem(2, 0)]) == []


def test_another_process_of_the_same_life_is_refused(
    kvd: LiveKvd, nursery: Nursery, join: Join
) -> None:
    """A fork of an engine knows its incarnation, and is not the engine."""
    pid = nursery.start(kvd.runtime_dir, "hello", incarnation=INCARNATION)
    error = refusal(lambda: join(incarnation=INCARNATION))
    assert (error.code, error.context["pid"]) == ("engine_busy", str(pid))
    assert kvd.sessions()["member"] == 1
    nursery.kill(pid)
    until(lambda: kvd.status()["engines_total"] == 0)
    join(incarnation=INCARNATION).hello(LAYOUT)


# Goodbye ------------------------------------------------------------------------------------------


def test_goodbye_ends_a_member_at_once(kvd: LiveKvd, join: Join) -> None:
    client = join()
    client.hello(LAYOUT)
    (block,) = client.reserve("r", 1)
    client.events([WrittenItem(0, 0, 0, [SaveItem("s", [block], [4])]), AcquiredItem(1, 0)])
    assert client.code(msg.Goodbye(*client.head())) == ""
    assert kvd.status()["engines_total"] == 0
    assert client.socket.recv(1) == b"", "the attach connection was not closed"
    join(num_slots=1, incarnation=client.incarnation).hello(LAYOUT)


def test_descriptors_of_members_that_left_are_used_again(kvd: LiveKvd, join: Join) -> None:
    """The next connection may get the number of a descriptor that was a member's."""
    for turn in range(5):
        members = [join(f"e{number}") for number in range(4)]
        for member in members:
            member.hello(LAYOUT)
        assert members[turn % 4].code(msg.Goodbye(*members[turn % 4].head())) == ""
        other = join("f")
        other.hello(LAYOUT)
        for member in [*members, other]:
            member.leave()


# Users --------------------------------------------------------------------------------------------


def test_users_that_are_not_allowed(kvd: LiveKvd, nursery: Nursery) -> None:
    if os.getuid() != 0:
        lacking("the right to become another user", "run the tests with sudo")
    before = kvd.refused("attach.forbidden")
    with pytest.raises(RuntimeError, match="forbidden"):
        nursery.start(kvd.runtime_dir, "attached", uid=NOBODY)
    assert kvd.refused("attach.forbidden") == before + 1
    assert nursery.talk(kvd.runtime_dir, NOBODY) == "cut"
    pid = nursery.start(kvd.runtime_dir, "saving", uid=ALLOWED)
    nursery.kill(pid)
    assert nursery.talk(kvd.runtime_dir, ALLOWED) == "answered"
    with RawAttach(kvd.runtime_dir) as connection:
        assert isinstance(connection.ask(member_message()), attach.Attached)
