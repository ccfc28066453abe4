"""Where vLLM's caches lie, and how a step reaches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from engine_shim.device_memory import MemfdMemory
from engine_shim.vllm.engine_plan import EnginePlan
from engine_shim.vllm.errors import UnsupportedEngine
from engine_shim.vllm.messages import StepReport
from engine_shim.vllm.sparse_plan import SparsePlan

PLAN_ATTRIBUTE: Final = "kvd_plan"


def place(kv_cache_config: Any, plan: EnginePlan) -> EnginePlan:
    """Rewrite where vLLM puts its caches: into the buffers of the plan's ring.

    Returns: the plan for the config's number of blocks, which travels with the config.
    """
    from vllm.v1.kv_cache_interface import KVCacheTensor

    final = plan.with_blocks(int(kv_cache_config.num_blocks))
    _, size = final.device()
    kv_cache_config.kv_cache_tensors = [
        KVCacheTensor(
            size=size,
            layers=[name],
            layer_stride=page * final.num_blocks,
            block_stride=page,
            offset=offset,
        )
        for name, (offset, page) in final.placements().items()
    ]
    setattr(kv_cache_config, PLAN_ATTRIBUTE, final)
    return final


def plan_of(kv_cache_config: Any) -> EnginePlan | SparsePlan:
    """The plan that came with a config.

    Raises: UnsupportedEngine when none did: the plugin was not loaded in the engine core.
    """
    plan = getattr(kv_cache_config, PLAN_ATTRIBUTE, None)
    if plan is None:
        raise UnsupportedEngine(
            "the KV cache was planned without kvd; install kvd into vLLM's environment (its plugin "
            "`kvd` does it), and name it in VLLM_PLUGINS if you set that"
        )
    assert isinstance(plan, EnginePlan | SparsePlan)
    return plan


class _OwnMemory(TorchFunctionMode):
    """Answers the one big allocation of KV memory with memory of ours."""

    def __init__(self, memory: MemfdMemory) -> None:
        super().__init__()
        self._memory = memory
        self.taken = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        is_bytes = func is torch.zeros and given.get("dtype") is torch.int8
        if is_bytes and args == (self._memory.nbytes,):
            self.taken += 1
            return torch.frombuffer(self._memory.mapping.view(), dtype=torch.int8)
        return func(*args, **given)


@contextmanager
def allocation_in(memory: MemfdMemory) -> Iterator[None]:
    """While it lasts, vLLM's KV memory is made in `memory`.

    Raises: UnsupportedEngine when vLLM allocated in another way.
    """
    with _OwnMemory(memory) as mode:
        yield
    if mode.taken != 1:
        raise UnsupportedEngine(
            f"vLLM took KV memory {mode.taken} times instead of once; this vLLM is not supported"
        )


def check_placed(plan: EnginePlan, memory: MemfdMemory, caches: Mapping[str, Any]) -> None:
    """Whether the registered tensors lie where the plan says.

    Raises: UnsupportedEngine.
    """
    view = memory.mapping.view()
    try:
        base = torch.frombuffer(view, dtype=torch.int8).data_ptr()
        strangers = set(caches) ^ set(plan.placements())
        if strangers:
            raise UnsupportedEngine(
                f"caches that kvd has no buffer for, or that are missing: {sorted(strangers)}"
            )
        for name, (offset, page) in plan.placements().items():
            tensor = caches[name]
            stride = tensor.stride(0) * tensor.element_size()
            if (tensor.data_ptr() - base, stride, tensor.shape[0]) != (
                offset,
                page,
                plan.num_blocks,
            ):
                raise UnsupportedEngine(f"{name} is not where kvd placed it; report this")
    finally:
        view.release()


def rebind(vllm_config: Any, name: str, memory: MemfdMemory, like: Any, offset: int) -> Any:
    """Move one cache to another buffer between two steps; returns its new tensor.

    Args: like: its tensor so far. offset: byte offset of its block 0 in `memory`.
    """
    whole = torch.frombuffer(memory.mapping.view(), dtype=torch.int8)
    moved = whole[offset:].view(like.dtype).as_strided(like.shape, like.stride())
    vllm_config.compilation_config.static_forward_context[name].bind_kv_cache(moved)
    return moved


def turn_writes_off(forward_context: Any) -> None:
    """Let the rest of the forward pass write no KV: its slots become padding."""
    mapping = forward_context.slot_mapping
    groups = mapping if isinstance(mapping, list) else [mapping]
    for slots in {id(t): t for group in groups for t in group.values()}.values():
        slots.fill_(-1)
    metadata = forward_context.attn_metadata
    for one in metadata if isinstance(metadata, list) else [metadata]:
        for about in (one or {}).values():
            slots = getattr(about, "slot_mapping", None)
            if isinstance(slots, torch.Tensor):
                slots.fill_(-1)


def report_in(output: Any) -> StepReport | None:
    """What kvd's workers said of a step, out of vLLM's output."""
    meta = getattr(output, "kv_connector_worker_meta", None)
    for one in (meta, *(getattr(meta, "metadata", None) or ())):
        report = getattr(one, "report", None)
        if isinstance(report, StepReport):
            return report
    return None


def forget_prefixes(kv_cache_manager: Any) -> None:
    """Let no request find blocks that others have computed; who has them keeps them."""
    kv_cache_manager.evict_blocks(set(range(kv_cache_manager.block_pool.num_gpu_blocks)))


def add_layer_hooks(
    vllm_config: Any, layer_of: Mapping[str, int], before: Callable[[int], None]
) -> None:
    """Call `before(layer)` whenever a layer's attention module is entered."""
    modules = vllm_config.compilation_config.static_forward_context

    def hook(layer: int) -> Callable[[Any, Any], None]:
        return lambda module, inputs: before(layer)

    for name, layer in layer_of.items():
        modules[name].register_forward_pre_hook(hook(layer))
