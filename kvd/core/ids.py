"""Names of the things kvd keeps books on, and the words for them.

Glossary (one meaning each):

engine       one data-parallel rank of one LLM engine; it has *members*
member       a process of an engine (scheduler, worker rank r) with an *incarnation* of its own
incarnation  one life of a member process; new on every start
boot id      one life of a kvd
slot         index of a layer buffer in kvd's books; belongs to a worker member
epoch        how many times a slot has been released; +1 at each release, by kvd alone
occupant     (request set, layer, chunk) that uses a slot now; its time there is a *tenancy*
hold         a named party that may still touch a slot's memory
pin          the same for a host block
step         a member's pass over its layers; it may keep the blocks of all of them at once
span         the byte range of one (layer, part, rank) in a block
executor     the process whose death proves that a hold's party is gone
suspect      a hold whose deadline passed; still a hold
fence        proof that a suspect party cannot touch memory any more
quarantined  suspect and not fenceable
"""

from __future__ import annotations

from typing import NamedTuple


class MemberRef(NamedTuple):
    """One life of one member process of an engine."""

    engine: str
    member: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.engine}/{self.member}#{self.incarnation:x}"


class SlotRef(NamedTuple):
    """One tenancy of one slot: what every event about a slot names."""

    member: MemberRef
    slot: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.member}/slot{self.slot}@{self.epoch}"


def slot_ref(member: MemberRef, slot: int, epoch: int) -> SlotRef:
    """The same as `SlotRef(...)` in half its time; for what happens once per event."""
    return tuple.__new__(SlotRef, (member, slot, epoch))


class ReadId(NamedTuple):
    """One attempt of one reader to pull the rows [start, ...) of one layer of one transfer.

    The attempt is part of the name, so that a late end of attempt 1 can never be taken for the
    end of attempt 2 of the same rows in the same tenancy.
    """

    transfer: str
    layer: int
    start: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.transfer}/L{self.layer}+{self.start}.{self.attempt}"

    def next_attempt(self) -> ReadId:
        """The name under which the same rows are offered again."""
        return self._replace(attempt=self.attempt + 1)


class RequestKey(NamedTuple):
    """A request of an engine: owner of reservations and pins."""

    engine: str
    request: str

    def __str__(self) -> str:
        return f"{self.engine}/{self.request}"


class LoadId(NamedTuple):
    """The load of one tenancy: it pins its source blocks until it ended or is fenced."""

    ref: SlotRef
    kind: str = "load"
    part: int = 0

    def __str__(self) -> str:
        return f"load {self.ref}"


class SaveId(NamedTuple):
    """The save of one tenancy by one saver: it keeps its target blocks until it ended."""

    ref: SlotRef
    saver: str

    def __str__(self) -> str:
        return f"save {self.ref} by {self.saver}"


class StepId(NamedTuple):
    """A step of a member: it keeps all blocks that its layers copy, until it was closed and the
    last of these copies has ended."""

    member: MemberRef
    number: int
    kind: str = "step"

    def __str__(self) -> str:
        return f"step {self.number} of {self.member}"


Owner = str | ReadId
"""Who holds a slot: a member or saver by name, a reader by its read."""

Pin = RequestKey | LoadId | ReadId | StepId
"""Who pins a block."""


def member_executor(ref: MemberRef) -> str:
    """The executor name of a member process."""
    return str(ref)


def kvd_executor(boot_id: str) -> str:
    """The executor name of a kvd that reads for its engines."""
    return f"kvd#{boot_id}"


def executor_at(address: str) -> str:
    """The executor name of whichever kvd read for the engine at this address.

    Used for reads that a member announces: which life of that kvd was granted is not known.
    """
    return f"kvd@{address}"
