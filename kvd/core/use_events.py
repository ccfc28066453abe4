"""Whole tenancies, or good parts of them, told in one event.

A member whose step kvd keeps does nothing for which it needs an answer. What it did in a slot can
therefore be told at once, when all of it has ended.
"""

from __future__ import annotations

from typing import Final

from kvd.core import slot_events as se
from kvd.core.ids import SlotRef
from kvd.core.record import record

ACQUIRED: Final = 1
LOADED: Final = 2
WRITTEN: Final = 4
COMPUTED: Final = 8
SAVED: Final = 16
DID_MAX: Final = ACQUIRED | LOADED | WRITTEN | COMPUTED | SAVED
"""What can be told; `kvd.wire.slot_items` has the same (a test compares them)."""


@record
class Used:
    """These things happened in a tenancy, in the order of their numbers, and all went well.

    did:   sum of what is told; another one is refused.
    loads: number of the open step whose loads began when the slot was acquired, 0 for none.
    saves: the same for the saves that were announced when it was written.
    saver: whose save has ended.
    """

    ref: SlotRef
    layer: int
    did: int
    loads: int = 0
    saves: int = 0
    saver: str = ""


@record
class WholeTenancy:
    """A `Used` that was carried out at once, as the story tells it.

    loads, saves: what the steps `load_step` and `save_step` say of every layer.
    """

    ref: SlotRef
    layer: int
    loads: tuple[se.LoadSpec, ...] = ()
    saves: tuple[se.SaveSpec, ...] = ()
    load_step: int = 0
    save_step: int = 0


def parts(event: Used) -> tuple[se.SlotEvent, ...]:
    """What it means, event by event."""
    ref, did = event.ref, event.did
    found: list[se.SlotEvent] = []
    if did & ACQUIRED:
        found.append(se.Acquired(ref, event.layer, step=event.loads))
    if did & LOADED:
        found.append(se.LoadEnded(ref, True))
    if did & WRITTEN:
        found.append(se.Written(ref, event.layer, step=event.saves))
    if did & COMPUTED:
        found.append(se.Computed(ref))
    if did & SAVED:
        found.append(se.SaveEnded(ref, event.saver, True))
    return tuple(found)
