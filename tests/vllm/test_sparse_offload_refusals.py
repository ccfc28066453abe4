"""Sparse decode offload that cannot be meant is refused at start, with key, value and remedy."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final

import pytest

from engine_shim.client import KvdRefused
from engine_shim.vllm.errors import OptionError, PlanError, UnsupportedEngine
from engine_shim.vllm.sparse_options import KEY
from tests.vllm.engines import Engine, prompt
from tests.vllm.sparse_node import SparseNode

OPTIONS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "fewer slots than are selected": (
        {"topk_buffer_size": 32},
        r"topk_buffer_size is 32, fewer than the 64 rows .*\(index_topk\); give 128",
    ),
    "no whole blocks": (
        {"topk_buffer_size": 200},
        r"topk_buffer_size is 200, .*no multiple of the block size \(128 tokens\); give 256",
    ),
    "mistyped": ({"topk_bufer_size": 128}, "is not known; did you mean topk_buffer_size"),
    "no memory": ({"dram_size_per_dp_GB": 0}, "dram_size_per_dp_GB is 0; give GiB, more than 0"),
}


@pytest.fixture(scope="module")
def node() -> Iterator[SparseNode]:
    with SparseNode() as node:
        yield node


@pytest.mark.parametrize("case", list(OPTIONS))
def test_wrong_options_are_refused_at_start(case: str, node: SparseNode) -> None:
    given, text = OPTIONS[case]
    with pytest.raises(OptionError, match=text):
        Engine("deepseek_v32", kv_transfer_config=node.sparse(**given))


def test_a_producer_is_refused(node: SparseNode) -> None:
    with pytest.raises(UnsupportedEngine, match=r"kv_role is kv_producer: .* kv_consumer"):
        Engine("deepseek_v32", kv_transfer_config=node.sparse(role="kv_producer"))


def test_graphs_are_refused(node: SparseNode) -> None:
    with pytest.raises(UnsupportedEngine, match=r"needs eager mode .*--enforce-eager"):
        Engine("deepseek_v32", kv_transfer_config=node.sparse(), enforce_eager=False)


@pytest.mark.parametrize("model", ["llama", "deepseek_v3"])
def test_models_without_a_sparse_indexer_are_refused(model: str, node: SparseNode) -> None:
    with pytest.raises(UnsupportedEngine, match=r"the model has no index_topk: .* turn it off"):
        Engine(model, kv_transfer_config=node.sparse())


def test_rolling_buffers_beside_it_are_refused(node: SparseNode) -> None:
    transfer = node.sparse()
    transfer["kv_connector_extra_config"]["layerwise_num_shared_buffers"] = 3
    with pytest.raises(OptionError, match=r"layerwise_num_shared_buffers .* give one of them"):
        Engine("deepseek_v32", kv_transfer_config=transfer)


@pytest.mark.parametrize(
    ("given", "arguments", "text"),
    [
        ({"dram_size_per_dp_GB": 0.01}, {}, r"dram_size_per_dp_GB allows 640 .*GB to 0\.0280\d or"),
        (
            {},
            {"kv_cache_memory_bytes": 8 << 20},
            r"device memory allows \d+ tok.*max_num_seqs",
        ),
        ({}, {"kv_cache_memory_bytes": 4 << 20}, r"hot buffers of 6\.8 MiB leave nothing .*lower"),
        ({}, {"num_gpu_blocks_override": 5}, r"num_gpu_blocks_override allows 512 tokens; raise"),
    ],
)
def test_memory_that_does_not_hold_one_sequence_is_named(
    given: dict[str, Any], arguments: dict[str, Any], text: str, node: SparseNode
) -> None:
    with pytest.raises(PlanError, match=text):
        Engine("deepseek_v32", kv_transfer_config=node.sparse(**given), **arguments)


def test_a_kvd_that_has_no_memory_for_the_region_is_named() -> None:
    with (
        SparseNode("regions.size_max=64MiB") as node,
        pytest.raises(KvdRefused, match=r"regions\.size_max"),
    ):
        Engine("deepseek_v32", kv_transfer_config=node.sparse())


def test_the_guide_s_place_of_the_options_is_taken_once(
    node: SparseNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("vllm.kvd"), "info", lambda text, *some: lines.append(text % some)
    )
    beside = {KEY: node.sparse()["kv_connector_extra_config"].pop(KEY)}
    how: dict[str, Any] = {"additional_config": beside}
    with pytest.raises(OptionError, match="say the same thing; give one of them"):
        Engine("deepseek_v32", kv_transfer_config=node.sparse(), **how)
    transfer = node.transfer(role="kv_consumer")
    with Engine("deepseek_v32", kv_transfer_config=transfer, **how) as engine:
        assert len(engine.generate([prompt(3, 90)], 2)[0].tokens) == 2
    (table,) = (line for line in lines if "main KV is in a decode region" in line)
    assert "blocks are bounded by dram_size_per_dp_GB" in table
