"""The oracle: who may really touch one slot, kept as dumb books from the rules R1 to R11 alone.

It shares no code with `kvd.core.release`: parties are dict entries under their names, every rule
is spelled out in full, and time is no clock but two plain sets, given by whoever drives it:
the parties whose next question is due, and the offers whose deadline is past.

`step` says what has to follow from an event; `mismatches` compares a real slot with the books.
Both the exhaustive exploration and the hypothesis machines use it; a simulator can as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvd.core import slot_events as ev
from kvd.core.holds import Doubt, HoldKind, Phase, Truth
from kvd.core.ids import Owner, ReadId, SlotRef
from kvd.core.slot import Rules, Slot


class Party(NamedTuple):
    """Somebody who may touch the slot, by name."""

    kind: HoldKind
    owner: Owner


ENGINE = Party(HoldKind.COMPUTE, "engine")


@dataclass(slots=True)
class Doubted:
    """How much a touching party is doubted: questions asked, fence asked for, given up."""

    questions: int = 0
    fence_asked: bool = False
    given_up: bool = False

    @property
    def level(self) -> Doubt:
        """The word for it."""
        if self.given_up:
            return Doubt.QUARANTINED
        return Doubt.FENCING if self.fence_asked else Doubt.SUSPECT


class Ledger:
    """Books on one slot.

    touching:  party -> the process that touches the memory for it.
    promised:  reads that were offered and not granted yet.
    doubted:   touching party -> how much it is doubted.
    written:   whether the rows of this tenancy are final.
    bad:       whether its data must not become readable.
    saves:     saver -> None while it copies, else whether it ended well.
    """

    def __init__(self, ref: SlotRef, rules: Rules) -> None:
        self.rules = rules
        self._open_books(ref)

    def _open_books(self, ref: SlotRef) -> None:
        self.ref = ref
        self.touching: dict[Party, str] = {}
        self.promised: set[ReadId] = set()
        self.doubted: dict[Party, Doubted] = {}
        self.written = False
        self.bad = False
        self.saves: dict[str, bool | None] = {}

    def copy(self) -> Ledger:
        """Independent books with the same entries."""
        other = Ledger(self.ref, self.rules)
        other.touching = dict(self.touching)
        other.promised = set(self.promised)
        other.doubted = {
            party: Doubted(doubt.questions, doubt.fence_asked, doubt.given_up)
            for party, doubt in self.doubted.items()
        }
        other.written = self.written
        other.bad = self.bad
        other.saves = dict(self.saves)
        return other

    # What the books say -----------------------------------------------------------------------

    @property
    def is_used(self) -> bool:
        """Whether anybody touches the slot or was promised to."""
        return bool(self.touching or self.promised)

    @property
    def saves_done(self) -> bool:
        """Whether the tenancy was saved, in full and well."""
        return bool(self.saves) and all(self.saves.values())

    @property
    def memory(self) -> tuple[bool, ...]:
        """What the books know of the past that the holds do not show."""
        return self.written, self.bad, False in self.saves.values(), True in self.saves.values()

    def is_due(self, event: ev.SlotEvent) -> bool:
        """Whether the event means something now; else it must change nothing and say why."""
        if event.ref != self.ref:
            return False
        match event:
            case ev.Acquired():
                return not self.is_used
            case ev.Written(_, _, saves, reads):
                return self._may_arm(saves, reads)
            case ev.Computed():
                return ENGINE in self.touching or not self.is_used
            case ev.SaveEnded(_, saver):
                return Party(HoldKind.SAVE, saver) in self.touching
            case ev.ReadClaimed(_, read, executor):
                return read in self.promised or self._may_grant_again(read, executor)
            case ev.ReadDeclined(_, read):
                return read in self.promised
            case ev.ReadEnded(_, read, executor):
                return self.touching.get(Party(HoldKind.READ, read)) == executor
            case ev.Answered(_, kind, owner, truth):
                doubt = self.doubted.get(Party(kind, owner))
                return doubt is not None and not (truth is Truth.UNKNOWN and doubt.fence_asked)
            case ev.Fenced(_, kind, owner):
                doubt = self.doubted.get(Party(kind, owner))
                return doubt is not None and doubt.fence_asked
            case ev.Unfenceable(_, kind, owner):
                doubt = self.doubted.get(Party(kind, owner))
                return doubt is not None and doubt.fence_asked and not doubt.given_up
            case ev.ExecutorDied(_, executor):
                return executor in self.touching.values()
            case ev.Poisoned():
                return self.is_used and not self.bad
            case ev.Abandoned():
                return self.is_used
            case ev.Ticked() | ev.LoadEnded():
                return True

    def _may_arm(self, saves: tuple[ev.SaveSpec, ...], reads: tuple[ev.ReadSpec, ...]) -> bool:
        if self.written or self.bad or len(reads) > self.rules.max_readers:
            return False
        savers = {save.saver for save in saves}
        rows = {(spec.read.transfer, spec.read.layer, spec.read.start) for spec in reads}
        return len(savers) == len(saves) and len(rows) == len(reads)

    def _may_grant_again(self, read: ReadId, executor: str) -> bool:
        """A lost grant is repeated, but not once it may be answered that it never started."""
        party = Party(HoldKind.READ, read)
        return self.touching.get(party) == executor and party not in self.doubted

    def mismatches(self, slot: Slot) -> list[str]:
        """Where a real slot differs from the books."""
        held: dict[Party, str] = {}
        offered: set[ReadId] = set()
        found: list[str] = []
        for hold in slot.holds:
            party = Party(hold.kind, hold.owner)
            if hold.phase is Phase.OFFERED and isinstance(hold.owner, ReadId):
                offered.add(hold.owner)
            else:
                held[party] = hold.executor
            doubt = self.doubted.get(party)
            wanted = Doubt.NONE if doubt is None else doubt.level
            if hold.doubt is not wanted:
                found.append(f"{party.owner} is {hold.doubt.name}, wanted {wanted.name}")
        if len(held) + len(offered) != len(slot.holds):
            found.append("two holds have one name")
        if held != self.touching:
            found.append(f"touching {self.touching}, held {held}")
        if offered != self.promised:
            found.append(f"promised {self.promised}, offered {offered}")
        if slot.ref != self.ref:
            found.append(f"is {self.ref}, says {slot.ref}")
        if slot.is_free == self.is_used:
            found.append("free while somebody may touch it" if slot.is_free else "held by nobody")
        if slot.poisoned != self.bad or slot.armed != self.written:
            found.append("poisoned or armed differs")
        return found

    # What must follow -------------------------------------------------------------------------

    def step(
        self,
        event: ev.SlotEvent,
        due: Iterable[Party] = (),
        expired: Iterable[ReadId] = (),
    ) -> list[ev.SlotEffect]:
        """Book an event that `is_due`; returns the effects it must have, Release last.

        due:     for `Ticked`: touching parties whose next question, offers whose repetition is due.
        expired: for `Ticked`: offers whose deadline is past.
        """
        out: list[ev.SlotEffect] = []
        was_used = self.is_used
        match event:
            case ev.Acquired():
                self._start(ENGINE, str(self.ref.member))
            case ev.Written(_, _, saves, reads):
                was_used = True
                self._arm(saves, reads, out)
            case ev.Computed(_, ok):
                was_used = True
                self._stop_engine(ok, out)
            case ev.SaveEnded(_, saver, ok):
                self._stop_save(saver, ok, out)
            case ev.ReadClaimed(_, read, executor, claim):
                self.promised.discard(read)
                self.touching[Party(HoldKind.READ, read)] = executor
                out.append(ev.GrantRead(self.ref, read, executor, claim))
            case ev.ReadDeclined(_, read):
                self.promised.remove(read)
                out.append(ev.FailRead(self.ref, read, "declined"))
            case ev.ReadEnded(_, read, _, ok):
                self._stop_read(read, ok, out)
            case ev.Answered(_, kind, owner, truth):
                self._hear(Party(kind, owner), truth, out)
            case ev.Fenced(_, kind, owner):
                self._stopped_by_force(Party(kind, owner), out)
            case ev.Unfenceable(_, kind, owner):
                self.doubted[Party(kind, owner)].given_up = True
                out.append(ev.ReportQuarantine(self.ref, kind, owner))
            case ev.ExecutorDied(_, executor):
                for party in [p for p, who in self.touching.items() if who == executor]:
                    self._stopped_by_force(party, out)
            case ev.Poisoned():
                self._spoil(out)
            case ev.Abandoned():
                self._fail_promised("producer_gone", out)
            case ev.Ticked():
                self._doubt_more(due, expired, out)
            case ev.LoadEnded():
                pass
        if was_used and not self.is_used:
            out.append(ev.Release(self.ref))
            self._open_books(self.ref._replace(epoch=self.ref.epoch + 1))
        return out

    def _start(self, party: Party, executor: str) -> None:
        self.touching[party] = executor

    def _end(self, party: Party) -> None:
        del self.touching[party]
        self.doubted.pop(party, None)

    def _arm(
        self,
        saves: tuple[ev.SaveSpec, ...],
        reads: tuple[ev.ReadSpec, ...],
        out: list[ev.SlotEffect],
    ) -> None:
        member = str(self.ref.member)
        self.touching.setdefault(ENGINE, member)
        self.written = True
        for save in saves:
            self._start(Party(HoldKind.SAVE, save.saver), member)
            self.saves[save.saver] = None
        for spec in reads:
            self.promised.add(spec.read)
            out.append(ev.OfferRead(self.ref, spec.read))

    def _stop_engine(self, ok: bool, out: list[ev.SlotEffect]) -> None:
        if not ok and not self.written:
            self._spoil(out)
        if ENGINE in self.touching:
            self._end(ENGINE)

    def _stop_save(self, saver: str, ok: bool, out: list[ev.SlotEffect]) -> None:
        self._end(Party(HoldKind.SAVE, saver))
        self.saves[saver] = ok
        out.append(ev.SettleSave(self.ref, saver, ok and not self.bad))
        if self.saves_done and not self.bad:
            out.extend(ev.RedirectRead(self.ref, read) for read in self.promised)
            self.promised.clear()

    def _stop_read(self, read: ReadId, ok: bool, out: list[ev.SlotEffect]) -> None:
        self._end(Party(HoldKind.READ, read))
        if self.bad:
            out.append(ev.FailRead(self.ref, read, "poisoned"))
        elif ok:
            out.append(ev.FinishRead(self.ref, read))
        elif read.attempt + 1 >= self.rules.timing.read_attempts:
            out.append(ev.FailRead(self.ref, read, "read_failed"))
        else:
            again = ReadId(read.transfer, read.layer, read.start, read.attempt + 1)
            if self.saves_done:
                out.append(ev.RedirectRead(self.ref, again))
            else:
                self.promised.add(again)
                out.append(ev.OfferRead(self.ref, again))

    def _spoil(self, out: list[ev.SlotEffect]) -> None:
        if not self.bad:
            out.append(ev.PoisonTenancy(self.ref))
        self.bad = True
        self._fail_promised("poisoned", out)

    def _fail_promised(self, why: str, out: list[ev.SlotEffect]) -> None:
        out.extend(ev.FailRead(self.ref, read, why) for read in self.promised)
        self.promised.clear()

    def _stopped_by_force(self, party: Party, out: list[ev.SlotEffect]) -> None:
        if party.kind is HoldKind.COMPUTE:
            self._stop_engine(False, out)
        elif party.kind is HoldKind.SAVE:
            assert isinstance(party.owner, str)
            self._end(party)
            self.saves[party.owner] = False
            out.append(ev.SettleSave(self.ref, party.owner, False))
        else:
            assert isinstance(party.owner, ReadId)
            self._end(party)
            out.append(ev.FailRead(self.ref, party.owner, "reader_gone"))

    def _hear(self, party: Party, truth: Truth, out: list[ev.SlotEffect]) -> None:
        if truth is Truth.RUNNING:
            del self.doubted[party]
        elif truth is Truth.UNKNOWN:
            self.doubted[party].fence_asked = True
            out.append(ev.AskFence(self.ref, *party, self.touching[party]))
        elif party.kind is HoldKind.COMPUTE:
            self._stop_engine(truth is Truth.ENDED_OK, out)
        elif isinstance(party.owner, ReadId):
            self._stop_read(party.owner, truth is Truth.ENDED_OK, out)
        else:
            self._stop_save(party.owner, truth is Truth.ENDED_OK, out)

    def _doubt_more(
        self, due: Iterable[Party], expired: Iterable[ReadId], out: list[ev.SlotEffect]
    ) -> None:
        for read in expired:
            self.promised.discard(read)
            out.append(ev.FailRead(self.ref, read, "not_claimed"))
        for party in due:
            if isinstance(party.owner, ReadId) and party.owner in self.promised:
                out.append(ev.OfferRead(self.ref, party.owner))
            elif party in self.touching:
                self._ask(party, out)

    def _ask(self, party: Party, out: list[ev.SlotEffect]) -> None:
        doubt = self.doubted.setdefault(party, Doubted())
        executor = self.touching[party]
        if not doubt.fence_asked and doubt.questions < self.rules.timing.query_attempts:
            doubt.questions += 1
            out.append(ev.AskTruth(self.ref, *party, executor))
        else:
            doubt.fence_asked = True
            out.append(ev.AskFence(self.ref, *party, executor))
