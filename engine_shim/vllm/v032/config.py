"""What vLLM was asked for: the connector's configuration, and what cannot be combined with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from engine_shim.vllm.engine_plan import EnginePlan
from engine_shim.vllm.errors import OptionError, UnsupportedEngine
from engine_shim.vllm.options import PREFIX, ConnectorOptions, parse_options
from engine_shim.vllm.sparse_options import KEY, parse_sparse

CONNECTORS: Final = ("KvdConnector", "AscendStoreConnector")
PROBE_TOKENS: Final = tuple(range(16))


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
    """The connector's options; those of sparse offload may stand in `additional_config`.

    Raises: OptionError.
    """
    entry = connector_entry(vllm_config)
    if entry is None:
        raise OptionError("no connector of kvd is configured (kv_connector_module_path)")
    options = parse_options(entry.get("kv_connector_extra_config") or {})
    beside = vllm_config.additional_config
    where = f"additional_config.{KEY}"
    sparse = parse_sparse(beside.get(KEY) if isinstance(beside, Mapping) else None, where)
    if sparse is None:
        return options
    if options.sparse is not None:
        raise OptionError(f"{where} and {PREFIX}.{KEY} say the same thing; give one of them")
    return replace(options, sparse=sparse)


def connector_name(vllm_config: Any) -> str:
    """The name under which kvd's connector is configured."""
    return str((connector_entry(vllm_config) or {}).get("kv_connector"))


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
    if vllm_config.scheduler_config.async_scheduling:
        raise UnsupportedEngine(
            "async_scheduling is on: what a failed step computed could go out before kvd's workers "
            "are heard; give --no-async-scheduling"
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
    if "producer" not in role_of(vllm_config) and role_of(vllm_config) != "kv_both":
        raise UnsupportedEngine(
            f"kv_role is {role_of(vllm_config)}; rolling layer buffers need kv_producer (or "
            "kv_both): set it, or offload to resident"
        )
    if not vllm_config.model_config.enforce_eager:
        raise UnsupportedEngine(
            "rolling layer buffers need eager mode, in which the gate of each buffer is asked "
            "between layers: give --enforce-eager, or set offload to resident"
        )


def model_name(vllm_config: Any) -> str:
    """A name that two engines share only when their KV is interchangeable."""
    model = vllm_config.model_config
    what = json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str)
    whole = f"{what} {model.revision} {model.quantization} {vllm_config.lora_config}"
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return f"{str(model.model)[-200:]}@{digest}"


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


def gates_ahead(vllm_config: Any, plan: EnginePlan) -> bool:
    """Whether a layer's gate is asked when the one before it ends, not right before its write.

    So it has to be where modules are compiled (no hook runs before their parts), and where a layer
    writes a cache before its attention module is entered (the sparse indexer's keys).
    """
    has_indexer = any(len(names) > 1 for names in plan.names)
    return has_indexer or not vllm_config.model_config.enforce_eager


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
