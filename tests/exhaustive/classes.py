"""States of a slot as people speak of them, and what an event does to them.

A slot has no state but its holds. For a diagram, and to see which situations the golden scripts
show, states are put into seven classes; an edge is (class, event, outcome).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kvd.core import slot_events as ev
from kvd.core.holds import Doubt, HoldKind
from kvd.core.slot import Slot


class StateClass(Enum):
    """What the holds of a slot amount to; doubt counts before progress."""

    FREE = "free"
    COMPUTING = "computing"
    COMPUTING_DRAINING = "computing_draining"
    DRAINING = "draining"
    SUSPECT = "suspect"
    FENCING = "fencing"
    QUARANTINED = "quarantined"


MEANINGS = {
    StateClass.FREE: "no holds",
    StateClass.COMPUTING: "COMPUTE alone, the rows are not final",
    StateClass.COMPUTING_DRAINING: "COMPUTE, and the rows are final: saves and reads are armed",
    StateClass.DRAINING: "saves or reads, no COMPUTE",
    StateClass.SUSPECT: "some hold is late, its executor is asked for the truth",
    StateClass.FENCING: "some hold is late, a fence is asked for",
    StateClass.QUARANTINED: "some hold is late and its party cannot be fenced",
}

_OF_DOUBT = {
    Doubt.SUSPECT: StateClass.SUSPECT,
    Doubt.FENCING: StateClass.FENCING,
    Doubt.QUARANTINED: StateClass.QUARANTINED,
}


class ClassEdge(NamedTuple):
    """What one kind of event can do in one class of states.

    event:   name of the event.
    ignored: the reason why nothing happens, '' when the event is acted on.
    after:   the class of the state that it leads to.
    """

    before: StateClass
    event: str
    ignored: str
    after: StateClass

    def __str__(self) -> str:
        outcome = f"ignored ({self.ignored})" if self.ignored else f"-> {self.after.value}"
        return f"{self.before.value}: {self.event} {outcome}"


def state_class(slot: Slot) -> StateClass:
    """The class that the holds of a slot put it into."""
    if slot.is_free:
        return StateClass.FREE
    worst = max(hold.doubt for hold in slot.holds)
    if worst is not Doubt.NONE:
        return _OF_DOUBT[worst]
    if all(hold.kind is not HoldKind.COMPUTE for hold in slot.holds):
        return StateClass.DRAINING
    return StateClass.COMPUTING_DRAINING if slot.armed else StateClass.COMPUTING


def class_edge(
    before: Slot, event: ev.SlotEvent, after: Slot, effects: tuple[ev.SlotEffect, ...]
) -> ClassEdge:
    """The edge that one transition walks along."""
    first = effects[0] if effects else None
    ignored = first.why if isinstance(first, ev.Ignore) else ""
    return ClassEdge(state_class(before), type(event).__name__, ignored, state_class(after))
