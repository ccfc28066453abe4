"""What became of the rows that decode selected, by indexer layer and by request (see `Stats`)."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvd.wire.protocol import RequestName, Unsigned

LAYERS_MAX: Final = 64
"""Indexer layers that a member tells of: its first ones."""

REQUESTS_MAX: Final = 8
"""Requests that a member tells of: those with the most misses."""


class LayerFigures(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One indexer layer, and the layers that follow its selection: counts since the start.

    layer:      the engine's layer that has the indexer.
    hits:       selected rows that were in the hot buffer; misses: rows that were loaded, or were
                used once because no slot was free; merged: selected by another position of the step
                as well, and looked up once.
    managed_us: time in the books of hot buffers for one step of a request, in microseconds.
    overlap:    share of the loads' time that was hidden behind other work, 0 to 1; None while no
                load was timed.
    """

    layer: Unsigned
    hits: Unsigned
    misses: Unsigned
    merged: Unsigned
    managed_us: float = 0.0
    overlap: float | None = None


class RequestFigures(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One request that has a hot buffer: figures of all layers together, then of each.

    steps:      decode steps so far.
    managed_us: time in the books for one step, all layers together.
    """

    request: RequestName
    steps: Unsigned
    hits: Unsigned
    misses: Unsigned
    merged: Unsigned
    managed_us: float = 0.0
    overlap: float | None = None
    layers: Annotated[list[LayerFigures], Meta(max_length=LAYERS_MAX)] = []
