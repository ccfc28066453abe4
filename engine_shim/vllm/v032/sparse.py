"""Sparse decode offload in vLLM 0.32: where caches lie, who attends, and who is in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from engine_shim.vllm.cpu_sparse import SparseImpl, SparseMetadata
from engine_shim.vllm.errors import UnsupportedEngine
from engine_shim.vllm.sparse_plan import Placed, SparsePlan
from engine_shim.vllm.v032.memory import PLAN_ATTRIBUTE


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


def meeting(deadline_s: float) -> Callable[[], None] | None:
    """What waits for the other tensor-parallel ranks; None without any.

    It raises RuntimeError when they do not come by the deadline: the engine cannot go on then.
    """
    import torch.distributed
    from vllm.distributed import get_tp_group

    ranks = get_tp_group()
    if ranks.world_size == 1:
        return None

    def meet() -> None:
        work = torch.distributed.barrier(group=ranks.cpu_group, async_op=True)
        work.wait(timedelta(seconds=deadline_s))

    return meet


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
