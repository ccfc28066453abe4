"""One pass over everything that is held: counts by state, kind and doubt, and the oldest wait.

A hold knows its deadline, not when it began, and an executor that keeps answering "running" moves
the deadline. How long a tenancy has lasted is therefore remembered from one survey to the next
(`Ages`): a read that hangs for half an hour while it says that it runs has waited half an hour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvd.core.holds import Doubt, Hold, Phase, Timing, limit_of
from kvd.core.ids import MemberRef, ReadId, SlotRef
from kvd.core.slot import Slot
from kvd.core.state import Member, OutRead, State
from kvd.core.story import Entry
from kvd.server.models import SlotState
from kvd.server.sliced import STRIDE, Work

_STORY_DEPTH: Final = 8192
_KEYS_MAX: Final = 16
_PARTIES_MAX: Final = 8
_NAMES_MAX: Final = 5


@dataclass(slots=True)
class MemberSlots:
    """Slots of one member by state; `held` are those that are neither suspect nor quarantined."""

    total: int = 0
    held: int = 0
    suspect: int = 0
    quarantined: int = 0

    @property
    def free(self) -> int:
        """Slots without holds."""
        return self.total - self.held - self.suspect - self.quarantined

    def add(self, other: MemberSlots) -> None:
        """Add the counts of another."""
        self.total += other.total
        self.held += other.held
        self.suspect += other.suspect
        self.quarantined += other.quarantined


class Wait(NamedTuple):
    """A wait: key of what waits, what it is, and since when (ns)."""

    since: int
    what: str
    key: Hashable
    who: str


@dataclass(slots=True)
class Ages:
    """When each tenancy, or read of the pool, that is still open was first seen to be open."""

    since: dict[Hashable, int] = field(default_factory=dict)
    _fresh: dict[Hashable, int] = field(default_factory=dict)

    def begin(self) -> None:
        """A survey begins."""
        self._fresh = {}

    def see(self, key: Hashable, since: int) -> int:
        """Return since when the thing has been open, at the earliest known."""
        earliest = min(since, self.since.get(key, since))
        self._fresh[key] = earliest
        return earliest

    def end(self) -> None:
        """The survey has ended: what it did not see is over, and forgotten."""
        self.since = self._fresh


@dataclass(slots=True)
class Survey:
    """What a pass found.

    members:           slots by state, for each member.
    holds:             (kind, doubt) -> count; kind `pool_read` for reads redirected to the pool.
    quarantined_slots: some names.
    oldest:            the oldest wait, None without any.
    """

    members: dict[MemberRef, MemberSlots] = field(default_factory=dict)
    holds: Counter[tuple[str, str]] = field(default_factory=Counter)
    quarantined_slots: list[str] = field(default_factory=list)
    quarantined_reads: int = 0
    reads_open: int = 0
    outgoing_open: int = 0
    outgoing_failed: int = 0
    incoming_open: int = 0
    incoming_failed: int = 0
    copies_running: int = 0
    oldest: Wait | None = None

    @property
    def slots(self) -> MemberSlots:
        """Slots of all members together."""
        total = MemberSlots()
        for counts in self.members.values():
            total.add(counts)
        return total

    def wait(self, wait: Wait) -> None:
        """Keep the older of two waits."""
        if self.oldest is None or wait.since < self.oldest.since:
            self.oldest = wait


def survey(state: State, ages: Ages) -> Work[Survey]:
    """Look at every member, held slot and transfer once."""
    found = Survey()
    ages.begin()
    for ref in list(state.members):
        yield from _member(state, ref, found, ages)
    yield from _outgoing(state, found, ages)
    yield from _incoming(state, found)
    for waiter in state.waiters:
        found.wait(Wait(waiter.since, "transfer", waiter.transfer, waiter.engine))
    ages.end()
    return found


def scan_held(member: Member) -> Iterator[tuple[int, Slot]]:
    """Held slots of a member, each looked up when it is its turn."""
    for index in list(member.held):
        slot = member.slots[index]
        if slot.holds:
            yield index, slot


def doubt_of(slot: Slot) -> Doubt:
    """The greatest doubt among a slot's holds."""
    return max((hold.doubt for hold in slot.holds), default=Doubt.NONE)


def state_name(slot: Slot) -> SlotState:
    """How the admin API names a slot's state."""
    if slot.is_free:
        return "free"
    doubt = doubt_of(slot)
    if doubt is Doubt.QUARANTINED:
        return "quarantined"
    return "held" if doubt is Doubt.NONE else "suspect"


def count_slots(member: Member) -> Work[MemberSlots]:
    """Count the slots of one member by state."""
    counts = MemberSlots(len(member.slots))
    for number, (_, slot) in enumerate(scan_held(member)):
        _count_slot(counts, slot)
        if number % STRIDE == 0:
            yield
    return counts


def began(hold: Hold, timing: Timing) -> int:
    """Since when the party of a hold is believed, ns."""
    limit = timing.offer if hold.phase is Phase.OFFERED else limit_of(hold.kind, timing)
    return hold.deadline - limit


def _count_slot(counts: MemberSlots, slot: Slot) -> Doubt:
    doubt = doubt_of(slot)
    if doubt is Doubt.QUARANTINED:
        counts.quarantined += 1
    elif doubt is Doubt.NONE:
        counts.held += 1
    else:
        counts.suspect += 1
    return doubt


def _member(state: State, ref: MemberRef, found: Survey, ages: Ages) -> Work[None]:
    member = state.members.get(ref)
    if member is None:
        return
    counts = found.members[ref] = MemberSlots(len(member.slots))
    timing = state.rules.timing
    for number, (_, slot) in enumerate(scan_held(member)):
        doubt = _count_slot(counts, slot)
        for hold in slot.holds:
            found.holds[hold.kind.value, hold.doubt.name.lower()] += 1
        oldest = min(slot.holds, key=lambda hold: began(hold, timing))
        since = ages.see(slot.ref, began(oldest, timing))
        if doubt is not Doubt.QUARANTINED:
            found.wait(Wait(since, "slot", slot.ref, oldest.executor or str(oldest.owner)))
        elif len(found.quarantined_slots) < _NAMES_MAX:
            found.quarantined_slots.append(str(slot.ref))
        if number % STRIDE == 0:
            yield
    yield


def _outgoing(state: State, found: Survey, ages: Ages) -> Work[None]:
    for name in list(state.outgoing):
        transfer = state.outgoing.get(name)
        if transfer is None:
            continue
        found.outgoing_open += bool(transfer.open)
        found.outgoing_failed += bool(transfer.failed)
        found.reads_open += len(transfer.open)
        for number, read in enumerate(list(transfer.open.values())):
            _pool_read(state, read, found, ages)
            if number % STRIDE == 0:
                yield
        yield


def _pool_read(state: State, read: OutRead, found: Survey, ages: Ages) -> None:
    hold = read.hold
    if hold is None:
        return
    found.holds["pool_read", hold.doubt.name.lower()] += 1
    since = ages.see(read.read, began(hold, state.rules.timing))
    if hold.doubt is Doubt.QUARANTINED:
        found.quarantined_reads += 1
    else:
        found.wait(Wait(since, "read", read.read, hold.executor or read.spec.peer))


def _incoming(state: State, found: Survey) -> Work[None]:
    for name in list(state.incoming):
        transfer = state.incoming.get(name)
        if transfer is None:
            continue
        found.incoming_open += not transfer.is_over
        found.incoming_failed += bool(transfer.failed)
        found.copies_running += sum(r.phase == "copying" for r in transfer.reads.values())
        yield


# Why something waits -----------------------------------------------------------------------------


def parties(state: State, wait: Wait) -> list[str]:
    """Name the parties that have not ended and whom the wait is for."""
    key = wait.key
    if isinstance(key, SlotRef):
        return _slot_parties(state, key)
    if isinstance(key, ReadId):
        return [f"read {key} of the pool by {wait.who}"]
    return _transfer_parties(state, str(key))


def _slot_parties(state: State, ref: SlotRef) -> list[str]:
    member = state.members.get(ref.member)
    slot = member.slots[ref.slot] if member is not None else None
    if slot is None or slot.ref != ref:
        return []
    return [_hold_text(hold) for hold in slot.holds[:_PARTIES_MAX]]


def _hold_text(hold: Hold) -> str:
    who = f" by {hold.executor}" if hold.executor else ""
    doubt = f", {hold.doubt.name.lower()}" if hold.doubt is not Doubt.NONE else ""
    return f"{hold.kind.value} {hold.owner}{who} ({hold.phase.value}{doubt})"


def _transfer_parties(state: State, name: str) -> list[str]:
    going = state.outgoing.get(name)
    if going is not None:
        return [
            f"read {read.read} by {going.peer} of {read.ref}"
            for read in list(going.open.values())[:_PARTIES_MAX]
        ]
    coming = state.incoming.get(name)
    if coming is None:
        return []
    running = [r for r in coming.reads.values() if r.phase != "ended"]
    if not running:
        rows = sum(sum(e - s for s, e in ranges.items()) for ranges in coming.received)
        return [f"offers of the producer: {rows} of {coming.tokens * len(coming.received)} rows"]
    return [f"read {r.read} from {r.peer} ({r.phase})" for r in running[:_PARTIES_MAX]]


def last_event(state: State, wait: Wait) -> Work[Entry | None]:
    """The latest recorded transition that names what waits; None if it was long ago."""
    names = _naming(wait.key)
    recent = state.story.newest_first(_STORY_DEPTH)
    yield
    for number, raw in enumerate(recent):
        # What waits stands in front; a long tail of keys is the blocks of a reservation.
        if any(names(key) for key in raw[1][:_KEYS_MAX]):
            return Entry(*raw)
        if number % (8 * STRIDE) == 0:
            yield
    return None


def _naming(wanted: Hashable) -> Callable[[object], bool]:
    if isinstance(wanted, str):
        return lambda key: key == wanted or (isinstance(key, ReadId) and key.transfer == wanted)
    return lambda key: key == wanted
