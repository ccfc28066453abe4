"""A small world of one slot, and every event that can be said about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvd.core import slot_events as ev
from kvd.core.holds import HoldKind, Timing, Truth
from kvd.core.ids import MemberRef, Owner, ReadId, SlotRef
from kvd.core.slot import COMPUTE_OWNER, Rules

MEMBER = MemberRef("p", "worker0", 7)
HERE = SlotRef(MEMBER, 3, 20)
"""The tenancy that every exploration starts with."""

STRANGER = "kvd#stranger"


@dataclass(frozen=True, slots=True)
class World:
    """How many parties a tenancy has, and how far the exploration goes.

    attempts, questions: limits of the rules (`read_attempts`, `query_attempts`).
    executors:           processes that read for the readers.
    doubts_max:          states in which more holds than this are in doubt are not explored further.
    """

    readers: int
    savers: int
    attempts: int = 1
    questions: int = 1
    executors: int = 1
    doubts_max: int = 9

    def __str__(self) -> str:
        words = [f"{self.readers} readers", f"{self.savers} savers"]
        words += [f"{self.attempts} attempts", f"{self.questions} questions"]
        words += [f"{self.executors} reading processes"] if self.executors > 1 else []
        words += [f"at most {self.doubts_max} in doubt"] if self.doubts_max < 9 else []
        return ", ".join(words)

    @property
    def is_large(self) -> bool:
        """Whether events of other tenancies are tried with one foreign name only."""
        return self.readers + self.savers > 1

    @property
    def rules(self) -> Rules:
        """Rules of this world; its `max_readers` is met exactly."""
        timing = Timing(read_attempts=self.attempts, query_attempts=self.questions)
        return Rules(timing=timing, max_readers=self.readers)

    @property
    def reader_kvds(self) -> tuple[str, ...]:
        """Names of the reading processes."""
        return tuple(f"kvd#{at}" for at in range(self.executors))

    @property
    def saver_names(self) -> tuple[str, ...]:
        """Names of the SAVE holds."""
        return tuple(f"s{at}" for at in range(self.savers))

    def reads(self, attempt: int = 0) -> tuple[ReadId, ...]:
        """Names of the reads in one attempt."""
        return tuple(ReadId("abcd"[at], 5, 0, attempt) for at in range(self.readers))

    def written(self, ref: SlotRef) -> ev.Written:
        """The step that arms everything."""
        saves = tuple(ev.SaveSpec(saver, (at,), (4,)) for at, saver in enumerate(self.saver_names))
        reads = tuple(ev.ReadSpec(read, "peer", 4) for read in self.reads())
        return ev.Written(ref, 5, saves, reads)


def said_of(world: World, ref: SlotRef) -> Iterator[ev.SlotEvent]:
    """Every event but the passing of time, with every name, outcome and process, known or not."""
    yield ev.Acquired(ref, 5)
    yield from (ev.LoadEnded(ref, ok) for ok in (True, False))
    yield from (ev.Computed(ref, ok) for ok in (True, False))
    yield ev.Poisoned(ref)
    yield ev.Abandoned(ref)
    yield from _written(world, ref)
    executors = (str(ref.member), STRANGER, "", *world.reader_kvds)
    yield from (ev.ExecutorDied(ref, executor) for executor in executors)
    for saver in (*world.saver_names, "s9"):
        yield from (ev.SaveEnded(ref, saver, ok) for ok in (True, False))
    for read in _reads(world):
        yield ev.ReadDeclined(ref, read)
        for executor in (*world.reader_kvds, STRANGER):
            yield ev.ReadClaimed(ref, read, executor, 1)
            yield from (ev.ReadEnded(ref, read, executor, ok) for ok in (True, False))
    for kind, owner in _parties(world):
        yield from (ev.Answered(ref, kind, owner, truth) for truth in Truth)
        yield ev.Fenced(ref, kind, owner)
        yield ev.Unfenceable(ref, kind, owner)


def _written(world: World, ref: SlotRef) -> Iterator[ev.Written]:
    written = world.written(ref)
    yield written
    too_many = tuple(ReadId(f"z{at}", 5, 0, 0) for at in range(world.readers + 1))
    yield replace(written, reads=tuple(ev.ReadSpec(read, "peer", 4) for read in too_many))
    save = ev.SaveSpec("s0", (1,), (4,))
    yield replace(written, saves=(save, save))
    if world.readers > 1:
        first = written.reads[0]
        yield replace(written, reads=(first, first))
        retry = replace(first, read=first.read.next_attempt())
        yield replace(written, reads=(first, retry))


def _reads(world: World) -> Iterator[ReadId]:
    for attempt in range(world.attempts + 1):
        yield from world.reads(attempt)
    yield ReadId("z", 5, 0, 0)


def _parties(world: World) -> Iterator[tuple[HoldKind, Owner]]:
    yield HoldKind.COMPUTE, COMPUTE_OWNER
    yield HoldKind.SAVE, COMPUTE_OWNER
    yield from ((HoldKind.SAVE, saver) for saver in world.saver_names)
    yield from ((HoldKind.COMPUTE, saver) for saver in world.saver_names)
    yield from ((HoldKind.READ, read) for read in _reads(world))


def foreign_refs(ref: SlotRef) -> dict[SlotRef, str]:
    """Names of other tenancies, and the reason with which their events are ignored."""
    older = ref.member._replace(incarnation=ref.member.incarnation - 1)
    newer = ref.member._replace(incarnation=ref.member.incarnation + 1)
    other = ref.member._replace(engine="q")
    return {
        ref._replace(epoch=ref.epoch - 1): "stale_epoch",
        ref._replace(epoch=ref.epoch + 1): "future_epoch",
        ref._replace(member=older): "stale_incarnation",
        ref._replace(member=newer): "stale_incarnation",
        ref._replace(member=other, epoch=ref.epoch + 1): "stale_incarnation",
    }
