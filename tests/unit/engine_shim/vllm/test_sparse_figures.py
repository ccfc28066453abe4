"""What a rank tells kvd of its hot buffers: bounded, and the requests that miss most."""

from __future__ import annotations

from engine_shim.hot import GroupFigures, HotFigures, HotStatistics
from engine_shim.vllm.sparse_figures import after, figures_of, layers_of, requests_of
from kvd.wire.hot_figures import REQUESTS_MAX, LayerFigures
from tests.unit.engine_shim.vllm.test_sparse_plan import planner

PLAN = planner(0, 2).plan(1 << 20)


def group(misses: int, *, scratch: int = 0, waited: int = 0, copied: int = 1000) -> GroupFigures:
    """Two steps of which one was timed."""
    rows = HotStatistics(selected=100, merged=4, hits=50, misses=misses, scratch=scratch)
    return GroupFigures(rows, 2, 1, managed_ns=3000, waited_ns=waited, copied_ns=copied)


def test_a_layer_is_the_one_with_the_indexer() -> None:
    assert PLAN.groups == ((0, 1), (2, 3))
    assert layers_of(PLAN, [group(7, waited=250), group(0, scratch=2)]) == [
        LayerFigures(0, 50, 7, 4, 3.0, 0.75),
        LayerFigures(2, 50, 2, 4, 3.0, 1.0),
    ]
    assert layers_of(PLAN, [group(0, copied=0)] * 2)[0].overlap is None, "nothing was timed"


def test_requests_are_those_with_the_most_misses() -> None:
    groups = {f"r{at}": (group(at), group(0, scratch=at, waited=500)) for at in range(20)}
    told = requests_of(PLAN, groups.items())
    assert [one.request for one in told] == [f"r{at}" for at in range(19, 19 - REQUESTS_MAX, -1)]
    assert (told[0].steps, told[0].hits, told[0].misses, told[0].merged) == (2, 100, 38, 8)
    assert (told[0].managed_us, told[0].overlap) == (6.0, 0.75), "of all layers together"
    assert [layer.overlap for layer in told[0].layers] == [1.0, 0.5]
    assert requests_of(PLAN, []) == []


def test_a_long_name_is_cut_as_kvd_takes_it() -> None:
    (told,) = requests_of(PLAN, [("r" * 300, (group(1), group(2)))])
    assert told.request == "r" * 256


def test_counts_go_on_when_hot_buffers_were_given_up() -> None:
    first = HotFigures(HotStatistics(hits=3), 2, 1, 4, 5, (group(1), group(2)))
    second = HotFigures(HotStatistics(hits=8), 1, 0, 1, 1, (group(10), group(20)))
    both = after(first, second)
    assert after(None, second) is second
    assert (both.rows.hits, both.free, both.parked) == (11, 1, 0)
    assert (both.load_failures, both.holes) == (5, 6)
    assert [one.rows.misses for one in both.groups] == [11, 22]
    assert [one.steps for one in both.groups] == [4, 4]
    named = figures_of(PLAN, both, lives=2)
    assert (named["region_lives"], named["keeps_device_kv"], named["hot_hits"]) == (2, 0, 11)
    assert len(named) <= 64, "kvd shows no more of a member"
