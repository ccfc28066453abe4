"""What a member has to tell of its slots: what went well is added to what was not sent yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvd.core import slot_events as se
from kvd.core import use_events as ue
from kvd.core.ids import SlotRef

OwnEvent = se.SlotEvent | se.StepOpened | se.StepClosed | ue.Used
"""What a member says of its own slots and steps."""

Then = Callable[[str], None]

ENDS: Final = ue.COMPUTED | ue.SAVED


@dataclass(eq=False, slots=True)
class Telling:
    """One item of the stream of slot events; `thens` get its code.

    is_open: it was not sent yet, and nothing else was said of the tenancy since.
    """

    event: OwnEvent
    thens: list[Then] = field(default_factory=list)
    is_open: bool = True

    @property
    def ref(self) -> SlotRef | None:
        """The tenancy that it is about."""
        return None if isinstance(self.event, se.StepOpened | se.StepClosed) else self.event.ref

    def add(self, event: ue.Used) -> bool:
        """Tell this, too, if that can be."""
        told = self.event
        if not self.is_open or not isinstance(told, ue.Used):
            return False
        layers = {told.layer, event.layer} - {-1}
        is_next = not told.did & ~ENDS or event.did > told.did & ~ENDS
        if len(layers) > 1 or event.did & told.did or not is_next:
            return False
        self.event = ue.Used(
            told.ref,
            max(told.layer, event.layer),
            told.did | event.did,
            told.loads or event.loads,
            told.saves or event.saves,
            told.saver or event.saver,
        )
        return True


def as_used(event: OwnEvent) -> ue.Used | None:
    """The same as a `Used`, if it went well and names no more than such a one can."""
    match event:
        case se.Acquired(ref, layer, (), step):
            return ue.Used(ref, layer, ue.ACQUIRED, step)
        case se.LoadEnded(ref, True, ()):
            return ue.Used(ref, -1, ue.LOADED)
        case se.Written(ref, layer, (), (), step):
            return ue.Used(ref, layer, ue.WRITTEN, 0, step)
        case se.Computed(ref, True):
            return ue.Used(ref, -1, ue.COMPUTED)
        case se.SaveEnded(ref, saver, True, (), b""):
            return ue.Used(ref, -1, ue.SAVED, 0, 0, saver)
        case _:
            return None
