"""What decode does with hot buffers, as the status and the tables of engines show it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvd.core.state import Engine
from kvd.server.models import HotLayerView, HotRequestView
from kvd.server.node_view import NodeView
from kvd.wire.hot_figures import LayerFigures, RequestFigures


def hot_layers(figures: Iterable[LayerFigures]) -> list[HotLayerView]:
    """Indexer layers."""
    return [
        HotLayerView(
            layer=one.layer,
            hits=one.hits,
            misses=one.misses,
            merged=one.merged,
            managed_seconds=seconds(one.managed_us),
            overlap=share(one.overlap),
        )
        for one in figures
    ]


def hot_requests(figures: Iterable[RequestFigures], *, by_layer: bool) -> list[HotRequestView]:
    """Requests, with their layers or without."""
    return [
        HotRequestView(
            request=one.request,
            steps=one.steps,
            hits=one.hits,
            misses=one.misses,
            merged=one.merged,
            managed_seconds=seconds(one.managed_us),
            overlap=share(one.overlap),
            layers=hot_layers(one.layers) if by_layer else [],
        )
        for one in figures
    ]


def requests_of(view: NodeView, engine: Engine) -> list[HotRequestView]:
    """Requests of an engine, as the first of its ranks tells them: all have the same rows."""
    told = view.hot_figures()
    ranked = sorted(engine.members.values(), key=lambda member: (member.rank, member.ref.member))
    for member in ranked:
        _, requests = told.get(str(member.ref), ((), ()))
        if requests:
            return hot_requests(requests, by_layer=False)
    return []


def seconds(microseconds: float) -> float:
    """Of what an engine said; 0 for what is no duration."""
    return max(0.0, microseconds / 1e6) if math.isfinite(microseconds) else 0.0


def share(told: float | None) -> float | None:
    """Of what an engine said; None for what is none."""
    if told is None or not math.isfinite(told):
        return None
    return min(1.0, max(0.0, told))
