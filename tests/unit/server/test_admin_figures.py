"""The status: figures that add up, each with its denominator."""

from __future__ import annotations

import pytest

from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.ids import SlotRef
from kvd.core.state import Limits, Settings
from kvd.server.node_view import Holding, LinkInfo
from tests.unit.server.fake_node import SECOND, STRIDE, WALL, FakeNode, ref
from tests.unit.server.test_admin_views import look, redirected


def test_an_empty_node_has_zeros_and_no_rates() -> None:
    seen = look(FakeNode(the_regions=[]))
    assert not seen.pool.formatted
    assert seen.pool.unused_bytes == seen.pool.configured_bytes == 1 << 20
    assert seen.hits.rate is None
    assert seen.slots.total == 0
    assert seen.oldest_wait is None
    assert seen.memory.note == "there is no memory yet"


def test_states_of_blocks_sum_to_the_total() -> None:
    node = FakeNode()
    who = node.join()
    node.fill(who, "r0", 3)
    filling = node.reserve(who, "r1", 5)
    node.handle(ev.BlocksPoisoned(1, who, filling[:2]))
    pool = look(node).pool
    for counts, unit in ((pool.blocks, 1), (pool.bytes, STRIDE)):
        assert counts.total == 256 * unit
        assert counts.filling == 3 * unit
        assert counts.ready == 3 * unit
        assert counts.poisoned == 2 * unit
        assert counts.free + counts.filling + counts.ready + counts.poisoned == counts.total
    assert pool.pinned_blocks == 5
    assert pool.evictable_blocks == 3
    assert pool.tokens_fit == 256 * 16


def test_what_eviction_did_is_told() -> None:
    settings = Settings(pool_bytes=8 * STRIDE, high_water=0.75, low_water=0.5)
    node = FakeNode(settings=settings)
    assert look(node).eviction.admitted == 0
    who = node.join()
    blocks = node.fill(who, "r0", 8)
    hashes = b"".join(block.to_bytes(32) for block in blocks[:2])
    node.handle(ev.LookedUp(1, who, "r1", hashes), ev.RequestEnded(1, who, "r1"))
    node.pass_time(1)
    seen = look(node).eviction
    assert (seen.policy, seen.high_water, seen.low_water) == ("arc", 0.75, 0.5)
    assert (seen.admitted, seen.found, seen.evicted, seen.evicted_ahead) == (8, 2, 4, 4)
    assert (seen.new_blocks, seen.used_blocks, seen.new_room) == (2, 2, 1)
    node.fill(who, "r2", 4)
    assert look(node).eviction.ghost_hits == 4


@pytest.mark.parametrize(
    ("told", "shed"),
    [(3.0, 3), (float("nan"), 0), (float("inf"), 0), (-2.0, 0), (1e300, 0), (2.7, 2)],
)
def test_saves_that_engines_shed_are_added_up(told: float, shed: int) -> None:
    node = FakeNode()
    node.the_stats = {"e/w0#1": {"saves_shed": told}, "e/w1#1": {"saves_shed": 4.0}, "e/w2#1": {}}
    assert look(node).eviction.saves_shed == shed + 4


def test_memory_that_no_block_covers_is_told() -> None:
    node = FakeNode(settings=Settings(pool_bytes=10 * STRIDE + 1000, block_max=8))
    node.join()
    assert look(node).pool.unused_bytes == 2 * STRIDE + 1000


def test_states_of_slots_sum_to_the_total() -> None:
    node = FakeNode()
    who = node.join(slots=8)
    node.quarantine(who, 0)
    node.hold(who, 1)
    node.pass_time(node.settings.timing.compute / SECOND)
    node.hold(who, 2)
    slots = look(node).slots
    assert (slots.free, slots.held, slots.suspect, slots.quarantined) == (5, 1, 1, 1)
    assert slots.total == 8


def test_holds_are_counted_by_kind_and_doubt() -> None:
    node = FakeNode()
    who = node.join()
    node.offer(who, 0, "t1")
    node.hold(who, 1)
    counted = {(hold.kind, hold.doubt): hold.count for hold in look(node).holds}
    assert counted == {("read", "none"): 1, ("compute", "none"): 1}


def test_reads_of_the_pool_are_counted_apart() -> None:
    node = FakeNode()
    redirected(node, node.join())
    counted = {(hold.kind, hold.doubt): hold.count for hold in look(node).holds}
    assert counted == {("pool_read", "none"): 1}


def test_hits_have_their_denominator() -> None:
    node = FakeNode()
    who = node.join()
    blocks = node.fill(who, "r0", 2)
    hashes = b"".join(block.to_bytes(32) for block in (*blocks, 9999, 9998))
    node.handle(ev.LookedUp(1, who, "r1", hashes))
    hits = look(node).hits
    assert (hits.blocks_asked, hits.blocks_hit, hits.rate) == (4, 2, 0.5)


def test_refusals_and_races_are_counted_by_kind() -> None:
    node = FakeNode(counters={"frames_refused_unauthorized": 2, "frames_received": 7})
    who = node.join()
    node.handle(ev.Renewed(1, who, "nobody"))
    node.slot_events(who, se.SaveEnded(SlotRef(who, 0, 0), "s", True))
    seen = look(node)
    assert seen.refused == {"frames.unauthorized": 2, "request_unknown": 1}
    assert seen.ignored == {"no_such_hold": 1}
    assert seen.counters["frames_received"] == 7


def test_story_loss_is_counted() -> None:
    node = FakeNode(settings=Settings(pool_bytes=1 << 20, limits=Limits(story_entries=4)))
    who = node.join()
    for _ in range(3):
        node.slot_events(who, se.Computed(SlotRef(who, 0, node.epoch(who, 0))))
        node.hold(who, 1)
    story = look(node).story
    assert (story.kept, story.limit) == (4, 4)
    assert story.dropped > 0


def test_engines_beyond_the_status_are_counted() -> None:
    node = FakeNode(settings=Settings(pool_bytes=1 << 20, limits=Limits(engines=100)))
    for number in range(70):
        node.join(ref(f"e{number:02}"))
    seen = look(node)
    assert len(seen.engines) == 64
    assert seen.engines_total == 70
    assert seen.engines[0].engine == "e00"


def test_links_to_peers_are_shown_with_their_silence() -> None:
    node = FakeNode()
    node.the_links = [
        LinkInfo("tcp://d:1", "consumer", "ab" * 16, "ready", node.time - 2 * SECOND),
        LinkInfo("tcp://d:2", "consumer", "", "connecting", 0, "refused"),
    ]
    first, second = look(node).peers
    assert first.silent_seconds == 2
    assert second.silent_seconds is None
    assert second.error == "refused"


def test_a_clock_that_was_set_back_gives_no_negative_uptime() -> None:
    node = FakeNode(started_at=WALL + 50)
    assert look(node).uptime_seconds == 0


@pytest.mark.parametrize(
    ("survives", "note"),
    [
        (("engine",), "memfd: survives engines, not kvd"),
        (("engine", "daemon"), "memfd: survives engines and kvd (holder)"),
        (
            ("engine", "daemon", "stop"),
            "memfd: survives engines, kvd, and its stop and start (holder)",
        ),
        ((), "memfd: survives neither engines nor kvd"),
    ],
)
def test_status_says_what_the_memory_survives(survives: tuple[str, ...], note: str) -> None:
    holding = Holding("holder", "auto", survives)
    assert look(FakeNode(the_holding=holding)).memory.note == note


def test_memory_that_nobody_keeps_is_degraded_unless_it_is_meant() -> None:
    for wanted, codes in (("auto", ["memory_not_kept"]), ("none", [])):
        node = FakeNode(the_holding=Holding("none", wanted, ("engine",), "no holder"))
        assert [reason.code for reason in look(node).degraded] == codes
