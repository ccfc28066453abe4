"""What hot buffers did, as figures for kvd's status and metrics."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from heapq import nlargest
from typing import Final

from engine_shim.hot import GroupFigures, HotFigures
from engine_shim.hot_meter import together
from engine_shim.vllm.sparse_plan import SparsePlan
from kvd.wire.hot_figures import LAYERS_MAX, REQUESTS_MAX, LayerFigures, RequestFigures

KEEPS_DEVICE: Final = "keeps_device_kv"
"""1 in an engine that runs for debugging; kvd shows its node degraded."""

LIVES: Final = "region_lives"
"""How often the decode region was made: 1, and once more each time that kvd had lost it."""


NAME_CHARS_MAX: Final = 256
"""Of a request's name, as kvd takes it."""


def figures_of(plan: SparsePlan, hot: HotFigures, lives: int) -> dict[str, float]:
    """Counts since the start, in all and by indexer layer; see `HotFigures.named`.

    Args: lives: of the region.
    """
    return {KEEPS_DEVICE: float(plan.keep_device), LIVES: float(lives), **hot.named()}


def layers_of(plan: SparsePlan, groups: Iterable[GroupFigures]) -> list[LayerFigures]:
    """The same for every indexer layer, `LAYERS_MAX` at most. Args: groups: all of the plan's."""
    pairs = zip(plan.groups[:LAYERS_MAX], groups, strict=False)
    return [
        LayerFigures(
            layers[0],
            one.rows.hits,
            one.rows.misses + one.rows.scratch,
            one.rows.merged,
            one.managed_us,
            one.overlap if one.copied_ns else None,
        )
        for layers, one in pairs
    ]


def requests_of(
    plan: SparsePlan, requests: Iterable[tuple[str, tuple[GroupFigures, ...]]]
) -> list[RequestFigures]:
    """Figures of those requests that have the most misses, `REQUESTS_MAX` at most.

    Args: requests: names, and figures of all groups of the plan.
    """
    summed = [(name, groups, reduce(together, groups)) for name, groups in requests]
    most = nlargest(REQUESTS_MAX, summed, key=lambda it: it[2].rows.misses + it[2].rows.scratch)
    return [
        RequestFigures(
            name[:NAME_CHARS_MAX],
            groups[0].steps,
            whole.rows.hits,
            whole.rows.misses + whole.rows.scratch,
            whole.rows.merged,
            sum(group.managed_us for group in groups),
            whole.overlap if whole.copied_ns else None,
            layers_of(plan, groups),
        )
        for name, groups, whole in most
    ]


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
        tuple(map(together, past.groups, now.groups)),
    )
