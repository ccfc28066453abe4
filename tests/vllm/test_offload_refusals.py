"""What cannot be meant is refused at start, with key, value and range; the guide's JSON is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from engine_shim.client import KvdRefused
from engine_shim.vllm.errors import OptionError, PlanError, UnsupportedEngine
from tests.vllm.engines import Engine, assert_same, prompt
from tests.vllm.node import Node

ROLLING: Final[dict[str, Any]] = {"offload": "rolling", "layerwise_num_shared_buffers": 3}

WRONG: Final[dict[str, tuple[dict[str, Any], type[Exception], str]]] = {
    "no buffers": (
        {"layerwise_num_shared_buffers": 0},
        OptionError,
        "layerwise_num_shared_buffers is 0; give a whole number from 1 to 1024",
    ),
    "a text": (
        {"layerwise_num_shared_buffers": "3"},
        OptionError,
        "layerwise_num_shared_buffers is '3'; give a whole number",
    ),
    "mistyped": (
        {"layerwise_shared_buffers": 3},
        OptionError,
        "is not known; did you mean layerwise_num_shared_buffers",
    ),
    "said twice": (
        {"layerwise_prefetch_layers": 2, "onload_layer_map": [0] * 6},
        OptionError,
        "give one of them",
    ),
    "layer out of range": (
        {**ROLLING, "layerwise_independent_layers": [0, 6]},
        OptionError,
        r"layerwise_independent_layers: layer 6 is outside \[-6, 5\]",
    ),
    "map too short": (
        {**ROLLING, "onload_layer_map": [0, 1]},
        OptionError,
        "onload_layer_map needs 6 entries",
    ),
    "no such store": (
        {**ROLLING, "backend": "memcache"},
        KvdRefused,
        "asks for store 'memcache', its node has local",
    ),
}


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node() as node:
        yield node


@pytest.mark.parametrize("case", list(WRONG))
def test_wrong_options_are_refused_at_start(case: str, node: Node) -> None:
    extra, kind, text = WRONG[case]
    with pytest.raises(kind, match=text):
        Engine("llama", kv_transfer_config=node.transfer(**extra))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"enforce_eager": False}, "need eager mode.*--enforce-eager"),
        ({"prefix_caching_hash_algo": "xxhash"}, "give sha256"),
    ],
)
def test_ways_to_run_that_are_not_supported(
    arguments: dict[str, Any], text: str, node: Node
) -> None:
    with pytest.raises(UnsupportedEngine, match=text):
        Engine("llama", kv_transfer_config=node.rolling(3), **arguments)


def test_rolling_buffers_need_a_producer(node: Node) -> None:
    with pytest.raises(UnsupportedEngine, match=r"kv_role is kv_consumer.*need kv_producer"):
        Engine("llama", kv_transfer_config=node.transfer(role="kv_consumer", **ROLLING))


def test_a_pool_that_is_too_small_for_one_sequence_is_named() -> None:
    with (
        Node("pool.size=4MiB") as node,
        pytest.raises(PlanError, match=r"2048 tokens does not fit: pool bytes .*pool\.size"),
    ):
        Engine("llama", kv_transfer_config=node.rolling(3))


def test_a_kvd_that_is_not_there_is_named(node: Node) -> None:
    transfer = node.rolling(3)
    transfer["kv_connector_extra_config"] |= {"kvd_runtime_dir": "/nowhere", "kvd_deadline_s": 1.0}
    with pytest.raises(KvdRefused, match=r"cannot reach kvd at /nowhere/attach\.sock"):
        Engine("llama", kv_transfer_config=transfer)


def test_the_json_of_the_guide_needs_the_module_path_only() -> None:
    asked = [prompt(67, 300)]
    with Engine("llama", enable_prefix_caching=False) as engine:
        stock = engine.generate(asked, 4)
    with Node('store.names=["local", "memcache"]') as node:
        transfer = {
            "kv_connector": "AscendStoreConnector",
            "kv_role": "kv_producer",
            "kv_connector_module_path": "engine_shim.vllm",
            "kv_connector_extra_config": {
                "backend": "memcache",
                "use_layerwise": True,
                "layerwise_num_shared_buffers": 3,
                "layerwise_independent_layers": [0],
                "kvd_runtime_dir": str(node.runtime_dir),
            },
        }
        with Engine("llama", kv_transfer_config=transfer, max_model_len=8192) as engine:
            (seen,) = node.engines()
            assert seen["about"]["offload"].startswith("rolling: 6 layers on 4 buffers")
            assert_same(engine.generate(asked, 4), stock)
