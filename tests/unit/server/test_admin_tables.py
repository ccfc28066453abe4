"""Pages of slots, blocks and engines: nothing skipped, nothing twice, whatever happens between."""

from __future__ import annotations

import pytest

from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.errors import KvdError
from kvd.core.ids import ReadId, SlotRef
from kvd.core.state import Limits, Settings
from kvd.server import views_tables
from kvd.server.models_tables import BlockPage, EnginePage
from kvd.server.node_view import SessionInfo
from kvd.server.sliced import run_now
from kvd.server.views_tables import (
    BLOCK_STATES,
    BlockQuery,
    EngineQuery,
    SlotQuery,
    block_page,
    engine_page,
    slot_page,
)
from tests.unit.server.fake_node import SECOND, FakeNode, ref


def slots(node: FakeNode, query: SlotQuery) -> tuple[list[str], str | None]:
    page = run_now(slot_page(node, query))
    return [f"{s.engine}/{s.member}/{s.slot}" for s in page.items], page.next


def blocks(node: FakeNode, query: BlockQuery) -> tuple[list[int], str | None]:
    page = run_now(block_page(node, query))
    return [block.block for block in page.items], page.next


# Slots --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["nonsense", "e0/w0/slot1", "e0/w0#xyz/slot1", "e0/w0#1/slot-1"])
def test_a_cursor_that_names_no_slot_is_refused(after: str) -> None:
    with pytest.raises(KvdError) as caught:
        run_now(slot_page(FakeNode(), SlotQuery(after=after)))
    assert caught.value.code == "parameter_invalid"
    assert "parameter after" in caught.value.what


def test_pages_of_slots_tell_each_slot_once_and_in_order() -> None:
    node = FakeNode()
    for engine, member in (("e1", "w0"), ("e0", "w1"), ("e0", "w0")):
        node.join(ref(engine, member), slots=3)
    told: list[str] = []
    after = ""
    for _ in range(10):
        page, following = slots(node, SlotQuery(limit=2, after=after))
        told += page
        if following is None:
            break
        after = following
    assert told == [f"{m}/{n}" for m in ("e0/w0", "e0/w1", "e1/w0") for n in range(3)]


def test_the_last_full_page_says_that_it_is_the_last() -> None:
    node = FakeNode()
    node.join(slots=4)
    assert slots(node, SlotQuery(limit=4))[1] is None
    assert slots(node, SlotQuery(limit=3))[1] == "e0/w0#1f/slot2"


def test_a_cursor_of_a_member_that_left_goes_on_behind_it() -> None:
    node = FakeNode()
    gone = node.join(ref("e0", "w0"), slots=2)
    node.join(ref("e0", "w1"), slots=2)
    _, after = slots(node, SlotQuery(limit=1))
    assert after is not None
    node.handle(ev.MemberDied(gone))
    assert slots(node, SlotQuery(after=after))[0] == ["e0/w1/0", "e0/w1/1"]


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        (SlotQuery(engine="e1"), ["e1/w0/0", "e1/w0/1"]),
        (SlotQuery(member="w1"), ["e0/w1/0", "e0/w1/1"]),
        (SlotQuery(engine="e1", member="w1"), []),
        (SlotQuery(engine="e"), []),
        (SlotQuery(state="held"), ["e0/w1/1"]),
        (SlotQuery(state="quarantined"), ["e0/w0/0"]),
        (SlotQuery(state="suspect"), []),
        (SlotQuery(state="free", engine="e0"), ["e0/w0/1", "e0/w1/0"]),
    ],
)
def test_filters_of_slots(query: SlotQuery, wanted: list[str]) -> None:
    node = FakeNode()
    first = node.join(ref("e0", "w0"), slots=2)
    second = node.join(ref("e0", "w1"), slots=2)
    node.join(ref("e1", "w0"), slots=2)
    node.quarantine(first, 0)
    node.hold(second, 1)
    assert slots(node, query) == (wanted, None)


def test_a_slot_shows_its_holds() -> None:
    node = FakeNode()
    who = node.join()
    node.offer(who, 1, "t1")
    node.time += 2 * SECOND
    (slot,) = run_now(slot_page(node, SlotQuery(state="held"))).items
    assert (slot.layer, slot.saved, slot.poisoned, slot.incarnation) == (0, "none", False, "1f")
    (hold,) = slot.holds
    assert (hold.kind, hold.owner, hold.executor) == ("read", "t1/L0+0.0", "")
    assert (hold.phase, hold.doubt, hold.asked) == ("offered", "none", 0)
    assert hold.late_seconds == pytest.approx(2 - node.settings.timing.offer / SECOND)


def test_a_page_of_slots_with_many_holds_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views_tables, "HOLDS_MAX", 10)
    node = FakeNode()
    who = node.join(slots=4)
    for index in range(3):
        held = SlotRef(who, index, 0)
        reads = tuple(
            se.ReadSpec(ReadId(f"t{index}", 0, start, 0), "tcp://d:1", start + 16)
            for start in range(0, 128, 16)
        )
        node.slot_events(who, se.Acquired(held, 0), se.Written(held, 0, (), reads))
    told, after = slots(node, SlotQuery())
    assert told == ["e0/w0/0", "e0/w0/1"]
    assert slots(node, SlotQuery(after=after or "")) == (["e0/w0/2", "e0/w0/3"], None)


# Blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["x", "-1", "1.0", "９", "1234567890"])
def test_a_cursor_that_is_no_block_is_refused(after: str) -> None:
    with pytest.raises(KvdError) as caught:
        run_now(block_page(FakeNode(), BlockQuery(after=after)))
    assert caught.value.code == "parameter_invalid"


def test_there_are_no_blocks_before_an_engine_came() -> None:
    page = run_now(block_page(FakeNode(), BlockQuery()))
    assert (page.items, page.next, page.total) == ([], None, 0)


def test_states_have_the_order_of_their_bytes() -> None:
    assert BLOCK_STATES == ("free", "filling", "ready", "poisoned")


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        (BlockQuery(state="used"), [0, 1, 2, 3]),
        (BlockQuery(state="ready"), [0, 1]),
        (BlockQuery(state="filling"), [3]),
        (BlockQuery(state="poisoned"), [2]),
        (BlockQuery(state="free", limit=2), [4, 5]),
        (BlockQuery(state="", limit=3), [0, 1, 2]),
        (BlockQuery(state="used", after="1"), [2, 3]),
        (BlockQuery(state="used", after="255"), []),
        (BlockQuery(state="used", engine="e0"), [2, 3]),
        (BlockQuery(state="used", engine="e1"), [0]),
        (BlockQuery(state="used", engine="nobody"), []),
    ],
)
def test_filters_of_blocks(query: BlockQuery, wanted: list[int]) -> None:
    """0 and 1 are ready, 0 is kept by e1; 2 is poisoned, 3 is filling, both reserved by e0."""
    node = FakeNode()
    who, other = node.join(ref("e0")), node.join(ref("e1"))
    ready = node.fill(who, "r0", 2)
    mine = node.reserve(who, "r1", 2)
    assert (*ready, *mine) == (0, 1, 2, 3)
    node.handle(ev.LookedUp(1, other, "r2", (0).to_bytes(32)), ev.BlocksPoisoned(2, who, (2,)))
    assert blocks(node, query)[0] == wanted


def test_pages_of_blocks_tell_each_once() -> None:
    node = FakeNode()
    node.reserve(node.join(), "r", 7)
    first, after = blocks(node, BlockQuery(limit=3))
    second, last = blocks(node, BlockQuery(limit=3, after=after or ""))
    third, end = blocks(node, BlockQuery(limit=3, after=last or ""))
    assert first + second + third == list(range(7))
    assert end is None


def test_used_blocks_are_found_behind_a_long_free_stretch() -> None:
    node = FakeNode(settings=Settings(pool_bytes=4096 * 200_000))
    who = node.join()
    pool = node.state().pool
    assert pool is not None
    pool.blocks.free.reverse()  # so that the highest number is taken first
    (block,) = node.reserve(who, "r", 1)
    assert block == 199_999
    assert blocks(node, BlockQuery()) == ([199_999], None)
    assert blocks(node, BlockQuery(state="filling")) == ([199_999], None)


def test_a_filling_block_shows_how_far_it_is() -> None:
    node = FakeNode()
    who = node.join()
    (block,) = node.reserve(who, "r1", 1)
    held = SlotRef(who, 0, 0)
    save = se.SaveSpec("s", (block,), (16,))
    node.slot_events(who, se.Acquired(held, 0), se.Written(held, 0, (save,)))
    (open_one,) = run_now(block_page(node, BlockQuery())).items
    assert (open_one.saves_open, open_one.spans_saved, open_one.spans) == (1, 0, 2)
    assert (open_one.owner, open_one.hash, open_one.namespace) == ("e0/r1", "", None)
    node.slot_events(who, se.SaveEnded(held, "s", True))
    node.handle(ev.Committed(1, who, (ev.CommitItem(block, b"h" * 32, 16),)))
    (saved,) = run_now(block_page(node, BlockQuery())).items
    assert (saved.saves_open, saved.spans_saved, saved.tokens) == (0, 1, 16)
    assert (saved.hash, saved.namespace, saved.pins) == ((b"h" * 32).hex(), 0, 1)
    assert saved.pinned_by == ["e0/r1"]


def test_a_block_names_the_steps_that_keep_it() -> None:
    node = FakeNode()
    who = node.join()
    (source,) = node.fill(who, "r1", 1)
    node.handle(ev.LookedUp(1, who, "r2", source.to_bytes(32)))
    (target,) = node.reserve(who, "r2", 1)
    node.load_in_step(who, 3, "r2", source)
    saving = node.save_in_step(who, 4, target)
    loaded, saved = run_now(block_page(node, BlockQuery())).items
    assert (loaded.pins, loaded.pinned_by) == (2, ["e0/r2", "step 3 of e0/w0#1f"])
    assert (loaded.saves_open, loaded.saving_steps) == (0, [])
    assert (saved.pins, saved.pinned_by) == (1, ["e0/r2"])
    assert (saved.saves_open, saved.saving_steps) == (1, ["step 4 of e0/w0#1f"])
    # Closed, it keeps the block as long as its copy runs.
    node.slot_events(who, se.StepClosed(who, 4))
    assert run_now(block_page(node, BlockQuery())).items[1] == saved
    node.slot_events(who, se.SaveEnded(saving, "s", True))
    assert run_now(block_page(node, BlockQuery())).items[1].saving_steps == []


def test_of_many_steps_that_save_into_a_block_some_are_named() -> None:
    node = FakeNode()
    who = node.join()
    (target,) = node.reserve(who, "r", 1)
    save = se.SaveSpec("s", (target,), (16,), ("r",))
    node.slot_events(who, *(se.StepOpened(who, number, (), (save,)) for number in range(1, 8)))
    (block,) = run_now(block_page(node, BlockQuery())).items
    assert block.saves_open == 7
    assert block.saving_steps == [f"step {number} of e0/w0#1f" for number in range(1, 5)]


# Engines ------------------------------------------------------------------------------------------


def test_an_engine_shows_its_members() -> None:
    node = FakeNode()
    who = node.join(ref("e0", "w1"), rank=1)
    node.join(ref("e0", "w0"), rank=-1)
    node.the_sessions = [
        SessionInfo("member", str(who), 100, 1000, node.time - 9 * SECOND, node.time - SECOND)
    ]
    node.the_stats = {str(who): {"steps": 3.0, "bad": float("nan"), "worse": float("inf")}}
    node.hold(who, 0)
    node.handle(ev.MemberSilent(who))
    (engine,) = run_now(engine_page(node, EngineQuery())).items
    assert (engine.engine, engine.tp_size, engine.namespace) == ("e0", 1, 0)
    assert engine.layout == "model m, bfloat16, 16 tokens"
    assert [member.member for member in engine.members] == ["w0", "w1"]
    unknown, known = engine.members
    assert (unknown.state, unknown.rank, unknown.uid, unknown.silent_seconds) == (
        "attached",
        None,
        None,
        None,
    )
    assert (known.state, known.rank, known.uid) == ("silent", 1, 1000)
    assert (known.attached_seconds, known.silent_seconds) == (9, 1)
    assert (known.slots.held, known.slots.free) == (1, 3)
    assert known.stats == {"steps": 3.0}
    assert engine.slots.total == 8


def test_a_member_whose_slot_is_read_is_leaving_until_the_read_ends() -> None:
    node = FakeNode()
    who = node.join()
    held = node.offer(who, 0, "t1")
    node.handle(ev.ClaimCame("kvd#d", held, ReadId("t1", 0, 0, 0), 1), ev.MemberDied(who))
    (engine,) = run_now(engine_page(node, EngineQuery())).items
    assert [member.state for member in engine.members] == ["leaving"]


def test_a_member_shows_its_steps_until_their_copies_have_ended() -> None:
    node = FakeNode()
    who, other = node.join(ref("e0", "w0")), node.join(ref("e0", "w1"), rank=1)
    (target,) = node.reserve(who, "r", 1)

    def counts() -> list[tuple[int, int]]:
        (engine,) = run_now(engine_page(node, EngineQuery())).items
        return [(member.steps.open, member.steps.closing) for member in engine.members]

    assert counts() == [(0, 0), (0, 0)]
    saving = node.save_in_step(who, 1, target)
    assert counts() == [(1, 0), (0, 0)]
    node.slot_events(who, se.StepClosed(who, 1))
    node.slot_events(other, se.StepOpened(other, 9))
    assert counts() == [(0, 1), (1, 0)]
    node.slot_events(who, se.SaveEnded(saving, "s", True))
    assert counts() == [(0, 0), (1, 0)]
    node.handle(ev.MemberDied(other))
    assert counts() == [(0, 0)]


def test_a_page_of_a_kvd_that_knows_no_steps_is_read() -> None:
    node = FakeNode()
    node.reserve(node.join(), "r", 1)
    engines, blocks_ = (
        run_now(engine_page(node, EngineQuery())),
        run_now(block_page(node, BlockQuery())),
    )
    told, of_block = engines.model_dump(), blocks_.model_dump()
    del told["items"][0]["members"][0]["steps"]
    del of_block["items"][0]["saving_steps"]
    assert EnginePage.model_validate(told) == engines
    assert BlockPage.model_validate(of_block) == blocks_


def test_pages_of_engines() -> None:
    node = FakeNode(settings=Settings(pool_bytes=1 << 20, limits=Limits(engines=5)))
    for name in ("b", "a", "c"):
        node.join(ref(name))
    page = run_now(engine_page(node, EngineQuery(limit=2)))
    assert [engine.engine for engine in page.items] == ["a", "b"]
    rest = run_now(engine_page(node, EngineQuery(limit=2, after=page.next or "")))
    assert ([engine.engine for engine in rest.items], rest.next) == (["c"], None)
