"""Parts of the world of `dma_world.py`: copies, what each party knows, and letters."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.core import slot_events as ev
from kvd.core.ids import Owner, ReadId, SlotRef


class Corruption(AssertionError):
    """Somebody touched memory that had another occupant."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that goes on, and the content of the memory when it began."""

    ref: SlotRef
    owner: Owner
    saw: int


@dataclass(slots=True)
class Tenancy:
    """The engine's own view of one use of a buffer."""

    ref: SlotRef
    content: int
    computing: bool = True
    written: bool = False
    may_save: set[str] = field(default_factory=set)
    saving: dict[str, Copy] = field(default_factory=dict)
    saved: dict[str, bool] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Reader:
    """A kvd that reads: what it claimed, copies now, and has ended, by (tenancy, read)."""

    name: str
    alive: bool = True
    claims: dict[tuple[SlotRef, ReadId], int] = field(default_factory=dict)
    copies: dict[tuple[SlotRef, ReadId], Copy] = field(default_factory=dict)
    ended: dict[tuple[SlotRef, ReadId], bool] = field(default_factory=dict)
    stopped: set[tuple[SlotRef, ReadId]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Letter:
    """Something on its way: an event to kvd (to='kvd'), or an effect to a party."""

    to: str
    what: ev.SlotEvent | ev.SlotEffect
