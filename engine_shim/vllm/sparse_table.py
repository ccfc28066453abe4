"""What an engine with sparse decode offload says at its start, and of itself to kvd."""

from __future__ import annotations

from engine_shim.vllm.sparse_plan import MIB, SparsePlan
from kvd.plan.ring import tokens_that_fit
from kvd.wire.protocol import ABOUT_CHARS_MAX

DEBUG_WARNING = (
    "keep_device_kv_cache is on, for debugging: all KV stays on the device as well, and each row "
    "that decode reads is compared with it; turn it off in production"
)


def about(plan: SparsePlan, connector: str) -> dict[str, str]:
    """What kvd is to show of the engine."""
    told = {
        "offload": summary(plan),
        "why": "sparse_kv_offload_config is enabled",
        "connector": connector,
    }
    if plan.keep_device:
        told["debug"] = DEBUG_WARNING
    return {key: text[:ABOUT_CHARS_MAX] for key, text in told.items()}


def summary(plan: SparsePlan) -> str:
    """The plan in one line."""
    hot = plan.hot
    return (
        f"sparse: {hot.num_layers} layers in a region of {plan.num_blocks} blocks instead of "
        f"{plan.stock_blocks} (bounded by {plan.limit}), {hot.num_buffers} hot buffers of "
        f"{hot.slots} rows, {len(plan.groups)} indexer layers"
    )


def start_table(plan: SparsePlan) -> str:
    """Bytes on device and host, and what fits."""
    tokens, blocks = plan.region.block_tokens, plan.num_blocks
    main = plan.region.num_bytes
    index = sum(plan.index_pages) * blocks
    kept = main if plan.keep_device else 0
    hot = plan.hot.num_bytes
    rows = [
        ("", "all on the device", "sparse"),
        ("device, indexer keys", _mib(index), _mib(index)),
        ("device, main KV", _mib(main), _mib(kept)),
        (f"device, {plan.hot.num_buffers} hot buffers", _mib(0), _mib(hot)),
        ("device, all of it", _mib(main + index), _mib(index + kept + hot)),
        ("host, decode region", _mib(0), _mib(main)),
        ("host, dram_size_per_dp_GB", "-", _mib(plan.dram_bytes)),
        ("blocks in this device memory", str(plan.stock_blocks), str(blocks)),
        (
            "tokens that fit",
            str(tokens_that_fit(plan.stock_blocks, tokens)),
            str(tokens_that_fit(blocks, tokens)),
        ),
        ("rows of a hot buffer", "-", f"{plan.hot.slots} of {plan.shape.index_topk} selected"),
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    lines = [
        f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}" for row in rows
    ]
    head = f"kvd: main KV is in a decode region; blocks are bounded by {plan.limit}"
    return "\n".join([head, *lines])


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"
