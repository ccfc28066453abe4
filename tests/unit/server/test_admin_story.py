"""Stories: found by any name that a transition concerns, readable whatever they hold."""

from __future__ import annotations

import pytest

from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.errors import KvdError
from kvd.core.holds import Truth
from kvd.core.ids import ReadId, SlotRef
from kvd.core.state import Limits, Settings
from kvd.core.use_events import DID_MAX, Used
from kvd.server import story_text
from kvd.server.sliced import run_now
from kvd.server.views_story import story_page, story_text_of
from tests.unit.server.fake_node import SECOND, FakeNode, ref


def events(node: FakeNode, wanted: str, limit: int = 100) -> list[str]:
    return [entry.event for entry in run_now(story_page(node, wanted, limit)).entries]


@pytest.mark.parametrize("wanted", ["nobody", "slot", "e0/w0#1f/slot", "block1", "lot1", "", "#"])
def test_what_nothing_names_is_not_found(wanted: str) -> None:
    node = FakeNode()
    who = node.join()
    node.hold(who, 1)
    node.reserve(who, "r", 1)
    with pytest.raises(KvdError) as caught:
        run_now(story_page(node, wanted, 10))
    assert caught.value.code == "not_found"


def test_a_long_name_that_is_not_found_is_cut_in_the_answer() -> None:
    with pytest.raises(KvdError) as caught:
        run_now(story_page(FakeNode(), "x\n" * 5000, 10))
    assert len(caught.value.what) < 300
    assert "\n" not in caught.value.what


def story_node() -> tuple[FakeNode, SlotRef]:
    """A tenancy that loads for r0, saves into block 1 and offers rows of t1."""
    node = FakeNode()
    who = node.join()
    (source,) = node.fill(who, "first", 1)
    node.handle(ev.LookedUp(1, who, "r0", source.to_bytes(32)))
    (target,) = node.reserve(who, "r1", 1)
    assert (source, target) == (0, 1)
    held = SlotRef(who, 2, 0)
    read = ReadId("t1", 0, 0, 0)
    node.slot_events(
        who,
        se.Acquired(held, 0, (se.LoadSpec("r0", (source,), 16),)),
        se.LoadEnded(held, True),
        se.Written(
            held,
            0,
            (se.SaveSpec("s", (target,), (16,)),),
            (se.ReadSpec(read, "tcp://d:1", 16, (7,), (target,)),),
        ),
        se.Computed(held),
    )
    node.handle(ev.ClaimCame("kvd#d", held, read, 5), ev.EndCame("kvd#d", held, read, True))
    node.slot_events(who, se.SaveEnded(held, "s", True))
    return node, held


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (
            "slot2",
            ["acquired", "written", "computed", "read_claimed", "read_ended", "save_ended"],
        ),
        ("t1", ["written", "computed", "read_claimed", "read_ended"]),
        ("r0", ["acquired"]),
        ("e0/r1", ["reserved"]),
        ("block1", ["reserved", "written"]),
        ("block0", ["reserved", "written", "written", "commit_item", "acquired"]),
    ],
)
def test_names_that_a_transition_concerns_find_it(wanted: str, told: list[str]) -> None:
    node, _ = story_node()
    assert events(node, wanted) == told


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("block0", ["step_opened", "acquired", "whole_tenancy"]),
        ("block1", ["reserved", "step_opened", "written", "whole_tenancy"]),
        ("r1", ["reserved", "step_opened"]),
        ("r0", ["step_opened", "acquired", "whole_tenancy"]),
        ("step 12", ["step_opened", "acquired", "whole_tenancy"]),
        ("step 13 of e0/w0#1f", ["step_opened", "written", "whole_tenancy", "step_closed"]),
        ("e0/w0#1f", ["step_opened", "acquired", "written", "whole_tenancy", "step_closed"]),
    ],
)
def test_a_step_is_in_the_story_of_what_it_keeps(wanted: str, told: list[str]) -> None:
    node = FakeNode()
    who = node.join()
    (source,) = node.fill(who, "first", 1)
    node.handle(ev.LookedUp(1, who, "r0", source.to_bytes(32)))
    (target,) = node.reserve(who, "r1", 1)
    node.load_in_step(who, 12, "r0", source)
    node.save_in_step(who, 13, target)
    node.slot_events(who, Used(SlotRef(who, 2, 0), 1, DID_MAX, 12, 13, "s"))
    node.slot_events(who, se.StepClosed(who, 13))
    assert events(node, wanted, len(told)) == told


def test_the_number_of_a_step_is_not_taken_for_a_request() -> None:
    node = FakeNode()
    who = node.join()
    node.slot_events(who, se.StepOpened(who, 12))
    with pytest.raises(KvdError):
        run_now(story_page(node, "12", 10))


def test_one_tenancy_is_found_without_the_next() -> None:
    node, held = story_node()
    node.hold(held.member, 2)
    assert len(events(node, str(held))) == 6
    assert events(node, str(held._replace(epoch=1))) == ["acquired"]


def test_the_question_about_a_read_is_in_the_story_of_its_transfer() -> None:
    node = FakeNode()
    who = node.join()
    held = node.offer(who, 1, "t9")
    read = ReadId("t9", 0, 0, 0)
    node.handle(ev.ClaimCame("kvd#d", held, read, 1))
    node.pass_time(node.settings.timing.read / SECOND)
    node.handle(ev.ReadAnswered("kvd#d", "tcp://d:1", held, read, Truth.ENDED_FAILED))
    page = run_now(story_page(node, "t9", 100))
    told = [(entry.event, entry.outcome) for entry in page.entries]
    assert ("ticked", "ask_truth kind=read owner=t9/L0+0.0 executor=kvd#d") in told
    assert page.entries[-1].event == "answered"
    assert "offer_read read=t9/L0+0.1" in page.entries[-1].outcome


def test_the_latest_are_told_and_the_rest_is_counted() -> None:
    node = FakeNode()
    who = node.join()
    for _ in range(500):
        node.slot_events(who, se.Computed(SlotRef(who, 0, node.epoch(who, 0))))
    page = run_now(story_page(node, "slot0", 3))
    assert len(page.entries) == 3
    assert page.matched == 500
    assert page.searched == 501
    assert page.entries[-1].subject.endswith("slot0@499")
    assert "497 earlier ones" in story_text_of(page)


def test_forgotten_transitions_are_counted() -> None:
    node = FakeNode(settings=Settings(pool_bytes=1 << 20, limits=Limits(story_entries=2)))
    who = node.join()
    for _ in range(5):
        node.slot_events(who, se.Computed(SlotRef(who, 0, node.epoch(who, 0))))
    page = run_now(story_page(node, "slot0", 10))
    assert (page.matched, page.dropped) == (2, 4)


def test_a_transition_with_very_many_names_is_told_once() -> None:
    node = FakeNode(settings=Settings(pool_bytes=4096 * 3000))
    node.reserve(node.join(), "wide", 3000)
    for wanted in ("wide", "block0", "block2999"):
        page = run_now(story_page(node, wanted, 10))
        assert (len(page.entries), page.matched) == (1, 1)
    assert page.entries[0].subject == "e0/wide block0 block1 block2 +2997"


def test_work_on_a_wide_transition_pauses() -> None:
    node = FakeNode(settings=Settings(pool_bytes=4096 * 3000))
    node.reserve(node.join(), "wide", 3000)
    work = story_page(node, "wide", 10)
    assert sum(1 for _ in work) > 10


def test_text_has_one_line_for_each_transition() -> None:
    node, _ = story_node()
    node.time += 1_500_000_000
    text = story_text_of(run_now(story_page(node, "t1", 100)))
    assert text.splitlines() == [
        "      -1.500 s  e0/w0#1f/slot2@0  written  layer=0 saves=[s] reads=[t1/L0+0.0]"
        "  -> offer_read read=t1/L0+0.0",
        "      -1.500 s  e0/w0#1f/slot2@0  computed  ok=true"
        "  -> save s running; read t1/L0+0.0 offered",
        "      -1.500 s  e0/w0#1f/slot2@0  read_claimed  read=t1/L0+0.0 executor=kvd#d claim=5"
        "  -> grant_read read=t1/L0+0.0 executor=kvd#d claim=5",
        "      -1.500 s  e0/w0#1f/slot2@0  read_ended  read=t1/L0+0.0 executor=kvd#d ok=true"
        "  -> finish_read read=t1/L0+0.0",
    ]


# Text ---------------------------------------------------------------------------------------------


def test_names_of_clients_cannot_break_a_line() -> None:
    node = FakeNode()
    node.reserve(node.join(), "evil\nname\x1b[31m", 1)
    (entry,) = run_now(story_page(node, "block0", 10)).entries
    for text in (entry.subject, entry.details, entry.outcome):
        assert text.isprintable()
    assert "evil?name?[31m" in entry.subject


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"\x01\x02", "0102"),
        (b"\xff" * 32, "ffffffffffffffff..."),
        (True, "true"),
        ((), "[]"),
        ((1, 2, 3, 4), "[1,2,3,4]"),
        (tuple(range(1000)), "[0,1,2,3,...]"),
        (Truth.ENDED_OK, "ended_ok"),
        (KvdError("pool_full"), "pool_full"),
        (ref(), "e0/w0#1f"),
        (se.LoadSpec("r1", (1,), 16), "r1"),
        (ev.CommitItem(3, b"\x01" * 8, 16), "commit_item(block=3 block_hash=0101010101010101 tok"),
    ],
)
def test_values_are_told_in_short(value: object, text: str) -> None:
    assert story_text.short(value).startswith(text)


def test_long_texts_are_cut() -> None:
    assert len(story_text.line("x" * 10_000)) == 400


def test_an_event_is_named_after_its_type_or_its_text() -> None:
    held = SlotRef(ref(), 0, 0)
    assert story_text.event_name(se.ReadClaimed(held, ReadId("t", 0, 0, 0), "x")) == "read_claimed"
    assert story_text.event_name("lease ended") == "lease_ended"


@pytest.mark.parametrize("named", ["r1", ""])
def test_the_commit_of_a_block_is_told_about_its_request(named: str) -> None:
    """Whether the engine names the request or not; a refused commit is told, too."""
    node = FakeNode()
    who = node.join()
    (block,) = node.reserve(who, "r1", 1)
    (other,) = node.reserve(who, "r2", 1)
    item = ev.CommitItem(block, block.to_bytes(32), 16, named)
    node.handle(ev.Committed(4, who, (item, ev.CommitItem(other, b"short", 16, named))))
    told = [(entry.event, entry.outcome) for entry in run_now(story_page(node, "r1", 10)).entries]
    refused = [("commit_item", "frame_malformed")] if named else []
    assert told == [("reserved", "reserved"), ("commit_item", "committed"), *refused]
    for wanted in (f"block{block}", "e0"):
        assert "commit_item" in events(node, wanted)


def test_a_commit_of_what_is_gone_is_told_about_the_request_that_it_names() -> None:
    node = FakeNode()
    who = node.join()
    node.reserve(who, "r1", 1)
    item = ev.CommitItem(3, bytes(32), 16, "late")
    node.handle(ev.Committed(4, who, (item,)))
    (entry,) = run_now(story_page(node, "late", 10)).entries
    assert entry.outcome == "block_not_reserved"
