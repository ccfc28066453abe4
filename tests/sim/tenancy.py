"""What a worker knows about its use of one slot, and what a step of an engine consists of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvd.core.holds import Truth
from kvd.core.ids import SlotRef
from kvd.core.slot_events import ReadSpec, SaveSpec
from tests.sim.content import Document

if TYPE_CHECKING:
    from tests.sim.kept import KeptStep


@dataclass(eq=False, slots=True)
class Request:
    """A request of a prefill engine.

    blocks:     pool blocks, in order; `computed` rows are in them or on their way.
    open_saves: saves of it that have not ended.
    bound_rows: (rank, layer) -> rows that still lie in the layer's own slot.
    transfer:   name of its transfer and address of the reading kvd, '' for none.
    """

    name: str
    document: Document
    length: int
    transfer: str = ""
    peer: str = ""
    read_rank: int = 0
    blocks: list[int] = field(default_factory=list)
    device_blocks: list[int] = field(default_factory=list)
    computed: int = 0
    sent: int = 0
    committed: int = 0
    open_saves: int = 0
    tries: int = 0
    waiting: bool = False
    in_step: bool = False
    failed: bool = False
    ended: bool = False
    bound_rows: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Part:
    """Rows [start, end) of a request in a step; a read sends rows [send_from, end)."""

    request: Request
    start: int
    end: int
    send_from: int = -1


@dataclass(eq=False, slots=True)
class Step:
    """One forward pass over all layers on all workers."""

    number: int
    parts: tuple[Part, ...]
    workers_left: int
    failed: bool = False


@dataclass(eq=False, slots=True)
class Tenancy:
    """One use of a slot by one layer of a step.

    busy:          computations and loads that run in it now.
    load_asked:    loads are announced and not yet answered; none runs.
    saves_running: savers whose copy runs.
    kept_loads, kept_saves: steps by which its copies began before kvd was heard.
    results:       how saves ended, for questions.
    """

    ref: SlotRef
    layer: int
    step: Step
    busy: int = 0
    tries: int = 0
    ready: bool = False
    started: bool = False
    compute_ended: bool = False
    written: bool = False
    cancelled: bool = False
    computed_said: bool = False
    load_failed: bool = False
    load_asked: bool = False
    kept_loads: KeptStep | None = None
    kept_saves: KeptStep | None = None
    saves: tuple[SaveSpec, ...] = ()
    reads: list[ReadSpec] = field(default_factory=list)
    saves_running: dict[str, None] = field(default_factory=dict)
    results: dict[str, Truth] = field(default_factory=dict)
