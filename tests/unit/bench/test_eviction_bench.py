"""The bench of eviction policies: its traces, its pool, and its bound."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise

import pytest

from bench.eviction_replay import RUNNING, ReplayPool, best_possible, digest_of
from bench.eviction_traces import Request, traces
from kvd.core.block_types import BlockShape
from kvd.core.blocks import BlockTable
from kvd.core.evictions import make_policy
from kvd.core.ids import MemberRef, RequestKey, SaveId, SlotRef
from kvd.store.dict_index import DictIndex


def test_traces_are_the_same_every_time_and_share_only_prefixes() -> None:
    made = traces(120)
    assert made == traces(120)
    for name, requests in made.items():
        assert len(requests) == 120
        before: dict[int, int] = {}
        for request in requests:
            assert len(set(request)) == len(request), name
            for first, second in pairwise(request):
                assert before.setdefault(second, first) == first, "a block has one predecessor"


@pytest.mark.parametrize("seed", range(40))
def test_best_possible_is_the_best_of_all_choices(seed: int) -> None:
    rng = random.Random(seed)
    asks = tuple(rng.randrange(5) for _ in range(9))
    total = 2

    @cache
    def most(at: int, kept: frozenset[int]) -> int:
        """Hits from here on: after each ask any part of what is there and the new may stay."""
        if at == len(asks):
            return 0
        there = kept | {asks[at]}
        choices = [there] if len(there) <= total else [there - {gone} for gone in there]
        return (asks[at] in kept) + max(most(at + 1, choice) for choice in choices)

    found = best_possible(total, [(key,) for key in asks])
    assert found * len(asks) == pytest.approx(most(0, frozenset()))


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_no_policy_finds_more_than_the_best_possible(policy: str) -> None:
    for name, trace in traces(150).items():
        found = ReplayPool(400, make_policy(policy, 400)).replay(trace)
        assert found <= best_possible(400, trace), name


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("name", ["prompts", "chat", "mix"])
def test_the_bench_finds_what_the_block_table_finds(policy: str, name: str) -> None:
    """The replay is a short form of the table; on every trace they evict alike."""
    trace = [request[:300] for request in traces(150)[name]]
    total = 1500
    hits = ReplayPool(total, make_policy(policy, total))
    hits.replay(trace)
    assert hits.hits == table_hits(trace, total, policy) > 0


def table_hits(trace: list[Request], total: int, policy: str) -> int:
    """The same trace through the block table that kvd has."""
    table = BlockTable(total, BlockShape(1, 1), DictIndex(), make_policy(policy, total))
    running: list[tuple[RequestKey, list[int]]] = []
    found_in_all = 0

    def end(owner: RequestKey, blocks: list[int]) -> None:
        for block in reversed(blocks):
            table.abandon(block, owner, 0, 1)

    for number, request in enumerate(trace):
        if len(running) == RUNNING:
            end(*running.pop(0))
        owner = RequestKey("e", str(number))
        found = table.index.prefix(0, b"".join(map(digest_of, request)))
        found_in_all += len(found)
        table.pin_all(found, owner)
        table.policy.found(found)
        taken = table.reserve(owner, len(request) - len(found))
        save = SaveId(SlotRef(MemberRef("e", "m", 1), 0, number), "s")
        table.begin_save(save, 0, 0, tuple(taken), (1,) * len(taken))
        table.end_save(save, True)
        for block, key in zip(taken, request[len(found) :], strict=True):
            table.commit("e", block, (0, digest_of(key)), 1)
        running.append((owner, found + taken))
    return found_in_all
