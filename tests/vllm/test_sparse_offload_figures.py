"""What kvd shows of decode in a real engine: its indexer layers, and its requests by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from engine_shim.hot_meter import SAMPLED_STEP
from engine_shim.vllm.messages import SparseOrder
from engine_shim.vllm.sparse_worker import SparseWorker
from tests.vllm import models
from tests.vllm.engines import Engine, prompt
from tests.vllm.sparse_node import HOW, SparseNode, told
from tests.vllm.test_sparse_offload_failures import at_step

NEW_TOKENS: Final = 24
LOOK_AT: Final = 20
"""A step in which all requests have decoded often enough to be timed."""
FATES: Final = ("hits", "misses", "merged")


@pytest.fixture
def node() -> Iterator[SparseNode]:
    with SparseNode() as node:
        yield node


def test_requests_are_shown_by_layer_and_layers_in_metrics(
    node: SparseNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = models.model("glm_moe_dsa", index_topk_freq=3)  # indexers in layers 0, 1 and 4
    prompts = [prompt(81, 600), prompt(82, 333), prompt(83, 90)]
    seen: dict[str, Any] = {}

    def look(worker: SparseWorker, order: SparseOrder) -> None:
        worker.tell()
        (engine,) = (one for one in node.engines() if one["members"])
        (seen["worker"],) = (one for one in engine["members"] if one["member"] == "worker0")
        _, status = node.get("/v1/status")
        (seen["engine"],) = status["engines"]
        seen["names"] = [share.request for share in order.shares]
        seen["metrics"] = str(node.get("/metrics")[1])

    with Engine(shared, kv_transfer_config=node.sparse(), **HOW) as engine:
        at_step(monkeypatch, LOOK_AT, look)
        engine.generate(prompts, NEW_TOKENS)
        engine.generate([prompt(84, 1)], 1)
        told(node, engine)
        (last,) = (one for one in node.engines() if one["members"])
    requests, layers = seen["worker"]["hot_requests"], seen["worker"]["hot_layers"]
    assert {one["request"] for one in requests} == set(seen["names"])
    assert len(requests) == len(prompts)
    assert [one["misses"] for one in requests] == sorted(
        (one["misses"] for one in requests), reverse=True
    )
    for one in requests:
        assert [layer["layer"] for layer in one["layers"]] == [0, 1, 4]
        assert one["steps"] > SAMPLED_STEP
        assert 0 < one["managed_seconds"] < 1
        assert one["overlap"] is None or 0 <= one["overlap"] <= 1
        for fate in FATES:
            assert one[fate] == sum(layer[fate] for layer in one["layers"])
    assert any(one["overlap"] is not None for one in requests)
    for at, layer in enumerate(layers):
        for fate in FATES:
            assert layer[fate] == sum(one["layers"][at][fate] for one in requests)
    brief = [one | {"layers": []} for one in requests]
    assert seen["engine"]["hot_requests"] == brief
    for layer in layers:
        sample = f'fate="misses",layer="{layer["layer"]}",member="worker0"}} {layer["misses"]}.0'
        assert sample in seen["metrics"]
    assert not any(name in seen["metrics"] for name in seen["names"])
    left = {one["request"] for member in last["members"] for one in member["hot_requests"]}
    assert not left & set(seen["names"]), "who has ended is not shown"
