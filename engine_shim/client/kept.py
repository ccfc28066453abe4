"""A step whose blocks kvd was asked to keep."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_shim.client.tickets import Ticket
from kvd.wire.slot_items import LoadItem, SaveItem


@dataclass(slots=True, eq=False)
class KeptStep:
    """A step that kvd was asked to keep blocks for; the client's lock guards what changes.

    generation: of the client when it was opened.
    answer:     kvd's; until it says yes nothing is kept.
    copies:     loads and saves that name the step and were not reported yet.
    """

    number: int
    generation: int
    loads: list[LoadItem]
    saves: list[SaveItem]
    answer: Ticket
    copies: int = 0
    closes: bool = False
    closed: bool = field(default=False, init=False)

    @property
    def is_refused(self) -> bool:
        """Whether kvd keeps nothing, and never did."""
        return self.answer.is_settled and bool(self.answer.code)

    @property
    def is_kept(self) -> bool:
        """Whether kvd keeps the blocks."""
        return self.answer.is_settled and not self.answer.code and not self.closed
