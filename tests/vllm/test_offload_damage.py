"""Bytes that went wrong in the pool: their request is computed again, or ends; no other does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from engine_shim.testing import Fail, Rule
from engine_shim.vllm.messages import StepOrder
from engine_shim.vllm.worker import WorkerSide
from tests.vllm import tamper
from tests.vllm.engines import Answer, Engine, assert_same, prompt
from tests.vllm.node import Node

NEW_TOKENS: Final = 6
HOW: Final = {"max_num_batched_tokens": 512}
MODES: Final = ("rolling", "resident")


def asked() -> list[list[int]]:
    """Two requests; the first one's blocks get damaged."""
    return [prompt(17, 500), prompt(18, 400)]


@pytest.fixture(scope="module")
def stock() -> list[Answer]:
    with Engine("llama", enable_prefix_caching=False, **HOW) as engine:
        return engine.generate(asked(), NEW_TOKENS)


def damage_first(at: int, layer: int) -> Callable[[WorkerSide, StepOrder], None]:
    """Damage block `at` of the first request when it is loaded for the first time."""
    done: list[str] = []

    def seen(worker: WorkerSide, order: StepOrder) -> None:
        for request in order.requests:
            if request.num_computed == 384 and not done:
                done.append(request.request)
                tamper.damage(worker, request, at, layer)

    return seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("at", "layer"), [(0, 0), (2, 5)])
def test_damaged_blocks_are_noticed_and_computed_again(
    mode: str, at: int, layer: int, stock: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Node() as node:
        how = node.rolling(3, policy="recompute") | {}
        how["kv_connector_extra_config"] |= {"offload": mode}
        with Engine("llama", kv_transfer_config=how, **HOW) as engine:
            engine.generate(asked(), 1)
        tamper.watch_steps(monkeypatch, damage_first(at, layer))
        with Engine("llama", kv_transfer_config=how, **HOW) as engine:
            assert_same(engine.generate(asked(), NEW_TOKENS), stock)
        assert node.counter("checksum_mismatches") == 1


@pytest.mark.parametrize("mode", MODES)
def test_with_policy_fail_the_owner_ends_with_an_error_and_nobody_else(
    mode: str, stock: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Node() as node:
        how = node.rolling(3)
        how["kv_connector_extra_config"] |= {"offload": mode}
        with Engine("llama", kv_transfer_config=how, **HOW) as engine:
            engine.generate(asked(), 1)
        tamper.watch_steps(monkeypatch, damage_first(1, 3))
        with Engine("llama", kv_transfer_config=how, **HOW) as engine:
            first, second = engine.generate(asked(), NEW_TOKENS)
            assert (first.finish, first.tokens) == ("error", ())
            assert_same([second], stock[1:])
            # The damaged block is gone: who asks again computes it.
            assert_same(engine.generate(asked(), NEW_TOKENS), stock)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("stream", ["save", "load"])
def test_a_copy_that_fails_costs_its_requests_only(
    policy: str, stream: str, stock: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper.faulty_device(monkeypatch, [Rule(Fail(moved=0.5), stream=stream, kind="copy", nth=7)])
    how = {"max_num_batched_tokens": 256}
    with (
        Node() as node,
        Engine("llama", kv_transfer_config=node.rolling(policy=policy), **how) as engine,
    ):
        got = engine.generate(asked(), NEW_TOKENS)
        if policy == "recompute":
            assert_same(got, stock)
        else:
            assert {answer.finish for answer in got} <= {"error", "length"}
            assert "error" in {answer.finish for answer in got}
            whole = [at for at, answer in enumerate(got) if answer.finish == "length"]
            assert_same([got[at] for at in whole], [stock[at] for at in whole])
        assert_same(engine.generate(asked(), NEW_TOKENS), stock)
