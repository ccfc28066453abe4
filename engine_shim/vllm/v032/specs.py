"""What an engine declares: its caches, its shape, and a worker's place among the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engine_shim.vllm.engine_plan import INDEXER, MAIN, CacheSpec, EngineShape
from engine_shim.vllm.errors import PlanError, UnsupportedEngine
from engine_shim.vllm.v032.config import engine_name, model_name
from engine_shim.vllm.worker import Rank

_INDEXER_SUFFIX: Final = ".indexer.k_cache"


def shape_of(vllm_config: Any, specs: Mapping[str, Any]) -> EngineShape:
    """What the plan needs to know of the engine."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    return EngineShape(
        model_name(vllm_config),
        cache_dtype(vllm_config, specs),
        int(next(iter(specs.values())).block_size),
        tp_size // replicas(vllm_config, specs),
        int(model.max_model_len),
        int(vllm_config.scheduler_config.max_num_seqs),
        int(cache.num_gpu_blocks_override or 0),
    )


def replicas(vllm_config: Any, specs: Mapping[str, Any]) -> int:
    """Consecutive ranks that hold the same bytes (MLA: all of them)."""
    from vllm.v1.core.kv_cache_utils import _layer_tp_replicas

    tp_size = vllm_config.parallel_config.tensor_parallel_size
    found = {_layer_tp_replicas(spec, tp_size, 1) for spec in specs.values()}
    if len(found) != 1:
        raise PlanError(f"layers are replicated over ranks differently: {sorted(found)}")
    return int(found.pop())


def caches_of(vllm_config: Any, specs: Mapping[str, Any]) -> list[CacheSpec]:
    """The caches that one worker declares.

    Raises: PlanError for a kind of cache that cannot be moved by layers.
    """
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    base = vllm_config.model_config.hf_text_config.num_hidden_layers
    drafts = vllm_config.speculative_config is not None
    found = []
    for name, spec in specs.items():
        if not isinstance(spec, FullAttentionSpec):
            raise PlanError(
                f"{name} has a cache of kind {type(spec).__name__}; only full attention and MLA "
                "caches are supported"
            )
        layer = extract_layer_index(name)
        found.append(
            CacheSpec(
                name,
                layer,
                INDEXER if name.endswith(_INDEXER_SUFFIX) else MAIN,
                int(spec.page_size_bytes),
                isinstance(spec, MLAAttentionSpec),
                drafts and layer >= base,
            )
        )
    sizes = {int(spec.block_size) for spec in specs.values()}
    if len(sizes) != 1:
        raise PlanError(f"layers have blocks of {sorted(sizes)} tokens; one size is supported")
    return found


def cache_dtype(vllm_config: Any, specs: Mapping[str, Any]) -> str:
    """How a block's bytes are to be read: element types, layout and kernel family."""
    kinds = sorted({str(spec.dtype).removeprefix("torch.") for spec in specs.values()})
    layout = vllm_config.cache_config.kv_cache_layout or "default"
    backend = getattr(vllm_config.attention_config, "backend", None)
    name = getattr(backend, "name", None) or "auto"
    return f"{'-'.join(kinds)}.{layout}.{name}"


def check_device() -> None:
    """Refuse a platform whose device engine is not there.

    Raises: UnsupportedEngine.
    """
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    if kind != "cpu":
        raise UnsupportedEngine(
            f"this build of kvd has no device engine for {kind}; it runs on vLLM's CPU platform"
        )


def rank_of(vllm_config: Any, kv_cache_config: Any) -> Rank:
    """This worker's place in its engine."""
    from vllm.distributed import get_tensor_model_parallel_rank

    tp_size = vllm_config.parallel_config.tensor_parallel_size
    rank = get_tensor_model_parallel_rank()
    copies = max(1, int(kv_cache_config.kv_tp_replicas))
    return Rank(
        engine_name(vllm_config),
        rank,
        tp_size,
        vllm_config.parallel_config.data_parallel_index,
        rank // copies,
        rank % copies == 0,
    )
