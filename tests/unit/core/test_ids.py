"""Names: what they print as, and that near ones differ."""

from __future__ import annotations

import pytest

from kvd.core.ids import (
    LoadId,
    MemberRef,
    ReadId,
    RequestKey,
    SaveId,
    SlotRef,
    kvd_executor,
    member_executor,
)

MEMBER = MemberRef("p0", "worker1", 0xAB)
REF = SlotRef(MEMBER, 3, 17)
READ = ReadId("t-1", 5, 128, 0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (MEMBER, "p0/worker1#ab"),
        (REF, "p0/worker1#ab/slot3@17"),
        (READ, "t-1/L5+128.0"),
        (READ.next_attempt(), "t-1/L5+128.1"),
        (RequestKey("p0", "r7"), "p0/r7"),
        (LoadId(REF), "load p0/worker1#ab/slot3@17"),
        (SaveId(REF, "main"), "save p0/worker1#ab/slot3@17 by main"),
    ],
)
def test_name_prints_all_that_tells_it_apart(name: object, text: str) -> None:
    assert str(name) == text


def test_next_attempt_is_another_name_for_the_same_rows() -> None:
    again = READ.next_attempt()
    assert again != READ
    assert again[:3] == READ[:3]
    assert READ.attempt == 0


def test_pins_of_different_sorts_are_never_equal() -> None:
    """A set of pins mixes requests, loads and reads: tuples of equal parts would be one pin."""
    pins = {RequestKey("a", "b"), LoadId(REF), ReadId("a", 0, 0, 0), LoadId(REF, part=1)}
    assert len(pins) == 4


def test_processes_of_two_lives_have_two_names() -> None:
    assert member_executor(MEMBER) == "p0/worker1#ab"
    assert member_executor(MEMBER._replace(incarnation=0xAC)) != member_executor(MEMBER)
    assert kvd_executor("b1") == "kvd#b1"
    assert kvd_executor("b1") != kvd_executor("b2")
