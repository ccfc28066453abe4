"""What `kvctl status` says of the pool and of eviction."""

from __future__ import annotations

from collections.abc import Iterable

from kvd.cli.text import size
from kvd.server.models import PoolView, Status


def pool_facts(pool: PoolView) -> Iterable[tuple[str, str]]:
    """The pool and its blocks: a name and a text for each line."""
    if not pool.formatted:
        yield "pool", f"{size(pool.configured_bytes)}, not yet divided: no engine has come"
        return
    blocks, sizes = pool.blocks, pool.bytes
    unused = f", {size(pool.unused_bytes)} unused" if pool.unused_bytes else ""
    yield (
        "pool",
        f"{size(sizes.total)}: {blocks.total} blocks of {size(pool.block_bytes)}{unused}; "
        f"{pool.tokens_fit} tokens fit",
    )
    yield (
        "blocks",
        f"{blocks.free} free ({size(sizes.free)}), "
        f"{blocks.filling} filling ({size(sizes.filling)}), "
        f"{blocks.ready} ready ({size(sizes.ready)}), "
        f"{blocks.poisoned} poisoned ({size(sizes.poisoned)}); "
        f"{pool.pinned_blocks} kept, {pool.evictable_blocks} evictable",
    )


def eviction_facts(status: Status) -> Iterable[tuple[str, str]]:
    """Which blocks go, and what went; nothing before the pool is divided."""
    seen = status.eviction
    if not status.pool.formatted:
        return
    marks = (
        f"ahead of need from {seen.high_water:.0%} to {seen.low_water:.0%} in use"
        if seen.high_water < 1
        else "only when blocks are reserved"
    )
    yield (
        "eviction",
        f"{seen.policy}, {marks}: {seen.admitted} blocks admitted, {seen.found} found again, "
        f"{seen.evicted} evicted ({seen.evicted_ahead} ahead), {seen.ghost_hits} came back, "
        f"{seen.saves_shed} saves shed",
    )
    if seen.policy != "lru":
        yield (
            "  in order",
            f"{seen.new_blocks} new (room for {seen.new_room}), {seen.used_blocks} used",
        )
