"""Makes the connector's two sides for an engine with sparse decode offload."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from logging import Logger
from typing import Any

import torch

from engine_shim.client import KvdClient, MemberIdentity
from engine_shim.device import Device
from engine_shim.vllm import adapter
from engine_shim.vllm.options import client_options
from engine_shim.vllm.sparse_plan import SparsePlan
from engine_shim.vllm.sparse_scheduler import SparseScheduler
from engine_shim.vllm.sparse_table import about
from engine_shim.vllm.sparse_worker import SparseWorker, region_name
from engine_shim.vllm.v032 import sparse


def worker_side(
    vllm_config: Any,
    kv_cache_config: Any,
    plan: SparsePlan,
    caches: Mapping[str, torch.Tensor],
    device: Device,
    logger: Logger,
) -> SparseWorker:
    """Attach with the caches of this rank, and serve its attention.

    Raises: UnsupportedEngine, KvdRefused, DeviceError; nothing is left then.
    """
    sparse.check_placed_sparse(plan, caches)
    layer_of = plan.layer_of()
    impls = sparse.sparse_impls(vllm_config, layer_of)
    options = adapter.options_of(vllm_config)
    worker = SparseWorker(
        plan,
        options,
        adapter.rank_of(vllm_config, kv_cache_config),
        device,
        caches[next(iter(layer_of))].dtype,
        logger,
        batch_of=partial(sparse.batch_of, name=next(iter(layer_of))),
        meet=sparse.meeting(options.deadline_s),
    )
    worker.serve(impls)
    return worker


def scheduler_side(vllm_config: Any, plan: SparsePlan, logger: Logger) -> SparseScheduler:
    """Attach as the engine's scheduler. Raises: KvdRefused."""
    options = adapter.options_of(vllm_config)
    engine = adapter.engine_name(vllm_config)
    identity = MemberIdentity(
        engine=engine,
        member="scheduler",
        is_scheduler=True,
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        dp_rank=vllm_config.parallel_config.data_parallel_index,
        store=options.backend,
        about=about(plan, f"{adapter.connector_name(vllm_config)} in vLLM {adapter.version()}"),
    )
    client = KvdClient(identity, options.runtime_dir, client_options(options))
    return SparseScheduler(
        client.open(),
        region_name(engine),
        plan.region.block_tokens,
        logger,
        deadline_s=options.deadline_s,
        recompute=vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute",
    )
