"""Slot events that are short whatever they say: they need not be encoded to know how long."""

from __future__ import annotations

from typing import Final

from kvd.wire.slot_items import (
    AcquiredItem,
    ComputedItem,
    LoadEndedItem,
    PoisonedItem,
    SaveEndedItem,
    SlotItem,
    WrittenItem,
)

PLAIN_BYTES: Final = 128
"""Bound of the encoded size of such an event: its words, and the name of a saver."""

LAYERS_MAX: Final = 1 << 31


def is_plain(item: SlotItem) -> bool:
    """Whether an event is surely one that kvd can read, when its tenancy and its saver are in the
    books: nothing in it has a length, and its numbers are in range."""
    match item:
        case WrittenItem():
            return not (item.saves or item.reads) and 0 <= item.layer < LAYERS_MAX
        case AcquiredItem():
            return not item.loads and -1 <= item.layer < LAYERS_MAX
        case SaveEndedItem():
            return not (item.tokens or item.sums) and item.saver.isascii()
        case LoadEndedItem():
            return not item.bad
        case ComputedItem() | PoisonedItem():
            return True
        case _:
            return False
