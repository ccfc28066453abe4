"""What sparse decode offload needs of vLLM 0.32, as it is configured; reads no other part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from engine_shim.vllm.engine_plan import CacheSpec
from engine_shim.vllm.errors import UnsupportedEngine
from engine_shim.vllm.sparse_options import KEY, SparseOptions
from engine_shim.vllm.sparse_plan import SparseShape
from engine_shim.vllm.v032.config import role_of

_ENABLED: Final = f"{KEY}.enabled is true"


def check_sparse(vllm_config: Any, options: SparseOptions, caches: Sequence[CacheSpec]) -> None:
    """Refuse what sparse decode offload does not support, beyond `check_engine`.

    Raises: UnsupportedEngine.
    """
    model = vllm_config.model_config.hf_text_config
    if getattr(model, "compress_ratios", None):
        raise UnsupportedEngine(
            f"{_ENABLED}, but the model compresses its KV (compress_ratios is "
            f"{model.compress_ratios!r}); such models are not supported: turn it off"
        )
    if getattr(model, "index_topk", None) is None:
        raise UnsupportedEngine(
            f"{_ENABLED}, but the model has no index_topk: without a sparse indexer every token "
            "reads all rows; turn it off, or serve a model with sparse attention (DSA)"
        )
    role = role_of(vllm_config)
    if role != "kv_consumer" and not options.keep_device:
        raise UnsupportedEngine(
            f"{_ENABLED}, but kv_role is {role}: it is for decode; set kv_role to kv_consumer "
            "(or, to debug, keep_device_kv_cache)"
        )
    if not vllm_config.model_config.enforce_eager:
        raise UnsupportedEngine(
            f"{_ENABLED} and needs eager mode on this platform, since rows are looked up between "
            "layers: give --enforce-eager"
        )
    drafts = [cache.name for cache in caches if cache.is_draft]
    if drafts:
        raise UnsupportedEngine(
            f"{_ENABLED}, but {drafts[0]} is a draft layer: a drafter with layers of its own (MTP, "
            "EAGLE) is not supported; use ngram, or no speculative_config"
        )


def sparse_shape(vllm_config: Any) -> SparseShape:
    """What the plan needs to know of the model and of speculative decoding."""
    speculative = vllm_config.speculative_config
    drafts = int(speculative.num_speculative_tokens or 0) if speculative is not None else 0
    return SparseShape(int(vllm_config.model_config.hf_text_config.index_topk), 1 + drafts)
