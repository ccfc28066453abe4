"""The rules themselves: each of them can be broken, and says so."""

from __future__ import annotations

import pytest

from kvd.core.copies import GATE_FREE, GATE_HELD
from kvd.core.ids import MemberRef
from tests.sim.clock import Clock
from tests.sim.content import Document, describe
from tests.sim.memory import (
    TORN,
    Area,
    Copy,
    Dma,
    Piece,
    Violation,
    area,
    free,
    must_be_quiet,
    write,
)
from tests.sim.oracle import Handles, Oracle

MEMBER = MemberRef("p", "worker0", 1)
DOCUMENT = Document(2, 1, 5)


def copy_of(source: Area, target: Area, count: int = 2, at: int = 0) -> Copy:
    return Copy(f"copy to {target.name}", "me", (Piece(source, at, target, at, count),))


def test_write_under_a_copy_is_seen() -> None:
    dma, source, target = Dma(), area("source", 4), area("target", 4)
    dma.start(copy_of(source, target))
    with pytest.raises(Violation, match="no write under a copy: somebody writes source"):
        write(source, 0, (5,), False, "somebody")
    with pytest.raises(Violation, match="no write under a copy"):
        write(source, 3, (5,), True, "somebody")
    write(source, 3, (5,), False, "somebody")
    assert source.rows == [0, 0, 0, 5]


def test_two_copies_meet() -> None:
    dma, source, target = Dma(), area("source", 4), area("target", 4)
    dma.start(copy_of(source, target))
    dma.start(copy_of(source, area("elsewhere", 4)))
    dma.start(copy_of(area("other", 4), target, at=2))
    with pytest.raises(Violation, match="both ends: copy to target meets copy to target"):
        dma.start(copy_of(area("other", 4), target, at=1))


def test_source_that_changed_is_seen() -> None:
    dma, source, target = Dma(), area("source", 2), area("target", 2)
    source.rows = [3, 4]
    copy = copy_of(source, target)
    dma.start(copy)
    assert target.rows == [TORN, TORN]
    source.rows = [3, 5]
    with pytest.raises(Violation, match="one content: copy to target: source changed"):
        dma.end(copy, True)


def test_copy_that_failed_or_stopped_leaves_torn_rows() -> None:
    dma, source, target = Dma(), area("source", 2), area("target", 2)
    source.rows = [3, 4]
    copy = copy_of(source, target)
    dma.start(copy)
    dma.end(copy, False)
    assert target.rows == [TORN, TORN]
    copy = copy_of(source, target)
    dma.start(copy)
    dma.stop_all("me")
    assert (target.rows, copy.live, dma.live) == ([TORN, TORN], False, {})
    copy = copy_of(source, target)
    dma.start(copy)
    dma.end(copy, True)
    assert target.rows == [3, 4]


def test_memory_is_freed_only_when_quiet() -> None:
    dma, source, target = Dma(), area("source", 2), area("target", 2)
    copy = copy_of(source, target)
    dma.start(copy)
    with pytest.raises(Violation, match="memory kept: kvd: copy to target still touches target"):
        free(target, "kvd")
    with pytest.raises(Violation, match="block reserved: kvd"):
        must_be_quiet(source, "block reserved", "kvd")
    dma.end(copy, True)
    free(target, "kvd")
    with pytest.raises(Violation, match="copy to target touches target, which is freed"):
        dma.start(copy_of(source, target))


def test_epochs_rise_by_one() -> None:
    oracle, place = Oracle(1), area("slot", 2)
    oracle.stored(1, MEMBER, (0, 4, GATE_FREE), True, place)
    oracle.acquired(MEMBER, 0, 4, place)
    with pytest.raises(Violation, match="epochs: p/worker0#1 slot 0 acquired twice at epoch 4"):
        oracle.acquired(MEMBER, 0, 4, place)
    with pytest.raises(Violation, match="epochs: p/worker0#1 slot 0: released 4 to 6"):
        oracle.stored(1, MEMBER, (0, 6, GATE_FREE), False, place)
    with pytest.raises(Violation, match="epochs: p/worker0#1 slot 0: 5 is not 4"):
        oracle.stored(1, MEMBER, (0, 5, GATE_HELD), False, place)
    oracle.stored(1, MEMBER, (0, 5, GATE_FREE), False, place)
    with pytest.raises(Violation, match="epochs: p/worker0#1 slot 0: released 5 to 5"):
        oracle.stored(1, MEMBER, (0, 5, GATE_FREE), False, place)


@pytest.mark.parametrize(("epoch", "state"), [(3, GATE_HELD), (4, GATE_FREE), (0, GATE_FREE)])
def test_new_kvd_begins_after_what_was_acquired(epoch: int, state: int) -> None:
    oracle, place = Oracle(1), area("slot", 2)
    oracle.acquired(MEMBER, 0, 4, place)
    with pytest.raises(Violation, match=f"begins {epoch} after 4"):
        oracle.stored(2, MEMBER, (0, epoch, state), True, place)


def test_release_under_a_copy_is_seen() -> None:
    oracle, dma, place = Oracle(1), Dma(), area("slot", 2)
    oracle.stored(1, MEMBER, (0, 0, GATE_FREE), True, place)
    dma.start(copy_of(place, area("target", 2)))
    with pytest.raises(Violation, match="release: slot freed at 1 under copy to target"):
        oracle.stored(1, MEMBER, (0, 1, GATE_FREE), False, place)
    with pytest.raises(Violation, match="release: slot acquired at 1 under copy to target"):
        oracle.acquired(MEMBER, 0, 1, place)


def test_wrong_rows_are_named() -> None:
    oracle, place = Oracle(1), area("span", 3)
    place.rows = [DOCUMENT.tag(4, 1, 0), DOCUMENT.tag(6, 1, 0), TORN]
    rows = (DOCUMENT, 4, 6)
    right = "not stem 129 row 5 layer 1 shard 0"
    with pytest.raises(Violation, match=f"load: me: row 5 in span is stem 129 row 6 .*{right}"):
        oracle.rows_are(place, 0, rows, 1, 0, "load", "me")
    place.rows[1] = DOCUMENT.tag(5, 1, 0)
    oracle.rows_are(place, 0, rows, 1, 0, "load", "me")
    with pytest.raises(Violation, match="row 6 in span is torn"):
        oracle.rows_are(place, 0, (DOCUMENT, 4, 7), 1, 0, "load", "me")


def test_hit_of_other_bytes_is_seen() -> None:
    oracle = Oracle(1)
    block_hash = oracle.name_block(DOCUMENT, 0, 2)
    spans = [area("layer 0", 2), area("layer 1", 2)]
    for layer, place in enumerate(spans):
        place.rows = DOCUMENT.tags(0, 2, layer, 0)
    oracle.hit_is_right([spans], block_hash, "r1")
    spans[1].rows = DOCUMENT.tags(0, 2, 0, 0)
    with pytest.raises(Violation, match="hit: r1: row 0 in layer 1 is stem 128 row 0 layer 0"):
        oracle.hit_is_right([spans], block_hash, "r1")


def test_each_handle_is_answered_once() -> None:
    handles = Handles("p")
    handle = handles.new("LookedUp")
    assert handles.open == ["LookedUp"]
    with pytest.raises(Violation, match="one answer: p: handle 9 is not open"):
        handles.answered(9)
    handles.answered(handle)
    with pytest.raises(Violation, match="one answer"):
        handles.answered(handle)
    assert handles.open == []


def test_contents_are_told_apart() -> None:
    other = Document(2, 3, 5)
    assert DOCUMENT.tag(4, 0, 0) == other.tag(4, 0, 0)
    assert DOCUMENT.tag(5, 0, 0) != other.tag(5, 0, 0)
    tags = {
        DOCUMENT.tag(row, layer, shard) for row in (4, 5) for layer in (0, 1) for shard in (0, 1)
    }
    assert len(tags) == 8
    assert DOCUMENT.block_hash(4) == other.block_hash(4)
    assert DOCUMENT.block_hash(6) != other.block_hash(6) != DOCUMENT.block_hash(5)
    assert [describe(0), describe(TORN)] == ["nothing", "torn"]


def test_calls_keep_their_order() -> None:
    clock = Clock()
    made: list[str] = []
    clock.at(5, made.append, "b")
    clock.at(3, made.append, "a")
    clock.at(5, made.append, "c")
    clock.run_until(5)
    assert (made, clock.now) == (["a"], 5)
    clock.run_until(6)
    assert made == ["a", "b", "c"]
