"""One hold: who may still touch memory, until when we believe it, and how doubt grows.

A hold never ends by the clock (R5). What a passed deadline does is raise doubt, step by step:

    none --deadline--> suspect --asked in vain--> fencing --cannot--> quarantined
      ^                   |
      +----- "running" ---+

Each step only *asks* (truth from the executor, then a fence), again at every interval, because any
question may be lost (R9). The hold itself is lifted by a completion, by a truth that says nothing
is running, or by a fence: see `release.py`.

The one exception is an offered read: before the grant the reader may not touch memory (R5a), so
its hold protects nothing yet and is revoked at its deadline without any fence.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, IntEnum

from kvd.core.ids import Owner
from kvd.core.record import record


class HoldKind(Enum):
    """Which use of a slot a hold stands for."""

    COMPUTE = "compute"
    SAVE = "save"
    READ = "read"


class Phase(Enum):
    """OFFERED: the reader has no grant yet and may not touch. RUNNING: it may."""

    OFFERED = "offered"
    RUNNING = "running"


class Doubt(IntEnum):
    """How far the doubt about a late hold has gone."""

    NONE = 0
    SUSPECT = 1
    FENCING = 2
    QUARANTINED = 3


class Truth(Enum):
    """What an executor answers about a hold it is asked about."""

    NEVER_STARTED = "never_started"
    RUNNING = "running"
    ENDED_OK = "ended_ok"
    ENDED_FAILED = "ended_failed"
    UNKNOWN = "unknown"


class Ask(Enum):
    """What ageing a hold asks the shell to do."""

    OFFER = "offer"
    TRUTH = "truth"
    FENCE = "fence"
    REVOKE = "revoke"


@record
class Timing:
    """Deadlines of holds, nanoseconds; from the `release` section of the configuration."""

    compute: int = 60_000_000_000
    save: int = 20_000_000_000
    offer: int = 10_000_000_000
    read: int = 5_000_000_000
    interval: int = 500_000_000
    query_attempts: int = 6
    read_attempts: int = 2


@record
class Hold:
    """A named party that may still touch a slot's memory.

    kind, owner: the name; a completion lifts exactly the hold with this name (R3).
    executor:    the process that touches the memory ('' for a read that is only offered).
    deadline:    when doubt (or, for an offer, revocation) begins, ns.
    ask_at:      when the next question or repeated offer is due, ns.
    asked:       questions asked in the present state of doubt.
    """

    kind: HoldKind
    owner: Owner
    executor: str
    deadline: int
    ask_at: int
    phase: Phase = Phase.RUNNING
    doubt: Doubt = Doubt.NONE
    asked: int = 0

    def is_named(self, kind: HoldKind, owner: Owner) -> bool:
        """Whether this is the hold of that name."""
        return self.kind is kind and self.owner == owner


def running(kind: HoldKind, owner: Owner, executor: str, now: int, limit: int) -> Hold:
    """A hold whose party may touch memory from `now` on; doubt begins after `limit` ns."""
    return Hold(kind, owner, executor, now + limit, now + limit)


def offered(owner: Owner, now: int, timing: Timing) -> Hold:
    """A read that waits for its claim; offered again at every interval until its deadline."""
    return Hold(
        HoldKind.READ,
        owner,
        "",
        now + timing.offer,
        now + timing.interval,
        Phase.OFFERED,
    )


def granted(hold: Hold, executor: str, now: int, timing: Timing) -> Hold:
    """The same read once the reader may touch memory."""
    return running(HoldKind.READ, hold.owner, executor, now, timing.read)


def age(hold: Hold, now: int, timing: Timing) -> tuple[Hold, Ask | None]:
    """Let time pass for one hold.

    Returns: the hold as it is now, and what has to be asked, if anything. `Ask.REVOKE` means that
        the caller must drop the hold (it was only offered).
    """
    if now < hold.ask_at:
        return hold, None
    if hold.phase is Phase.OFFERED:
        if now >= hold.deadline:
            return hold, Ask.REVOKE
        return replace(hold, ask_at=now + timing.interval), Ask.OFFER
    if hold.doubt is Doubt.NONE:
        doubted = replace(hold, doubt=Doubt.SUSPECT, asked=1, ask_at=now + timing.interval)
        return doubted, Ask.TRUTH
    if hold.doubt is Doubt.SUSPECT and hold.asked < timing.query_attempts:
        return replace(hold, asked=hold.asked + 1, ask_at=now + timing.interval), Ask.TRUTH
    return _fencing(hold, now, timing), Ask.FENCE


def doubt_further(hold: Hold, now: int, timing: Timing) -> Hold:
    """The executor does not know this hold: only a fence can lift it now."""
    return _fencing(hold, now, timing)


def still_running(hold: Hold, now: int, limit: int) -> Hold:
    """The executor says it is running: believe it for another `limit` ns."""
    return replace(hold, doubt=Doubt.NONE, asked=0, deadline=now + limit, ask_at=now + limit)


def quarantined(hold: Hold, now: int, timing: Timing) -> Hold:
    """Nobody can prove the party gone. It stays held and visible; the fence is still asked for."""
    return replace(hold, doubt=Doubt.QUARANTINED, asked=0, ask_at=now + 10 * timing.interval)


def limit_of(kind: HoldKind, timing: Timing) -> int:
    """How long a running hold of this kind is believed without a word, ns."""
    if kind is HoldKind.COMPUTE:
        return timing.compute
    return timing.save if kind is HoldKind.SAVE else timing.read


def _fencing(hold: Hold, now: int, timing: Timing) -> Hold:
    if hold.doubt is Doubt.QUARANTINED:
        return replace(hold, asked=hold.asked + 1, ask_at=now + 10 * timing.interval)
    asked = hold.asked + 1 if hold.doubt is Doubt.FENCING else 1
    return replace(hold, doubt=Doubt.FENCING, asked=asked, ask_at=now + timing.interval)
