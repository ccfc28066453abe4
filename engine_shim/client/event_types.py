"""What the stream of slot events is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine_shim.client.tickets import Ticket
from kvd.wire.slot_items import SlotItem


@dataclass(slots=True)
class Entry:
    """A posted item; `is_open`: it was neither sent nor overtaken by an announcement, so that what
    it tells can still be added to."""

    item: SlotItem
    size: int
    ticket: Ticket
    is_awaited: bool
    is_open: bool = True


class Flight(NamedTuple):
    """A batch that was not answered yet; `turn`: how often the stream was rewound before it."""

    first_no: int
    num_items: int
    turn: int
    sent_at: int
    is_awaited: bool
    is_quiet: bool = False

    @property
    def end(self) -> int:
        """Number of the item behind it."""
        return self.first_no + self.num_items


class Batch(NamedTuple):
    """Items to be sent now; `first_no` numbers items[0]; is_quiet: nobody waits for any of them."""

    first_no: int
    items: list[SlotItem]
    is_quiet: bool = False


@dataclass(slots=True)
class StreamCounts:
    """Items since the client was made."""

    sent: int = 0
    acked: int = 0
    resent: int = 0
    refused: int = 0
    replaced: int = 0
    strays: int = 0
