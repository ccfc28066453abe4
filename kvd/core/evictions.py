"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from kvd.core.block_queues import BlockQueues
from kvd.core.evict import EvictionPolicy, LruPolicy
from kvd.core.evict_arc import ArcPolicy

Maker = Callable[[int, type[BlockQueues]], EvictionPolicy]
"""Makes an empty policy for a pool of so many blocks."""

POLICIES: Final[Mapping[str, Maker]] = MappingProxyType({"lru": LruPolicy, "arc": ArcPolicy})
"""What `pool.eviction` may name."""


def make_policy(name: str, total: int, queues: type[BlockQueues] = BlockQueues) -> EvictionPolicy:
    """An empty policy for a pool of `total` blocks; a name that is none is a bug (KeyError)."""
    return POLICIES[name](total, queues)
