"""What hot buffers did, as figures for kvd's status and metrics."""

from __future__ import annotations

from typing import Final

from engine_shim.vllm.sparse_rows import SparseStore

KEEPS_DEVICE: Final = "keeps_device_kv"
"""1 in an engine that runs for debugging; kvd shows its node degraded."""


def figures_of(store: SparseStore) -> dict[str, float]:
    """Counts since the start, in all and by indexer layer; see `HotFigures.named`."""
    return {KEEPS_DEVICE: float(store.plan.keep_device), **store.hot.statistics().named()}
