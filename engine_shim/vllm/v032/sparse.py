"""Sparse decode offload in vLLM 0.32: what it needs, where caches lie, and who is in a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engine_shim.vllm.cpu_sparse import SparseImpl, SparseMetadata
from engine_shim.vllm.engine_plan import CacheSpec
from engine_shim.vllm.errors import UnsupportedEngine
from engine_shim.vllm.sparse_options import KEY, SparseOptions
from engine_shim.vllm.sparse_plan import Placed, SparsePlan, SparseShape
from engine_shim.vllm.v032.config import role_of
from engine_shim.vllm.v032.memory import PLAN_ATTRIBUTE

_ENABLED: Final = f"{KEY}.enabled is true"


def check_sparse(vllm_config: Any, options: SparseOptions, caches: list[CacheSpec]) -> None:
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
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    if tp_size > 1:
        raise UnsupportedEngine(
            f"{_ENABLED}, but tensor_parallel_size is {tp_size}: it is supported for one rank; "
            "set it to 1"
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


def place_sparse(kv_cache_config: Any, plan: SparsePlan) -> SparsePlan:
    """Rewrite where vLLM puts its caches; returns the plan, which travels with the config."""
    from vllm.v1.kv_cache_interface import KVCacheTensor

    final = plan.with_blocks(int(kv_cache_config.num_blocks))
    placed, size = final.placements()
    kv_cache_config.kv_cache_tensors = [
        KVCacheTensor(
            size=size,
            layers=[name],
            layer_stride=at.page * final.num_blocks,
            block_stride=at.block_stride,
            offset=at.offset,
        )
        for name, at in placed.items()
    ]
    setattr(kv_cache_config, PLAN_ATTRIBUTE, final)
    return final


def check_placed_sparse(plan: SparsePlan, caches: Mapping[str, Any]) -> None:
    """Whether the registered tensors lie where the plan says.

    Raises: UnsupportedEngine.
    """
    placed, _ = plan.placements()
    strangers = set(caches) ^ set(placed)
    if strangers:
        raise UnsupportedEngine(
            f"caches that kvd has no place for, or that are missing: {sorted(strangers)}"
        )
    base = min(caches[name].data_ptr() - at.offset for name, at in placed.items())
    for name, at in placed.items():
        tensor = caches[name]
        seen = Placed(
            tensor.data_ptr() - base,
            tensor[0].numel() * tensor.element_size(),
            tensor.stride(0) * tensor.element_size(),
        )
        if seen != at or tensor.shape[0] != plan.num_blocks:
            raise UnsupportedEngine(
                f"{name} is not where kvd placed it ({seen}, {at}); report this"
            )


def sparse_impls(vllm_config: Any, names: Mapping[str, int]) -> dict[str, SparseImpl]:
    """The attention of each layer, by name.

    Raises: UnsupportedEngine when it is not kvd's.
    """
    modules = vllm_config.compilation_config.static_forward_context
    found = {}
    for name in names:
        impl = getattr(modules[name], "impl", None)
        if not isinstance(impl, SparseImpl):
            raise UnsupportedEngine(
                f"{name} attends with {type(impl).__name__}: sparse decode offload knows kvd's "
                "attention for the CPU; set KVD_CPU_SPARSE=1"
            )
        found[name] = impl
    return found


def batch_of(forward_context: Any, name: str) -> SparseMetadata | None:
    """What a forward pass is made of; None when it computes nothing. Args: name: of a layer."""
    metadata = forward_context.attn_metadata
    if metadata is None:
        return None
    if isinstance(metadata, list):
        raise UnsupportedEngine("micro-batches are on: sparse decode offload needs them off")
    step = metadata[name]
    assert isinstance(step, SparseMetadata)
    return step
