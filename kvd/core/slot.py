"""A slot as the release rule sees it, and the few ways to change its set of holds."""

from __future__ import annotations

from dataclasses import field
from enum import Enum

from kvd.core import slot_events as ev
from kvd.core.holds import Doubt, Hold, HoldKind, Phase, Timing, running
from kvd.core.ids import Owner, ReadId, SlotRef, member_executor, slot_ref
from kvd.core.record import record


class Saved(Enum):
    """What became of the saves of this tenancy so far."""

    NONE = "none"
    OPEN = "open"
    DONE = "done"
    FAILED = "failed"


@record
class Slot:
    """One slot at one epoch. All fields but `ref` have their defaults while it is free."""

    ref: SlotRef
    holds: tuple[Hold, ...] = ()
    armed: bool = False
    saved: Saved = Saved.NONE
    poisoned: bool = False

    @property
    def is_free(self) -> bool:
        """R1."""
        return not self.holds

    @property
    def is_quarantined(self) -> bool:
        """Whether some party can be neither believed nor fenced."""
        return any(hold.doubt is Doubt.QUARANTINED for hold in self.holds)

    def find(self, kind: HoldKind, owner: Owner) -> Hold | None:
        """The hold of that name."""
        for hold in self.holds:
            if hold.kind is kind and hold.owner == owner:
                return hold
        return None


Effects = tuple[ev.SlotEffect, ...]
Outcome = tuple[Slot, Effects]

COMPUTE_OWNER = "engine"


@record
class Rules:
    """What the transition needs to know of the configuration."""

    timing: Timing = field(default_factory=Timing)
    max_readers: int = 64


def announced(
    ref: SlotRef,
    computing: bool,
    savers: tuple[str, ...],
    reads: tuple[tuple[ReadId, str], ...],
    now: int,
    rules: Rules,
) -> Slot:
    """The slot as a member announced it to a kvd that does not know it.

    Reads come as (name, executor) and are suspect at once: whether they were ever granted, only
    the executor can tell.
    """
    executor = member_executor(ref.member)
    timing = rules.timing
    holds: list[Hold] = []
    if computing:
        holds.append(running(HoldKind.COMPUTE, COMPUTE_OWNER, executor, now, timing.compute))
    holds += [running(HoldKind.SAVE, saver, executor, now, timing.save) for saver in savers]
    holds += [
        Hold(HoldKind.READ, read, who, now, now, Phase.RUNNING, Doubt.SUSPECT)
        for read, who in reads
    ]
    armed = bool(savers or reads)
    saved = Saved.OPEN if savers else Saved.NONE
    return Slot(ref, tuple(holds), armed=armed and bool(holds), saved=saved)


def with_holds(slot: Slot, holds: tuple[Hold, ...]) -> Slot:
    """The same tenancy with other holds. `dataclasses.replace` would cost more than the rest."""
    return Slot(slot.ref, holds, slot.armed, slot.saved, slot.poisoned)


def without(slot: Slot, hold: Hold) -> Slot:
    """The slot without one hold."""
    return with_holds(slot, tuple([other for other in slot.holds if other is not hold]))


def swap(slot: Slot, old: Hold, new: Hold) -> Slot:
    """The slot with one hold exchanged."""
    return with_holds(slot, tuple([new if hold is old else hold for hold in slot.holds]))


def settle(slot: Slot, effects: list[ev.SlotEffect]) -> Outcome:
    """Release when the last hold is gone (R1); the epoch rises here and nowhere else."""
    if slot.holds:
        return slot, tuple(effects)
    return released(slot.ref), (*effects, ev.Release(slot.ref))


def released(ref: SlotRef) -> Slot:
    """The slot after the tenancy `ref`: free, at the next epoch."""
    return Slot(slot_ref(ref.member, ref.slot, ref.epoch + 1))
