"""What hot buffers did, as figures for kvd's status and metrics."""

from __future__ import annotations

from typing import Final

from engine_shim.hot import GroupFigures, HotFigures
from engine_shim.vllm.sparse_rows import SparseStore

KEEPS_DEVICE: Final = "keeps_device_kv"
"""1 in an engine that runs for debugging; kvd shows its node degraded."""

LIVES: Final = "region_lives"
"""How often the decode region was made: 1, and once more each time that kvd had lost it."""


def figures_of(
    store: SparseStore, past: HotFigures | None = None, lives: int = 1
) -> dict[str, float]:
    """Counts since the start, in all and by indexer layer; see `HotFigures.named`.

    Args: past: of hot buffers that were given up. lives: of the region.
    """
    return {
        KEEPS_DEVICE: float(store.plan.keep_device),
        LIVES: float(lives),
        **after(past, store.hot.statistics()).named(),
    }


def after(past: HotFigures | None, now: HotFigures) -> HotFigures:
    """Counts of hot buffers that were given up and of those that followed; the latter's state."""
    if past is None:
        return now
    return HotFigures(
        past.rows + now.rows,
        now.free,
        now.parked,
        past.load_failures + now.load_failures,
        past.holes + now.holes,
        tuple(map(_together, past.groups, now.groups)),
    )


def _together(past: GroupFigures, now: GroupFigures) -> GroupFigures:
    return GroupFigures(
        past.rows + now.rows,
        past.steps + now.steps,
        past.sampled + now.sampled,
        past.managed_ns + now.managed_ns,
        past.waited_ns + now.waited_ns,
        past.copied_ns + now.copied_ns,
    )
