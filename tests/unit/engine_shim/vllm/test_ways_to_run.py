"""Ways to run an engine that no mode of the connector supports are refused, by their option."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_shim.vllm.errors import OptionError, UnsupportedEngine
from engine_shim.vllm.v032 import config


def vllm_config(
    *,
    parallel: dict[str, int] | None = None,
    asynchronous: bool = False,
    algorithm: str = "sha256",
    eager: bool = True,
    role: str = "kv_producer",
    connectors: list[dict[str, Any]] | None = None,
) -> SimpleNamespace:
    """What is read of a `VllmConfig`."""
    transfer = SimpleNamespace(
        kv_connector="MultiConnector" if connectors else "KvdConnector",
        kv_connector_module_path=None if connectors else "engine_shim.vllm",
        kv_role=role,
        kv_connector_extra_config={"connectors": connectors} if connectors else {},
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(**(parallel or {})),
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm),
        model_config=SimpleNamespace(enforce_eager=eager),
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size is 2; .*set it to 1"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "decode_context_parallel_size is 2"),
        ({"parallel": {"prefill_context_parallel_size": 4}}, "prefill_context_parallel_size is 4"),
        ({"asynchronous": True}, "give --no-async-scheduling"),
        ({"algorithm": "xxhash_cbor"}, "prefix_caching_hash_algo is xxhash_cbor.*give sha256"),
    ],
)
def test_no_mode_supports(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedEngine, match=text):
        config.check_engine(vllm_config(**changes))


def test_ordinary_ways_are_fine() -> None:
    config.check_engine(vllm_config(parallel={"pipeline_parallel_size": 1}))
    config.check_rolling(vllm_config())
    config.check_rolling(vllm_config(role="kv_both"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"eager": False}, "need eager mode.*give --enforce-eager"),
        ({"role": "kv_consumer"}, "kv_role is kv_consumer; rolling .*need kv_producer"),
    ],
)
def test_rolling_buffers_do_not_support(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedEngine, match=text):
        config.check_rolling(vllm_config(**changes))


def test_a_child_of_multi_connector_is_found_and_a_second_one_refused() -> None:
    child = {
        "kv_connector": "AscendStoreConnector",
        "kv_connector_module_path": "engine_shim.vllm",
        "kv_connector_extra_config": {"spare_buffers": 2},
    }
    other = {"kv_connector": "NixlConnector"}
    assert config.options_of(vllm_config(connectors=[other, child])).spare_buffers == 2
    with pytest.raises(OptionError, match="2 connectors of kvd own layer buffers"):
        config.options_of(vllm_config(connectors=[child, child]))


def test_other_connectors_are_none_of_ours() -> None:
    assert config.connector_entry(vllm_config(connectors=[{"kv_connector": "Nixl"}])) is None
    assert config.connector_entry(SimpleNamespace(kv_transfer_config=None)) is None
