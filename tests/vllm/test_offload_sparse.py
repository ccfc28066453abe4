"""Sparse attention (DSA) on rolling buffers: main rows and indexer keys move together."""

from __future__ import annotations

from typing import Final

import pytest

from engine_shim.testing import Delay, Rule
from engine_shim.vllm.messages import StepOrder
from engine_shim.vllm.worker import WorkerSide
from tests.vllm import tamper
from tests.vllm.engines import Engine, assert_same, prompt
from tests.vllm.node import Node

NEW_TOKENS: Final = 6
HOW: Final = {"max_num_batched_tokens": 256}
MS: Final = 1_000_000
LATE: Final = (
    Rule(Delay(3 * MS), stream="save", kind="copy"),
    Rule(Delay(3 * MS), stream="load", kind="copy"),
)


def asked() -> list[list[int]]:
    """Requests of several chunks, longer than what a layer selects."""
    return [prompt(37, 600), prompt(38, 333), prompt(39, 90)]


@pytest.mark.parametrize("model", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_models_say_on_rolling_buffers_what_they_say_without(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(model, enable_prefix_caching=False, **HOW) as engine:
        stock = engine.generate(asked(), NEW_TOKENS)
    tamper.faulty_device(monkeypatch, LATE)
    with Node() as node:
        for buffers in (2, 3):
            transfer = node.rolling(buffers, policy="recompute")
            transfer["kv_connector_extra_config"]["layerwise_independent_layers"] = [0, -1]
            with Engine(model, kv_transfer_config=transfer, **HOW) as engine:
                assert_same(engine.generate(asked(), NEW_TOKENS), stock)
                size = engine.block_tokens
                again = engine.generate(asked(), NEW_TOKENS)
                found = [(len(tokens) - 1) // size * size for tokens in asked()]
                assert [answer.num_cached for answer in again] == found
                assert_same(again, stock)


def test_damaged_indexer_keys_void_their_layer_s_rows_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = "deepseek_v32"
    done: list[str] = []

    def seen(worker: WorkerSide, order: StepOrder) -> None:
        for request in order.requests:
            if request.num_computed == 512 and not done:
                done.append(request.request)
                tamper.damage(worker, request, 1, 2, part=1)

    with Engine(model, enable_prefix_caching=False, **HOW) as engine:
        stock = engine.generate(asked(), NEW_TOKENS)
    with Node() as node:
        transfer = node.rolling(3, policy="recompute")
        with Engine(model, kv_transfer_config=transfer, **HOW) as engine:
            engine.generate(asked(), 1)
            tamper.watch_steps(monkeypatch, seen)
            assert_same(engine.generate(asked(), NEW_TOKENS), stock)
        assert done
        assert node.counter("checksum_mismatches") == 1
