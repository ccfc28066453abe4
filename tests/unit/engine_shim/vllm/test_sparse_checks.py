"""Engines that sparse decode offload is not for: each is refused by its name, with what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_shim.vllm.errors import UnsupportedEngine
from engine_shim.vllm.sparse_options import SparseOptions
from engine_shim.vllm.v032.sparse_checks import check_sparse, sparse_shape
from tests.unit.engine_shim.vllm.plans import main


def config(**model: object) -> Any:
    """What the check reads of a `VllmConfig`."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            enforce_eager=True, hf_text_config=SimpleNamespace(**{"index_topk": 64, **model})
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(
            kv_connector="KvdConnector",
            kv_connector_module_path="engine_shim.vllm",
            kv_role="kv_consumer",
            kv_connector_extra_config={},
        ),
    )


def refused(engine: Any, text: str, **options: Any) -> None:
    """Check that the engine is refused with a text."""
    with pytest.raises(UnsupportedEngine, match=text):
        check_sparse(engine, SparseOptions(**options), [main(0)])


def test_a_decode_engine_with_an_indexer_is_taken() -> None:
    check_sparse(config(), SparseOptions(), [main(0)])
    check_sparse(config(compress_ratios=[]), SparseOptions(), [main(0)])


def test_models_it_is_not_for() -> None:
    refused(config(index_topk=None), "no index_topk: .* turn it off")
    refused(config(compress_ratios=[4, 128]), r"compress_ratios is \[4, 128\]")


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_only_decode_engines_may_have_it_but_to_debug(role: str) -> None:
    engine = config()
    engine.kv_transfer_config.kv_role = role
    refused(engine, f"kv_role is {role}: .* set kv_role to kv_consumer")
    check_sparse(engine, SparseOptions(keep_device=True), [main(0)])


def test_graphs_ranks_and_draft_layers_are_refused() -> None:
    engine = config()
    engine.model_config.enforce_eager = False
    refused(engine, "give --enforce-eager")
    with pytest.raises(UnsupportedEngine, match=r"layers\.6\.attn is a draft layer: .* use ngram"):
        check_sparse(config(), SparseOptions(), [main(0), main(6, is_draft=True)])


def test_a_decode_step_has_one_token_and_the_drafts() -> None:
    engine = config()
    assert sparse_shape(engine).width == 1
    engine.speculative_config = SimpleNamespace(num_speculative_tokens=3)
    assert sparse_shape(engine).width == 4
