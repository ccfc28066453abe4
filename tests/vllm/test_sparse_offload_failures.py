"""What goes wrong with sparse decode offload: it ends the requests concerned, and no others."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from engine_shim.testing import Fail, Rule
from engine_shim.vllm.messages import SparseOrder
from engine_shim.vllm.sparse_worker import SparseWorker
from tests.vllm import tamper
from tests.vllm.engines import Answer, Engine, assert_same, prompt
from tests.vllm.sparse_node import HOW, SparseNode, scheduler_of, told, worker_of

NEW_TOKENS: Final = 12
MODEL: Final = "deepseek_v32"
DECODES_AT: Final = 6
"""A step in which all requests decode."""


def asked() -> list[list[int]]:
    """Three requests that decode together."""
    return [prompt(37, 300), prompt(38, 200), prompt(39, 90)]


@pytest.fixture(scope="module")
def node() -> Iterator[SparseNode]:
    with SparseNode() as node:
        yield node


@pytest.fixture(scope="module")
def stock() -> list[Answer]:
    with Engine(MODEL, **HOW) as engine:
        return engine.generate(asked(), NEW_TOKENS)


def at_step(
    patch: pytest.MonkeyPatch, number: int, call: Callable[[SparseWorker, SparseOrder], None]
) -> None:
    """Do something right before a step, after its blocks are noted; counts from 1."""
    begin, seen = SparseWorker.begin, [0]

    def watched(worker: SparseWorker, order: SparseOrder, forward_context: Any) -> None:
        begin(worker, order, forward_context)
        seen[0] += 1
        if seen[0] == number:
            call(worker, order)

    patch.setattr(SparseWorker, "begin", watched)


def lose_rows(worker: SparseWorker, order: SparseOrder) -> None:
    """Forget that the first request's rows of a layer were written, as if nobody had."""
    share = worker.store.shares[0]
    worker.store.hot._requests[share.handle.epoch].written._ends[3] = 5  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_row_that_was_never_written_is_an_error_of_its_request(
    policy: str, stock: list[Answer], node: SparseNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = node.sparse(policy=policy)
    with Engine(MODEL, kv_transfer_config=transfer, **HOW) as engine:
        at_step(monkeypatch, DECODES_AT, lose_rows)
        got = engine.generate(asked(), NEW_TOKENS)
        assert told(node, engine)["hot_holes"] == 1
        check(got, stock, policy)
        assert_same(engine.generate(asked(), NEW_TOKENS), stock, 4)


def check(got: list[Answer], stock: list[Answer], policy: str) -> None:
    """One answer is an error, or was computed again; the others are as ever."""
    failed = [answer for answer in got if answer.finish == "error"]
    if policy == "fail":
        assert len(failed) == 1
        kept = [at for at, answer in enumerate(got) if answer.finish != "error"]
        assert_same([got[at] for at in kept], [stock[at] for at in kept])
    else:
        assert not failed
        assert_same(got, stock, 4)  # what is computed again goes in other chunks


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_load_that_fails_is_an_error_of_its_request(
    policy: str, stock: list[Answer], node: SparseNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper.faulty_device(monkeypatch, [Rule(Fail(), stream="hot", kind="copy", nth=20)])
    with Engine(MODEL, kv_transfer_config=node.sparse(policy=policy), **HOW) as engine:
        got = engine.generate(asked(), NEW_TOKENS)
        assert told(node, engine)["hot_load_failures"] == 1
        check(got, stock, policy)
        assert_same(engine.generate(asked(), NEW_TOKENS), stock, 4)


def test_debugging_finds_a_row_that_differs_and_shows_the_node_degraded(
    stock: list[Answer], node: SparseNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(worker: SparseWorker, order: SparseOrder) -> None:
        share = worker.store.shares[1]
        worker.store._region[2, share.table[0] * 128 : share.table[0] * 128 + 128] += 0.5

    transfer = node.sparse(role="kv_both", keep_device_kv_cache=True)
    with Engine(MODEL, kv_transfer_config=transfer, **HOW) as engine:
        _, status = node.get("/v1/status")
        assert [reason["code"] for reason in status["degraded"]] == ["debug_engine"]
        assert_same(engine.generate(asked(), NEW_TOKENS), stock)
        at_step(monkeypatch, DECODES_AT, spoil)
        other = [prompt(70, 250), prompt(71, 260), prompt(72, 60)]
        got = engine.generate(other, NEW_TOKENS)
        assert sorted(str(answer.finish) for answer in got) == ["error", "length", "length"]
    _, status = node.get("/v1/status")
    assert status["degraded"] == []


def test_an_engine_goes_on_while_kvd_is_away_and_after_it_is_back(
    stock: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with SparseNode() as node:
        transfer = node.sparse()
        with Engine(MODEL, kv_transfer_config=transfer, **HOW) as engine:

            def kill(worker: SparseWorker, order: SparseOrder) -> None:
                node.stop(signal.SIGKILL)

            at_step(monkeypatch, DECODES_AT, kill)
            assert_same(engine.generate(asked(), NEW_TOKENS), stock)
            assert_same(engine.generate(asked(), NEW_TOKENS), stock, 4)
            node.start()
            # Until both know it, requests that run end when they do: the region is lost.
            for client in (worker_of(engine).client, scheduler_of(engine)._client):
                client.wait_attached(30.0)
            assert_same(engine.generate(asked(), NEW_TOKENS), stock, 4)
