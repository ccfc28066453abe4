"""kvd's connector for vLLM's V1 interface: two roles, each in a file of its own.

    --kv-transfer-config '{"kv_connector": "KvdConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "engine_shim.vllm",
        "kv_connector_extra_config": {"layerwise_num_shared_buffers": 3}}'

This class only translates: the scheduler side is `scheduler.SchedulerSide`, the worker side
`worker.WorkerSide`; what is peculiar to a version of vLLM is in `adapter`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from engine_shim.client import KvdClient, MemberIdentity
from engine_shim.device_cpu import CpuDevice
from engine_shim.device_memory import MemfdMemory
from engine_shim.vllm import adapter
from engine_shim.vllm.engine_plan import EnginePlan
from engine_shim.vllm.messages import SparseOrder, StepOrder, StepReport
from engine_shim.vllm.options import client_options
from engine_shim.vllm.scheduler import SchedulerSide
from engine_shim.vllm.shares import Scheduled
from engine_shim.vllm.sparse_plan import SparsePlan
from engine_shim.vllm.sparse_scheduler import SparseScheduler
from engine_shim.vllm.start_table import about
from engine_shim.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from engine_shim.vllm.sparse_worker import SparseWorker

DEVICE_CLOSE_NS: Final = 5_000_000_000

log = init_logger("vllm.kvd")


@dataclass
class KvdMetadata(KVConnectorMetadata):
    """A step's order, as vLLM carries it to the workers."""

    order: StepOrder | SparseOrder


@dataclass
class KvdWorkerMetadata(KVConnectorWorkerMetadata):
    """A rank's report, as vLLM carries it back."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvdWorkerMetadata:
        """The reports of two ranks in one."""
        assert isinstance(other, KvdWorkerMetadata)
        return KvdWorkerMetadata(self.report.with_rank(other.report))


class KvdConnector(KVConnectorBase_V1, SupportsHMA):
    """Layerwise offload to the pool of the node's kvd."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Made by vLLM, once in the engine core and once in every worker.

        Raises: OptionError, PlanError, UnsupportedEngine, KvdRefused; vLLM does not start then.
        """
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        adapter.need_known_vllm()
        adapter.check_engine(vllm_config)
        self._config = vllm_config
        self._tensors: dict[str, torch.Tensor] = {}
        self._forward: Any = None
        self._ahead = False
        self.kvd_scheduler: SchedulerSide | SparseScheduler | None = None
        self._worker: WorkerSide | None = None
        self._sparse: SparseWorker | None = None
        self._memory: MemfdMemory | None = None
        self._device: CpuDevice | None = None
        plan = adapter.plan_of(kv_cache_config)
        self._layer_of = plan.layer_of()
        if isinstance(plan, SparsePlan):
            self._sparse_plan: SparsePlan | None = plan
        else:
            self._sparse_plan, self._plan = None, plan
        if role is KVConnectorRole.SCHEDULER:
            self.kvd_scheduler = _scheduler_side(vllm_config, plan)
            return
        adapter.check_device()
        self._device = CpuDevice()
        if isinstance(plan, EnginePlan):
            self._memory = self._device.alloc(plan.device()[1], "slots")

    # Worker side ------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[None] | None:
        """Put the KV memory where kvd can map it."""
        return adapter.allocation_in(self._memory) if self._memory is not None else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Attach to kvd with the memory that the caches lie in."""
        assert self._device is not None
        if self._sparse_plan is not None:
            from engine_shim.vllm import sparse_sides

            self._device.bind_thread()
            self._sparse = sparse_sides.worker_side(
                self._config, self._kv_cache_config, self._sparse_plan, kv_caches, self._device, log
            )
            return
        assert self._memory is not None
        adapter.check_placed(self._plan, self._memory, kv_caches)
        self._tensors = dict(kv_caches)
        options = adapter.options_of(self._config)
        self._device.bind_thread()
        self._worker = WorkerSide(
            self._plan,
            options,
            adapter.rank_of(self._config, self._kv_cache_config),
            self._device,
            self._memory,
            log,
            moved=self._moved,
        )
        self._ahead = adapter.gates_ahead(self._config, self._plan)
        if not self._ahead:
            adapter.add_layer_hooks(self._config, self._layer_of, self._before_layer)

    def _moved(self, layer: int, slot: int) -> None:
        assert self._memory is not None
        slot_of = list(self._plan.ring.slot_of)
        slot_of[layer] = slot
        placed = self._plan.placements(slot_of)
        for _, name in self._plan.names[layer]:
            like = self._tensors[name]
            self._tensors[name] = adapter.rebind(
                self._config, name, self._memory, like, placed[name][0]
            )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads; vLLM calls it before the forward pass when there are any."""
        worker, metadata = self._worker, self._connector_metadata
        if self._sparse is not None:
            assert isinstance(metadata, KvdMetadata)
            assert isinstance(metadata.order, SparseOrder)
            self._sparse.begin(metadata.order, forward_context)
            return
        if worker is None or worker.is_open or forward_context.attn_metadata is None:
            return
        assert isinstance(metadata, KvdMetadata)
        assert isinstance(metadata.order, StepOrder)
        self._forward = forward_context
        worker.begin(metadata.order)
        if self._ahead:
            self._before_layer(0)

    def _before_layer(self, layer: int) -> None:
        worker = self._worker
        if worker is not None and worker.is_open and not worker.before_layer(layer):
            adapter.turn_writes_off(self._forward)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """First hook after the write of the layer's rows."""
        if self._worker is not None and self._worker.is_open:
            self._worker.written(self._layer_of[layer_name])

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Attention over the layer has ended."""
        worker = self._worker
        if worker is None or not worker.is_open:
            return
        layer = self._layer_of[layer_name]
        worker.computed(layer)
        if self._ahead and layer + 1 < len(self._plan.names):
            self._before_layer(layer + 1)

    def wait_for_save(self) -> None:
        """End of the step; saves go on, and the gate keeps their buffers."""
        if side := self._worker or self._sparse:
            side.end()
        self._forward = None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of the requests that this step failed."""
        side = self._worker or self._sparse
        return side.take_bad_blocks() if side is not None else set()

    def build_connector_worker_meta(self) -> KvdWorkerMetadata | None:
        """What became of the step, None when there is nothing to say."""
        side = self._worker or self._sparse
        report = side.take_report() if side is not None else None
        return KvdWorkerMetadata(report) if report is not None else None

    # Scheduler side ---------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """What finds prefixes: those in a decode region go when kvd has lost the region."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if isinstance(self.kvd_scheduler, SparseScheduler):
            forget = partial(adapter.forget_prefixes, kv_cache_manager)
            self.kvd_scheduler.forget_prefixes = forget

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that the pool has beyond vLLM's own, None to be asked again later."""
        if isinstance(self.kvd_scheduler, SparseScheduler):
            return self.kvd_scheduler.matched_tokens(str(request.request_id)), False
        assert self.kvd_scheduler is not None
        return self.kvd_scheduler.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its device blocks."""
        if isinstance(self.kvd_scheduler, SparseScheduler):
            return  # they come with the step
        assert self.kvd_scheduler is not None
        (ids,) = blocks.get_block_ids()
        self.kvd_scheduler.allocated(request, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the step loads and saves."""
        side, scheduled = self.kvd_scheduler, _scheduled(scheduler_output)
        assert side is not None
        if isinstance(side, SparseScheduler):
            order: StepOrder | SparseOrder = side.order(
                scheduled, scheduler_output.preempted_req_ids or ()
            )
        else:
            order = side.order(scheduled)
        # Loads and the gate come before the forward pass, in every step that has one.
        scheduler_output.has_sync_kv_loads = True
        return KvdMetadata(order)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended; nothing keeps its device blocks but the gate."""
        side = self.kvd_scheduler
        assert side is not None
        if isinstance(side, SparseScheduler):
            side.finished(request)
        else:
            side.finished(request, ok=request.status != RequestStatus.FINISHED_ERROR)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same; there is one group."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    @property
    def requires_kv_delivery(self) -> bool:
        """The pool is a cache: nothing is lost with a request that is preempted."""
        return False

    def shutdown(self) -> None:
        """Detach; vLLM does not always call it, so kvd does not rely on it."""
        if self.kvd_scheduler is not None:
            self.kvd_scheduler.close()
        if side := self._worker or self._sparse:
            side.close()
        if self._device is not None:
            self._device.close(DEVICE_CLOSE_NS)


def _scheduled(output: Any) -> list[Scheduled]:
    """The shares of a step."""
    drafts = output.scheduled_spec_decode_tokens
    found = [
        Scheduled(
            new.req_id,
            new.num_computed_tokens,
            output.num_scheduled_tokens[new.req_id],
            tuple(new.block_ids[0]),
            True,
        )
        for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    for at, request_id in enumerate(cached.req_ids):
        new_blocks = cached.new_block_ids[at]
        found.append(
            Scheduled(
                request_id,
                cached.num_computed_tokens[at],
                output.num_scheduled_tokens[request_id],
                tuple(new_blocks[0]) if new_blocks is not None else (),
                request_id in cached.resumed_req_ids,
                len(drafts.get(request_id, ())),
            )
        )
    return found


def _scheduler_side(
    vllm_config: Any, plan: EnginePlan | SparsePlan
) -> SchedulerSide | SparseScheduler:
    if isinstance(plan, SparsePlan):
        from engine_shim.vllm import sparse_sides

        return sparse_sides.scheduler_side(vllm_config, plan, log)
    options = adapter.options_of(vllm_config)
    identity = MemberIdentity(
        engine=adapter.engine_name(vllm_config),
        member="scheduler",
        is_scheduler=True,
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        dp_rank=vllm_config.parallel_config.data_parallel_index,
        hash_probe=adapter.hash_probe(vllm_config),
        layout=plan.layout,
        store=options.backend,
        about=about(plan, f"{adapter.connector_name(vllm_config)} in vLLM {adapter.version()}"),
    )
    client = KvdClient(identity, options.runtime_dir, client_options(options))
    return SchedulerSide(
        plan,
        options,
        client.open(),
        log,
        chunk_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        hashes_per_block=adapter.hashes_per_block(vllm_config, plan),
        recompute=vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute",
    )
