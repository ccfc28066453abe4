"""The check of the books in the status: bounded cost, reused, and honest about its scope."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from kvd.core.state import Settings
from kvd.server import invariants
from kvd.server.invariants import InvariantWatch, estimate_ns
from tests.unit.server.fake_node import FakeNode


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.ns = 10**9

    def __call__(self) -> int:
        return self.ns


def costing(ns: int) -> Callable[[], int]:
    """A CPU clock by which each check takes so long."""
    ticks = itertools.cycle((0, ns))
    return lambda: next(ticks)


def broken(node: FakeNode) -> None:
    pool = node.state().pool
    assert pool is not None
    pool.blocks.free.pop()


def test_a_contradiction_is_found_by_both_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode()
    node.join()
    broken(node)
    full = InvariantWatch().result(node.state())
    assert (full.scope, full.ok) == ("full", False)
    monkeypatch.setattr(invariants, "FULL_NS_MAX", 0)
    totals = InvariantWatch().result(node.state())
    assert (totals.scope, totals.ok) == ("totals", False)
    assert totals.problems == ("256 blocks are reset, 255 are free",)


@pytest.mark.parametrize(
    "harm",
    [
        lambda table: table.counts.__setitem__(0, -1),
        lambda table: table.counts.__setitem__(2, 5),
        lambda table: table.index.remove(*table.columns.key(0)),
        lambda table: table.index.clear(),
    ],
)
def test_totals_see_what_they_can(
    harm: Callable[[object], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariants, "FULL_NS_MAX", 0)
    node = FakeNode()
    node.fill(node.join(), "r", 3)
    assert InvariantWatch().result(node.state()).ok
    pool = node.state().pool
    assert pool is not None
    harm(pool.blocks)
    assert not InvariantWatch().result(node.state()).ok


def test_large_books_are_not_checked_in_full() -> None:
    node = FakeNode(settings=Settings(pool_bytes=4096 * 100_000))
    node.join()
    assert estimate_ns(node.state()) > invariants.FULL_NS_MAX
    assert InvariantWatch().result(node.state()).scope == "totals"


def test_an_empty_node_is_checked_in_full() -> None:
    checked = InvariantWatch().result(FakeNode().state())
    assert (checked.scope, checked.ok) == ("full", True)


def test_a_result_is_reused_for_twenty_times_its_cost() -> None:
    node = FakeNode()
    node.join()
    clock = Clock()
    watch = InvariantWatch(clock, costing(1_000_000))
    assert watch.result(node.state()).ok
    broken(node)
    clock.ns += 19_999_999
    assert watch.result(node.state()).ok
    assert watch.age_ns(watch.result(node.state())) == 19_999_999
    clock.ns += 1
    assert not watch.result(node.state()).ok


def test_at_most_twenty_problems_are_told() -> None:
    node = FakeNode()
    who = node.join()
    node.reserve(who, "r", 50)
    node.state().engines["e0"].requests.clear()
    assert len(InvariantWatch().result(node.state()).problems) == 20
