"""What vLLM has no hook for; installed once in a process, by the plugin.

* Planning: `get_kv_cache_configs` is wrapped in the engine core, so that vLLM's own block count
  grows by the memory that reuse frees, and never beyond the pool.
* Failures: vLLM takes only blocks that were *loaded* for possibly bad, so that a first chunk whose
  buffer could not be had would go out as an answer. `Scheduler.update_from_output` and
  `Scheduler._handle_invalid_blocks` ask the connector first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from engine_shim.client import KvdClient, MemberIdentity
from engine_shim.vllm.engine_plan import EnginePlanner
from engine_shim.vllm.errors import UnsupportedEngine
from engine_shim.vllm.options import ConnectorOptions, buffer_warning, client_options
from engine_shim.vllm.sparse_plan import SparsePlanner
from engine_shim.vllm.sparse_table import DEBUG_WARNING
from engine_shim.vllm.sparse_table import start_table as sparse_table
from engine_shim.vllm.start_table import merge_line, start_table
from engine_shim.vllm.v032 import config, memory, sparse_checks, specs

MARK: Final = "_kvd_original"


def install() -> None:
    """Wrap what has to be wrapped; harmless when it was done.

    Raises: UnsupportedEngine.
    """
    import vllm.v1.engine.core as core
    from vllm.v1.core.sched.scheduler import Scheduler

    _wrap(core, "get_kv_cache_configs", _planned)
    _wrap(Scheduler, "update_from_output", _told_first)
    _wrap(Scheduler, "_handle_invalid_blocks", _failed_requests)


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name, None)
    if original is None:
        raise UnsupportedEngine(f"this vLLM has no {name}; it is not supported")
    if hasattr(original, MARK):
        return
    wrapped = wraps(original)(make(original))
    setattr(wrapped, MARK, original)
    setattr(owner, name, wrapped)


def _planned(original: Any) -> Any:
    def get_kv_cache_configs(vllm_config: Any, declared: Any, available: list[int]) -> Any:
        if config.connector_entry(vllm_config) is None or not any(declared):
            return original(vllm_config, declared, available)
        return _plan(original, vllm_config, declared, available)

    return get_kv_cache_configs


def _plan(original: Any, vllm_config: Any, declared: Any, available: list[int]) -> Any:
    from vllm.logger import init_logger

    log = init_logger("vllm.kvd")
    options = config.options_of(vllm_config)
    config.check_engine(vllm_config)
    if options.ignored:
        log.warning("kvd: these options have no effect: %s", ", ".join(options.ignored))
    if options.sparse is not None:
        return _plan_sparse(original, vllm_config, declared, min(available), options)
    shape = specs.shape_of(vllm_config, declared[0])
    planner = EnginePlanner(options, shape, specs.caches_of(vllm_config, declared[0]))
    plan = planner.plan(min(available), _pool_blocks(vllm_config, planner))
    if warning := buffer_warning(options.num_shared, plan.shared_bytes):
        log.warning("kvd: %s", warning)
    if plan.mode == "rolling":
        config.check_rolling(vllm_config)
        # The device holds another layer's rows: vLLM's own hits would read those.
        vllm_config.cache_config.enable_prefix_caching = False
    grown = plan.num_blocks * planner.resident_block_bytes
    if shape.device_blocks_override:
        _demand(vllm_config, plan.num_blocks)
    configs = original(vllm_config, declared, [grown] * len(declared))
    final = plan
    for one in configs:
        final = memory.place(one, plan)
    if final.mode == "rolling":
        log.info("%s", merge_line(final))
    log.info("%s", start_table(final, vllm_config.scheduler_config.max_num_batched_tokens))
    return configs


def _demand(vllm_config: Any, num_blocks: int) -> None:
    """vLLM takes the number of blocks that was demanded, be there memory behind it or not."""
    vllm_config.cache_config.num_gpu_blocks_override = num_blocks


def _plan_sparse(
    original: Any, vllm_config: Any, declared: Any, available: int, options: ConnectorOptions
) -> Any:
    """Main KV goes to a decode region; the engine gets the blocks that both memories have."""
    from vllm.logger import init_logger

    from engine_shim.vllm.v032 import sparse

    log = init_logger("vllm.kvd")
    assert options.sparse is not None
    sparse_checks.check_sparse(vllm_config, options.sparse)
    caches = specs.caches_of(vllm_config, declared[0])
    shape = specs.shape_of(vllm_config, declared[0])
    planner = SparsePlanner(options, shape, sparse_checks.sparse_shape(vllm_config), caches)
    plan = planner.plan(available)
    for warning in (planner.warning, DEBUG_WARNING if plan.keep_device else ""):
        if warning:
            log.warning("kvd: %s", warning)
    grown = plan.num_blocks * planner.resident_block_bytes
    if shape.device_blocks_override:
        _demand(vllm_config, plan.num_blocks)
    configs = original(vllm_config, declared, [grown] * len(declared))
    for one in configs:
        final = sparse.place_sparse(one, plan)
    log.info("%s", sparse_table(final))
    return configs


def _pool_blocks(vllm_config: Any, planner: EnginePlanner) -> int:
    """Blocks of this layout that kvd's pool has; asked by a member that leaves again.

    Raises: KvdRefused when kvd cannot be reached, or refuses the layout.
    """
    options = config.options_of(vllm_config)
    identity = MemberIdentity(
        engine=config.engine_name(vllm_config),
        member="planner",
        layout=planner.layout,
        store=options.backend,
    )
    with KvdClient(identity, options.runtime_dir, client_options(options)) as client:
        return client.num_blocks


def _told_first(original: Any) -> Any:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        side = scheduler_side(self.connector)
        if side is not None:
            output = model_runner_output.kv_connector_output
            side.reported(memory.report_in(output))
            ended = [one for one in side.take_ends() if one in self.requests]
            # vLLM ends these requests with an error, whatever their state.
            self.grammar_compile_error_reqs.update(ended)
        return original(self, scheduler_output, model_runner_output)

    return update_from_output


def _failed_requests(original: Any) -> Any:
    def _handle_invalid_blocks(
        self: Any, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
    ) -> set[str]:
        side = scheduler_side(self.connector)
        if side is None:
            found: set[str] = original(self, invalid_block_ids, num_scheduled_tokens)
            return found
        computed = {
            request.request_id: request.num_computed_tokens
            - num_scheduled_tokens.get(request.request_id, 0)
            for request in self.running
        }
        # As a child of MultiConnector the connector is not told the policy: it is the engine's.
        side.recompute = self.recompute_kv_load_failures
        points = side.restart_points(computed)
        for request in self.running:
            if request.request_id in points:
                request.num_computed_tokens = points[request.request_id]
        if points and not self.recompute_kv_load_failures:
            self.kv_cache_manager.evict_blocks(set(invalid_block_ids))
        self.grammar_compile_error_reqs.update(
            one for one in side.take_ends() if one in self.requests
        )
        return set(points)

    return _handle_invalid_blocks


def scheduler_side(connector: Any) -> Any:
    """kvd's scheduler side in a connector, None when it has none."""
    for one in (connector, *getattr(connector, "_connectors", ())):
        side = getattr(one, "kvd_scheduler", None)
        if side is not None:
            return side
    return None
