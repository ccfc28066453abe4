"""kvd is killed under an engine with a decode region, and comes back with or without the region."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Final

import pytest

from engine_shim.vllm.messages import SparseOrder
from engine_shim.vllm.sparse_worker import SparseWorker
from tests.vllm.engines import Answer, Engine, assert_same, prompt
from tests.vllm.sparse_node import HOW, SparseNode, scheduler_of, told, worker_of
from tests.vllm.test_sparse_offload_failures import DECODES_AT, at_step

NEW_TOKENS: Final = 12
MODEL: Final = "glm_moe_dsa"
BACK_S: Final = 30.0
POOL_OWNERS: Final = ("pool.owner=holder", "pool.hold_ttl=10s")


def asked() -> list[list[int]]:
    """Three requests that decode together; two blocks of the first are a prefix to be found."""
    return [prompt(37, 300), prompt(38, 200), prompt(39, 90)]


@pytest.fixture(scope="module")
def stock() -> list[Answer]:
    with Engine(MODEL, **HOW) as engine:
        return engine.generate(asked(), NEW_TOKENS)


def restart(node: SparseNode, engine: Engine, before: Callable[[], None] = lambda: None) -> None:
    """kill -9 of kvd, `before`, another kvd; returns when both sides of the engine know it."""
    clients = (worker_of(engine).client, scheduler_of(engine)._client)
    known = [client.generation for client in clients]
    node.stop(signal.SIGKILL)
    before()
    node.start()
    end = time.monotonic() + BACK_S
    for client, generation in zip(clients, known, strict=True):
        while client.wait_attached(end - time.monotonic()) == generation:
            assert time.monotonic() < end, f"{client.identity} does not see the other kvd"


def is_sound(node: SparseNode, engine: Engine, lives: int) -> None:
    """The region is counted by kvd, it was made so often, and nobody keeps a hot buffer."""
    engine.generate([prompt(44, 1)], 1)  # who has ended gives its buffer back with the next step
    engine.generate([prompt(45, 1)], 1)
    seen = told(node, engine)
    assert (seen["region_lives"], seen["hot_holes"], seen["hot_load_failures"]) == (lives, 0, 0)
    assert seen["hot_free"] >= 3
    assert worker_of(engine).store.hot.check() == []
    (about,) = (one for one in node.engines() if one["members"])
    assert len(about["regions"]) == 1
    assert worker_of(engine).client.statistics().mappings_retired == 0, "the lost one is unmapped"


@pytest.mark.parametrize(("at", "begun"), [(1, 1), (2, 3), (DECODES_AT, 3)])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_region_that_is_lost_is_made_anew_and_no_row_of_the_old_one_is_read(
    policy: str, at: int, begun: int, stock: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In step `at` so many requests have begun: the first has two chunks."""
    with SparseNode() as node:
        transfer = node.sparse(policy=policy)
        with Engine(MODEL, kv_transfer_config=transfer, **HOW) as engine:

            def kill(worker: SparseWorker, order: SparseOrder) -> None:
                restart(node, engine)

            at_step(monkeypatch, at, kill)
            got = engine.generate(asked(), NEW_TOKENS)
            if policy == "fail":
                assert [answer.finish for answer in got[:begun]] == ["error"] * begun
                assert_same(got[begun:], stock[begun:], 4)
            else:
                assert_same(got, stock, 4)  # what is computed again goes in other chunks
            again = engine.generate(asked(), NEW_TOKENS)
            assert_same(again, stock, 4)
            assert_same(engine.generate(asked(), NEW_TOKENS), stock, 4)
            is_sound(node, engine, lives=2)


def test_prefixes_of_a_lost_region_are_not_found_by_the_first_request_afterwards(
    stock: list[Answer],
) -> None:
    with SparseNode() as node, Engine(MODEL, kv_transfer_config=node.sparse(), **HOW) as engine:
        for life in (2, 3):
            assert_same(engine.generate(asked(), NEW_TOKENS), stock, 4)
            found = engine.generate(asked(), NEW_TOKENS)
            assert found[0].num_cached > 0
            restart(node, engine)
            first = engine.generate(asked(), NEW_TOKENS)
            assert_same(first, stock, 4)
            assert [answer.num_cached for answer in first] == [0, 0, 0]
            is_sound(node, engine, lives=life)


@pytest.mark.parametrize("holder_dies", [False, True])
def test_what_the_holder_kept_serves_on_and_what_died_with_it_does_not(
    holder_dies: bool, stock: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        SparseNode(*POOL_OWNERS) as node,
        Engine(MODEL, kv_transfer_config=node.sparse(), **HOW) as engine,
    ):

        def kill(worker: SparseWorker, order: SparseOrder) -> None:
            restart(node, engine, node.kill_holder if holder_dies else lambda: None)

        at_step(monkeypatch, DECODES_AT, kill)
        got = engine.generate(asked(), NEW_TOKENS)
        if holder_dies:
            assert [answer.finish for answer in got] == ["error"] * 3
        else:
            assert_same(got, stock)
        assert_same(engine.generate(asked(), NEW_TOKENS), stock, 4)
        is_sound(node, engine, lives=1 + holder_dies)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_kvd_without_room_for_the_region_ends_requests_by_the_deadline(
    policy: str, stock: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline_s = 3.0
    with SparseNode() as node:
        transfer = node.sparse(policy=policy, deadline_s=deadline_s)
        with Engine(MODEL, kv_transfer_config=transfer, **HOW) as engine:

            def shrink(worker: SparseWorker, order: SparseOrder) -> None:
                node.set("regions.size_max=4MiB")
                restart(node, engine)

            at_step(monkeypatch, DECODES_AT, shrink)
            assert {one.finish for one in engine.generate(asked(), NEW_TOKENS)} == {"error"}
            began = time.monotonic()
            assert {one.finish for one in engine.generate(asked(), NEW_TOKENS)} == {"error"}
            assert deadline_s <= time.monotonic() - began < 3 * deadline_s
            node.set("regions.size_max=1GiB")
            restart(node, engine)
            assert_same(engine.generate(asked(), NEW_TOKENS), stock, 4)
            is_sound(node, engine, lives=3)
