"""What an engine says at its start: what lives where, and what fits."""

from __future__ import annotations

from typing import Final

from engine_shim.vllm.engine_plan import EnginePlan, block_bytes
from kvd.plan.layout import BlockLayout
from kvd.plan.ring import largest_chunk, tokens_that_fit
from kvd.wire.protocol import ABOUT_CHARS_MAX

MIB: Final = 1 << 20


def merge_line(plan: EnginePlan) -> str:
    """The line that users look for to see that buffers are reused."""
    caches = sum(len(names) for names in plan.names)
    used = [slot for slot in plan.ring.slots if slot.layers]
    merged = sum(len(slot.parts) for slot in used)
    return (
        f"Layerwise KV cache reuse merged {caches} descriptors into {merged} descriptors using "
        f"{len(used)} buffer assignments."
    )


def summary(plan: EnginePlan) -> str:
    """The plan in one line, for kvd's status."""
    ring = plan.ring
    bound = sum(1 for slot in ring.slots if slot.bound)
    shared = sum(1 for slot in ring.slots if slot.layers and not slot.bound)
    if plan.mode == "resident":
        return f"resident: {ring.num_layers} layers with a buffer each, {plan.num_blocks} blocks"
    spares = f", {len(ring.spares)} spare" if ring.spares else ""
    return (
        f"rolling: {ring.num_layers} layers on {bound + shared} buffers ({bound} bound, {shared} "
        f"shared{spares}), {plan.num_blocks} blocks instead of {plan.stock_blocks} "
        f"(bounded by {plan.limit})"
    )


def about(plan: EnginePlan, connector: str) -> dict[str, str]:
    """What kvd is to show of the engine."""
    told = {"offload": summary(plan), "why": plan.why, "connector": connector}
    return {key: text[:ABOUT_CHARS_MAX] for key, text in told.items()}


def start_table(plan: EnginePlan, chunk_tokens: int) -> str:
    """Bytes resident and planned, on device and host, and what fits.

    Args: chunk_tokens: most tokens that the engine computes in one step.
    """
    ring, tokens = plan.ring, plan.ring.block_tokens
    stock = sum(part.row_bytes for parts in ring.layers for part in parts) * tokens
    stride = BlockLayout(plan.layout).stride
    blocks = plan.num_blocks
    fit, stock_fit = (tokens_that_fit(count, tokens) for count in (blocks, plan.stock_blocks))
    rows = [
        ("", "one buffer a layer", plan.mode),
        ("device, all blocks", _mib(stock * blocks), _mib(ring.device_bytes)),
        ("device, one block", _mib(stock), _mib(block_bytes(ring))),
        ("host, all blocks", _mib(0), _mib(stride * (blocks - 1))),
        ("blocks in this device memory", str(plan.stock_blocks), str(blocks)),
        ("tokens that fit", str(stock_fit), str(fit)),
        (
            "largest chunk now",
            str(largest_chunk(plan.stock_blocks, tokens, chunk_tokens)),
            str(largest_chunk(blocks, tokens, chunk_tokens)),
        ),
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    lines = [
        f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}" for row in rows
    ]
    return "\n".join(
        [
            f"kvd: KV cache is {plan.mode}: {plan.why}; blocks are bounded by {plan.limit}",
            *lines,
        ]
    )


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"
