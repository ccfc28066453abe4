"""The one file that knows which vLLM it faces: 0.32, model runner V1.

It reads what vLLM plans, places the buffers, puts the device memory where kvd can map it, and adds
what vLLM has no hook for:

* planning: `get_kv_cache_configs` is wrapped in the engine core, so that vLLM's own block count
  grows by the memory that reuse frees, and never beyond the pool;
* failures: vLLM takes only blocks that were *loaded* for possibly bad, so that a first chunk whose
  buffer could not be had would go out as an answer. `Scheduler.update_from_output` and
  `Scheduler._handle_invalid_blocks` ask the connector first.

Everything else goes through the connector interface. Another version is refused by `check_version`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from engine_shim.device_memory import MemfdMemory
from engine_shim.vllm.engine_plan import INDEXER, MAIN, CacheSpec, EnginePlan, EngineShape, PlanError
from engine_shim.vllm.messages import StepReport
from engine_shim.vllm.options import ConnectorOptions, OptionError, parse_options
from engine_shim.vllm.worker import Rank

SUPPORTED: Final = "0.32"
CONNECTORS: Final = ("KvdConnector", "AscendStoreConnector")
PLAN_ATTRIBUTE: Final = "kvd_plan"
PROBE_TOKENS: Final = tuple(range(16))
_INDEXER_SUFFIX: Final = ".indexer.k_cache"


class UnsupportedEngine(RuntimeError):
    """This vLLM, or a way to run it, is not supported; the text says what is."""


def check_version() -> None:
    """Refuse a vLLM that was never tested.

    Raises: UnsupportedEngine.
    """
    from vllm.version import __version__

    if not (__version__ == SUPPORTED or __version__.startswith(f"{SUPPORTED}.")):
        raise UnsupportedEngine(
            f"kvd's connector supports vLLM {SUPPORTED}.x, this is {__version__}; install vLLM "
            f"{SUPPORTED}, or a kvd that supports this one"
        )


# Configuration -----------------------------------------------------------------------------------


def connector_entry(vllm_config: Any) -> Mapping[str, Any] | None:
    """The configuration of kvd's connector: at top, or a child of MultiConnector; None: none.

    Raises: OptionError when there are two.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return None
    top = {
        "kv_connector": transfer.kv_connector,
        "kv_connector_module_path": transfer.kv_connector_module_path,
        "kv_role": transfer.kv_role,
        "kv_connector_extra_config": transfer.kv_connector_extra_config,
    }
    entries = [top]
    if transfer.kv_connector == "MultiConnector":
        entries = transfer.kv_connector_extra_config.get("connectors", [])
    ours = [entry for entry in entries if _is_ours(entry)]
    if len(ours) > 1:
        raise OptionError(f"{len(ours)} connectors of kvd own layer buffers; configure one")
    return ours[0] if ours else None


def _is_ours(entry: Mapping[str, Any]) -> bool:
    name, path = entry.get("kv_connector"), entry.get("kv_connector_module_path")
    if path:
        return name in CONNECTORS and str(path).split(".")[0] == "engine_shim"
    return name == "KvdConnector"


def options_of(vllm_config: Any) -> ConnectorOptions:
    """The connector's options.

    Raises: OptionError.
    """
    entry = connector_entry(vllm_config)
    if entry is None:
        raise OptionError("no connector of kvd is configured (kv_connector_module_path)")
    return parse_options(entry.get("kv_connector_extra_config") or {})


def role_of(vllm_config: Any) -> str:
    """kv_producer, kv_consumer or kv_both."""
    entry = connector_entry(vllm_config)
    return str((entry or {}).get("kv_role") or vllm_config.kv_transfer_config.kv_role)


def check_engine(vllm_config: Any) -> None:
    """Refuse what no mode supports.

    Raises: UnsupportedEngine.
    """
    parallel = vllm_config.parallel_config
    for name, label in (
        ("pipeline_parallel_size", "pipeline parallelism"),
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
    ):
        value = getattr(parallel, name, 1)
        if value > 1:
            raise UnsupportedEngine(f"{name} is {value}; kvd does not support {label}: set it to 1")
    if vllm_config.scheduler_config.async_scheduling and vllm_config.speculative_config:
        raise UnsupportedEngine(
            "async_scheduling is on with speculative decoding; give --no-async-scheduling"
        )
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if "xxhash" in algorithm:
        raise UnsupportedEngine(
            f"prefix_caching_hash_algo is {algorithm}, whose seed differs in every process; give "
            "sha256 or sha256_cbor, since others find blocks by these hashes"
        )


def check_rolling(vllm_config: Any) -> None:
    """Refuse what shared buffers do not support, beyond `check_engine`.

    Raises: UnsupportedEngine.
    """
    from vllm.config import CUDAGraphMode

    if "producer" not in role_of(vllm_config) and role_of(vllm_config) != "kv_both":
        raise UnsupportedEngine(
            f"kv_role is {role_of(vllm_config)}; rolling layer buffers need kv_producer (or "
            "kv_both): set it, or offload to resident"
        )
    graphs = vllm_config.compilation_config.cudagraph_mode
    if not vllm_config.model_config.enforce_eager and graphs not in (None, CUDAGraphMode.NONE):
        raise UnsupportedEngine(
            f"cudagraph_mode is {graphs}; rolling layer buffers need eager mode: give "
            "--enforce-eager, or set offload to resident"
        )


# What the engine declares -------------------------------------------------------------------------


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


def model_name(vllm_config: Any) -> str:
    """A name that two engines share only when their KV is interchangeable."""
    model = vllm_config.model_config
    what = json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str)
    whole = f"{what} {model.revision} {model.quantization} {vllm_config.lora_config}"
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return f"{str(model.model)[-200:]}@{digest}"


def cache_dtype(vllm_config: Any, specs: Mapping[str, Any]) -> str:
    """How a block's bytes are to be read: element types, layout and kernel family."""
    kinds = sorted({str(spec.dtype).removeprefix("torch.") for spec in specs.values()})
    layout = vllm_config.cache_config.kv_cache_layout or "default"
    backend = getattr(vllm_config.attention_config, "backend", None)
    name = getattr(backend, "name", None) or "auto"
    return f"{'-'.join(kinds)}.{layout}.{name}"


def hash_probe(vllm_config: Any) -> bytes:
    """Hash of a fixed block, as this process hashes: others must find the same."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    hashed = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    root = hashed(resolve_none_hash_seed(hashed))
    return hashlib.sha256(hashed((root, PROBE_TOKENS, None))).digest()


def engine_name(vllm_config: Any) -> str:
    """Name of the engine in kvd: its model, and its id."""
    base = str(vllm_config.model_config.model).rstrip("/").split("/")[-1]
    clean = "".join(char if char.isalnum() or char in "._-" else "_" for char in base)
    rank = vllm_config.parallel_config.data_parallel_index
    return f"{clean[:60]}-{str(vllm_config.kv_transfer_config.engine_id)[:8]}-dp{rank}"


# Placement ---------------------------------------------------------------------------------------


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


def plan_of(kv_cache_config: Any) -> EnginePlan:
    """The plan that came with a config.

    Raises: UnsupportedEngine when none did: the plugin was not loaded in the engine core.
    """
    plan = getattr(kv_cache_config, PLAN_ATTRIBUTE, None)
    if plan is None:
        raise UnsupportedEngine(
            "the KV cache was planned without kvd; install kvd into vLLM's environment (its plugin "
            "`kvd` does it), and name it in VLLM_PLUGINS if you set that"
        )
    assert isinstance(plan, EnginePlan)
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
        if isinstance(one, StepReport):
            return one
    return None


# Workers -----------------------------------------------------------------------------------------


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


def gates_ahead(vllm_config: Any, plan: EnginePlan) -> bool:
    """Whether a layer's gate is asked when the one before it ends, not right before its write.

    So it has to be where modules are compiled (no hook runs before their parts), and where a layer
    writes a cache before its attention module is entered (the sparse indexer's keys).
    """
    has_indexer = any(len(names) > 1 for names in plan.names)
    return has_indexer or not vllm_config.model_config.enforce_eager


def add_layer_hooks(
    vllm_config: Any, layer_of: Mapping[str, int], before: Callable[[int], None]
) -> None:
    """Call `before(layer)` whenever a layer's attention module is entered."""
    modules = vllm_config.compilation_config.static_forward_context

    def hook(layer: int) -> Callable[[Any, Any], None]:
        return lambda module, inputs: before(layer)

    for name, layer in layer_of.items():
        modules[name].register_forward_pre_hook(hook(layer))


def hashes_per_block(vllm_config: Any, plan: EnginePlan) -> int:
    """Hashes of vLLM that make one block.

    Raises: UnsupportedEngine.
    """
    size = int(vllm_config.cache_config.hash_block_size or plan.ring.block_tokens)
    if plan.ring.block_tokens % size:
        raise UnsupportedEngine(
            f"hash_block_size is {size}, which does not divide blocks of "
            f"{plan.ring.block_tokens} tokens; give a divisor"
        )
    return plan.ring.block_tokens // size
