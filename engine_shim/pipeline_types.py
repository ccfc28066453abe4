"""What users of the prefill pipeline name and see."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """The worker's place among the ranks, and how long `close` waits.

    shard:       the span of each layer that this rank loads and saves.
    opaque:      blocks are moved whole (see `LayerRows`).
    contributes: whether it saves and offers rows (MLA: rank 0 only).
    shares_spans: other ranks load the spans that this one saves: an announcement waits for them.
    drafts:      layers that a step may skip: nobody's answer depends on their rows. From then on
                 nothing of them is loaded or saved for the requests of that step.
    saves_max:   layers whose saves have not ended; from so many on optional rows are not saved.
    """

    shard: int = 0
    opaque: bool = False
    contributes: bool = True
    shares_spans: bool = False
    drafts: frozenset[int] = frozenset()
    saves_max: int = 256
    close_s: float = 30.0


@dataclass(frozen=True, slots=True)
class PipelineFigures:
    """What the pipeline has done so far.

    exposed_s:      time that the compute thread waited for slots and loads.
    load_s, save_s: time that copies in that direction were under way.
    shed_blocks:    blocks that were left unsaved because too many saves were open.
    """

    loaded_bytes: int
    saved_bytes: int
    exposed_s: float
    load_s: float
    save_s: float
    spares_left: int
    shed_blocks: int = 0
