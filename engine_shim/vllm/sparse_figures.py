"""What hot buffers did, as figures for kvd's status and metrics.

Totals first, then those of each indexer layer: kvd shows so many of a member (`STATS_MAX`), so a
deep model's last layers may be left out.
"""

from __future__ import annotations

from typing import Final

from engine_shim.vllm.sparse_rows import SparseStore

FIGURES_MAX: Final = 64
"""As many as kvd shows of a member."""

KEEPS_DEVICE: Final = "keeps_device_kv"


def figures_of(store: SparseStore) -> dict[str, float]:
    """Counts since the start; times in milliseconds."""
    seen = store.hot.statistics()
    rows = seen.rows
    figures = {
        "hot_selected": rows.selected,
        "hot_merged": rows.merged,
        "hot_hits": rows.hits,
        "hot_misses": rows.misses,
        "hot_scratch": rows.scratch,
        "hot_evicted": rows.evicted,
        "hot_holes": seen.holes,
        "hot_load_failures": seen.load_failures,
        "hot_free": seen.free,
        "hot_manage_ms": sum(group.manage_ns for group in store.groups) / 1e6,
        KEEPS_DEVICE: float(store.plan.keep_device),
    }
    for layers, group in zip(store.plan.groups, store.groups, strict=True):
        more = {
            f"hot_hits.{layers[0]}": group.hits,
            f"hot_misses.{layers[0]}": group.misses,
            f"hot_merged.{layers[0]}": group.merged,
            f"hot_manage_ms.{layers[0]}": group.manage_ns / 1e6,
        }
        if len(figures) + len(more) > FIGURES_MAX:
            break
        figures |= more
    return {name: float(value) for name, value in figures.items()}
