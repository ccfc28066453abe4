"""The status: parts that add up, waits that age, reasons that are told."""

from __future__ import annotations

import pytest

from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.holds import HoldKind, Truth
from kvd.core.ids import MemberRef, ReadId, SlotRef
from kvd.core.state import Settings
from kvd.memory.memory_info import MemoryInfo
from kvd.memory.preflight import check_fits
from kvd.server.models import Status
from kvd.server.node_view import Phase
from kvd.server.readiness import DEGRADED_CODES, NOT_READY_CODES, PREFERRED
from kvd.server.sliced import run_now
from kvd.server.views import Watch, readiness, status
from tests.unit.server.fake_node import SECOND, WALL, FakeNode, ref, region


def look(node: FakeNode, watch: Watch | None = None) -> Status:
    return run_now(status(node, watch or Watch(), WALL))


def codes(node: FakeNode, watch: Watch | None = None) -> tuple[list[str], list[str]]:
    """Codes of what keeps work away, and of what needs an operator."""
    seen = look(node, watch)
    return [r.code for r in seen.not_ready], [r.code for r in seen.degraded]


# Reasons ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "not_ready", "degraded"),
    [
        (Phase("starting", 40, "populates the pool"), ["starting"], []),
        (Phase("stopping"), ["stopping"], []),
        (Phase("failed", 0, "no memory"), ["failed"], ["failed"]),
        (Phase("ready"), [], []),
    ],
)
def test_phase_keeps_work_away_but_only_failure_needs_an_operator(
    phase: Phase, not_ready: list[str], degraded: list[str]
) -> None:
    node = FakeNode(the_phase=phase)
    assert codes(node) == (not_ready, degraded)
    body = run_now(readiness(node, Watch()))
    assert body.ready == (not not_ready)
    assert [reason.code for reason in body.reasons] == not_ready
    assert (body.phase, body.percent, body.detail) == (phase.name, phase.percent, phase.detail)


def test_starting_says_how_far_it_is() -> None:
    seen = look(FakeNode(the_phase=Phase("starting", 40)))
    assert seen.percent == 40
    assert "40%" in seen.not_ready[0].what


def test_a_quarantined_slot_degrades_and_is_named() -> None:
    node = FakeNode()
    held = node.quarantine(node.join(), 2)
    seen = look(node)
    assert seen.ready
    assert [reason.code for reason in seen.degraded] == ["slot_quarantined"]
    assert str(held) in seen.degraded[0].what


@pytest.mark.parametrize(("left", "ready"), [(0.0, False), (1.0, True), (None, True)])
def test_a_quarantined_slot_without_a_spare_keeps_work_away(
    left: float | None, ready: bool
) -> None:
    node = FakeNode()
    who = node.join()
    node.quarantine(who, 2)
    if left is not None:
        node.the_stats = {str(who): {"spare_left": left}}
    seen = look(node)
    assert seen.ready == ready
    assert ([reason.code for reason in seen.not_ready] == ["no_spare"]) == (not ready)
    assert seen.engines[0].spare_left == left


def test_no_spare_without_quarantine_is_no_trouble() -> None:
    node = FakeNode()
    node.the_stats = {str(node.join()): {"spare_left": 0.0}}
    assert codes(node) == ([], [])


def test_an_engine_that_runs_for_debugging_degrades_and_is_named() -> None:
    node = FakeNode()
    who = node.join()
    node.the_stats = {str(who): {"keeps_device_kv": 0.0}}
    assert codes(node) == ([], [])
    node.the_stats = {str(who): {"keeps_device_kv": 1.0}}
    assert codes(node) == ([], ["debug_engine"])
    assert who.engine in look(node).degraded[0].what


def test_stats_of_a_member_that_left_count_for_nothing() -> None:
    node = FakeNode()
    node.quarantine(node.join(), 0)
    node.the_stats = {str(ref(incarnation=0x2F)): {"spare_left": 0.0}}
    assert codes(node) == ([], ["slot_quarantined"])


def test_contradicting_books_keep_work_away() -> None:
    node = FakeNode()
    node.join()
    pool = node.state().pool
    assert pool is not None
    pool.blocks.free.pop()
    seen = look(node)
    assert [reason.code for reason in seen.not_ready] == ["invariants_failed"]
    assert not seen.invariants.ok
    assert "are free" in seen.invariants.problems[0]


def test_a_silent_member_needs_an_operator() -> None:
    node = FakeNode()
    who = node.join()
    node.handle(ev.MemberSilent(who))
    assert codes(node) == ([], ["member_silent"])
    assert look(node).engines[0].silent_members == 1


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({"reason": f"{PREFERRED} none are free"}, True),
        ({"reason": f"{PREFERRED} thp", "page_kind": "thp", "huge": 0}, True),
        ({"reason": f"{PREFERRED} thp", "page_kind": "thp", "huge": 1 << 20}, False),
        ({"reason": f"{PREFERRED} thp", "page_kind": "thp", "huge": 0, "populated": 0}, False),
        ({"reason": f"{PREFERRED} 2MiB pages", "page_kind": "hugetlb"}, False),
        ({"reason": "huge pages are off"}, False),
    ],
)
def test_huge_pages_that_were_preferred_and_not_had(
    changes: dict[str, object], lacking: bool
) -> None:
    node = FakeNode(the_regions=[region(**changes)])
    assert codes(node) == ([], ["huge_pages"] if lacking else [])


def test_memory_on_another_node_than_asked_needs_an_operator() -> None:
    nodes = ((0, 1 << 19), (1, 1 << 19))
    node = FakeNode(the_regions=[region(node="0", nodes=nodes, stray=1 << 19)])
    assert codes(node) == ([], ["numa_node"])
    (reason,) = look(node).degraded
    assert reason.what == "Region pool is to be on NUMA node 0, but 512KiB of it are elsewhere."
    (shown,) = look(node).regions
    assert (shown.node, shown.node_bytes) == ("0", {"0": 1 << 19, "1": 1 << 19})


def test_preferring_is_told_by_the_start_of_the_reason() -> None:
    bare = MemoryInfo(1 << 40, 1 << 40, None, (), 0, "never", 0)
    assert check_fits("pool", 1 << 20, "prefer", bare, 0).reason.startswith(PREFERRED)
    assert not check_fits("pool", 1 << 20, "off", bare, 0).reason.startswith(PREFERRED)


def test_a_read_of_the_pool_that_cannot_be_fenced_is_told() -> None:
    node = FakeNode()
    who = node.join()
    held, read = redirected(node, who)
    node.time += node.settings.timing.read
    for _ in range(node.settings.timing.query_attempts + 1):
        node.handle(ev.Tick())
        node.time += node.settings.timing.interval
    node.handle(ev.FenceEnded(held, HoldKind.READ, read, stopped=False))
    assert codes(node) == ([], ["read_quarantined"])


def test_every_reason_has_a_code_of_the_lists() -> None:
    assert set(NOT_READY_CODES) - {"starting", "stopping"} <= set(DEGRADED_CODES)


# Waits --------------------------------------------------------------------------------------------


def test_a_wait_over_the_limit_keeps_work_away() -> None:
    node = FakeNode()
    held = node.hold(node.join(), 1)
    watch = Watch()
    node.time += node.wait_limit
    assert codes(node, watch) == ([], [])
    node.time += 1
    assert codes(node, watch) == (["wait_too_long"], ["wait_too_long"])
    wait = look(node, watch).oldest_wait
    assert wait is not None
    assert (wait.what, wait.name, wait.who) == ("slot", str(held), str(held.member))
    assert wait.age_seconds == pytest.approx(120)
    assert wait.limit_seconds == 120
    assert wait.last_event.startswith("acquired")
    assert wait.last_event_age_seconds == pytest.approx(120)
    assert wait.waits_for == [f"compute engine by {held.member} (running)"]


def test_an_answer_that_it_runs_does_not_make_a_wait_young() -> None:
    """An executor may say "running" for half an hour; its slot has waited half an hour."""
    node = FakeNode()
    who = node.join()
    held = node.hold(who, 1)
    watch = Watch()
    look(node, watch)
    for _ in range(30):
        node.pass_time(node.settings.timing.compute / SECOND)
        node.handle(ev.MemberAnswered(who, held, HoldKind.COMPUTE, "engine", Truth.RUNNING))
        look(node, watch)
    wait = look(node, watch).oldest_wait
    assert wait is not None
    assert wait.age_seconds == pytest.approx(1800)
    assert codes(node, watch)[0] == ["wait_too_long"]


def test_ages_of_what_has_ended_are_forgotten() -> None:
    node = FakeNode()
    who = node.join()
    watch = Watch()
    for _ in range(50):
        held = node.hold(who, 1)
        look(node, watch)
        node.slot_events(who, se.Computed(held))
    look(node, watch)
    assert watch.ages.since == {}


def test_a_quarantined_slot_is_no_wait() -> None:
    node = FakeNode()
    node.quarantine(node.join(), 1)
    node.time += 1000 * SECOND
    assert codes(node) == ([], ["slot_quarantined"])
    assert look(node).oldest_wait is None


def test_the_oldest_of_several_waits_is_shown() -> None:
    node = FakeNode()
    who = node.join()
    node.hold(who, 1)
    node.time += SECOND
    old = look(node).oldest_wait
    node.hold(who, 2)
    node.time += SECOND
    new = look(node).oldest_wait
    assert old is not None
    assert new is not None
    assert old.name == new.name
    assert new.age_seconds == 2


def test_who_waits_for_a_transfer_learns_for_which_reads() -> None:
    node = FakeNode()
    who = node.join()
    held = node.offer(who, 3, "t1")
    node.slot_events(who)
    node.handle(ev.TransferAwaited(9, who, "t1", node.time + 600 * SECOND))
    node.time += 3 * SECOND
    state = node.state()
    state.members[who].held.clear()  # only the call waits
    wait = look(node).oldest_wait
    assert wait is not None
    assert (wait.what, wait.name, wait.who) == ("transfer", "t1", "e0")
    assert wait.age_seconds == 3
    assert wait.waits_for == [f"read t1/L0+0.0 by tcp://d:1 of {held}"]


def test_a_waiting_decode_engine_learns_that_no_offer_came() -> None:
    node = FakeNode(settings=Settings(pool_bytes=1 << 20, region_bytes=1 << 30))
    who = node.join(layout=None)
    spec = ev.RegionSpec(num_layers=2, num_blocks=8, block_tokens=16, row_bytes=64)
    node.handle(
        ev.RegionAsked(1, who, "r", spec),
        ev.RegionMade("r"),
        ev.TransferExpected(2, who, "t2", "r", (0, 1), 32, 2, node.time + 600 * SECOND),
        ev.TransferAwaited(3, who, "t2", node.time + 600 * SECOND),
    )
    seen = look(node)
    assert seen.oldest_wait is not None
    assert seen.oldest_wait.waits_for == ["offers of the producer: 0 of 64 rows"]
    assert seen.transfers.incoming_open == 1
    assert seen.transfers.waiters == 1


def redirected(node: FakeNode, who: MemberRef) -> tuple[SlotRef, ReadId]:
    """A granted read of the pool: its slot was saved and is free."""
    blocks = node.reserve(who, "r", 1)
    held = SlotRef(who, 3, node.epoch(who, 3))
    read = ReadId("t1", 0, 0, 0)
    spec = se.ReadSpec(read, "tcp://d:1", 16, (7,), blocks)
    node.slot_events(
        who,
        se.Acquired(held, 0),
        se.Written(held, 0, (se.SaveSpec("s", blocks, (16,)),), (spec,)),
        se.Computed(held),
        se.SaveEnded(held, "s", True),
    )
    node.handle(ev.ClaimCame("kvd#d", held, read, 1))
    return held, read
