"""A dumb world round the release rule: memory, copies that really touch it, and a bad post.

Nothing here knows the rule. The engine overwrites a buffer when its gate word lets it; copies
note what they saw when they began; whoever overwrites memory that a copy still touches, or sees
it change under a copy, raises `Corruption`. Letters between the parties may be late, lost,
repeated and out of order, but for what a member says of its own slots: that is numbered,
acknowledged and resent, so it arrives in order (and may arrive again).

What the world relies on of the parties, and kvd may rely on of real ones:
* a save starts only once its `Written` was accepted;
* a reader starts only with the grant of a claim that it has not given up;
* who answers "never started" has given its claim up;
* what was stopped by a fence never starts again under its name;
* a member's answers come in order with its own events.
"""

from __future__ import annotations

from collections import deque

from kvd.core import slot_events as ev
from kvd.core.holds import HoldKind, Truth
from kvd.core.ids import MemberRef, ReadId, SlotRef
from kvd.core.release import transition
from kvd.core.slot import Rules, Slot
from tests.stateful.dma_parts import Copy, Corruption, Letter, Reader, Tenancy

MEMBER = MemberRef("p", "w0", 1)


class DmaWorld:
    """Slots of one member, its engine, reading kvds, and the post between them."""

    def __init__(self, num_slots: int, readers: tuple[str, ...], rules: Rules) -> None:
        self.rules = rules
        self.now = 0
        self.slots = [Slot(SlotRef(MEMBER, index, 0)) for index in range(num_slots)]
        self.gate = [0] * num_slots
        self.last_acquired = [-1] * num_slots
        self.memory = [0] * num_slots
        self.stamps = 0
        self.member_alive = True
        self.tenancies: dict[int, Tenancy] = {}
        self.contents: dict[SlotRef, int] = {}
        self.pool: dict[SlotRef, dict[str, int]] = {}
        self.announced: dict[SlotRef, set[str]] = {}
        self.bad: set[SlotRef] = set()
        self.readers = {name: Reader(name) for name in readers}
        self.own: deque[ev.SlotEvent] = deque()
        self.post: list[Letter] = []
        self.past: list[Letter] = []
        self.claim_no = 0
        self.releases: set[SlotRef] = set()
        self.promised: set[tuple[SlotRef, ReadId]] = set()
        self.outcomes: dict[tuple[SlotRef, ReadId], str] = {}

    # The engine ------------------------------------------------------------------------------

    def can_acquire(self, index: int) -> bool:
        """Whether the gate word lets the engine write (greater than what it last acquired)."""
        return self.member_alive and self.gate[index] > self.last_acquired[index]

    def acquire(self, index: int) -> None:
        """Overwrite the buffer, and say so."""
        touching = [copy.owner for copy in self.copies() if copy.ref.slot == index]
        if touching:
            raise Corruption(f"slot {index} is overwritten while {touching} copy out of it")
        epoch = self.last_acquired[index] = self.gate[index]
        self.stamps += 1
        self.memory[index] = self.stamps
        ref = SlotRef(MEMBER, index, epoch)
        self.contents[ref] = self.stamps
        self.tenancies[index] = Tenancy(ref, self.stamps)
        self.own.append(ev.Acquired(ref, 0))

    def write(self, index: int, savers: int, reads: int) -> None:
        """The rows are final: announce saves and reads."""
        tenancy = self.tenancies[index]
        tenancy.written = True
        saves = tuple(ev.SaveSpec(f"s{at}", (at,), (4,)) for at in range(savers))
        specs = tuple(ev.ReadSpec(ReadId(f"t{at}", 0, 0, 0), "peer", 4) for at in range(reads))
        self.own.append(ev.Written(tenancy.ref, 0, saves, specs))

    def compute_end(self, index: int, ok: bool) -> None:
        """Attention over the buffer has ended."""
        tenancy = self.tenancies[index]
        tenancy.computing = False
        self.own.append(ev.Computed(tenancy.ref, ok))

    def poison(self, index: int) -> None:
        """The engine finds that the rows of this tenancy are wrong (its load failed)."""
        self.own.append(ev.Poisoned(self.tenancies[index].ref))

    def save_begin(self, index: int, saver: str) -> None:
        """A copy into the pool begins."""
        tenancy = self.tenancies[index]
        tenancy.may_save.discard(saver)
        tenancy.saving[saver] = Copy(tenancy.ref, saver, self.memory[index])

    def save_end(self, index: int, saver: str, ok: bool) -> None:
        """A copy into the pool has ended."""
        tenancy = self.tenancies[index]
        copy = tenancy.saving.pop(saver)
        self._check_unchanged(copy)
        tenancy.saved[saver] = ok
        if ok:
            self.pool.setdefault(tenancy.ref, {})[saver] = copy.saw
        self.own.append(ev.SaveEnded(tenancy.ref, saver, ok))

    def member_dies(self) -> None:
        """The engine's process is gone, and its copies with it; kvd is told by the kernel."""
        self.member_alive = False
        self.tenancies.clear()
        self.own.clear()
        for slot in list(self.slots):
            self.feed(ev.ExecutorDied(slot.ref, str(MEMBER)))
            self.feed(ev.Abandoned(self.slots[slot.ref.slot].ref))

    # Readers -----------------------------------------------------------------------------------

    def claim(self, reader: Reader, ref: SlotRef, read: ReadId) -> None:
        """Ask for a grant; any earlier claim for the same read is given up."""
        self.claim_no += 1
        reader.claims[ref, read] = self.claim_no
        self.send("kvd", ev.ReadClaimed(ref, read, reader.name, self.claim_no))

    def read_end(self, reader: Reader, key: tuple[SlotRef, ReadId], ok: bool) -> None:
        """A copy of a reader has ended."""
        self._check_unchanged(reader.copies.pop(key))
        reader.ended[key] = ok
        self.send("kvd", ev.ReadEnded(*key, reader.name, ok))

    def reader_dies(self, reader: Reader) -> None:
        """A reading kvd is gone, its copies with it, and another life of it takes its place."""
        reader.alive = False
        reader.copies.clear()
        reader.claims.clear()
        again = Reader(f"{reader.name}'")
        self.readers[again.name] = again

    def report_death(self, reader: Reader) -> None:
        """It is proven that a reading kvd is gone."""
        for slot in list(self.slots):
            self.feed(ev.ExecutorDied(slot.ref, reader.name))

    # The post ----------------------------------------------------------------------------------

    def send(self, to: str, what: ev.SlotEvent | ev.SlotEffect) -> None:
        """Put a letter into the post."""
        self.post.append(Letter(to, what))

    def deliver_own(self) -> None:
        """The member's next event arrives."""
        event = self.own.popleft()
        self.past.append(Letter("kvd", event))
        effects = self.feed(event)
        accepted = not any(isinstance(effect, ev.Ignore) for effect in effects)
        tenancy = self.tenancies.get(event.ref.slot)
        if isinstance(event, ev.Written) and accepted and tenancy and tenancy.ref == event.ref:
            tenancy.may_save |= self.announced[event.ref] - tenancy.stopped

    def deliver(self, letter: Letter) -> None:
        """A letter arrives."""
        self.past.append(letter)
        what = letter.what
        if letter.to == "kvd":
            self.feed(what)  # type: ignore[arg-type]
        elif letter.to == str(MEMBER):
            if self.member_alive:
                self._member_hears(what)
        elif letter.to in self.readers and self.readers[letter.to].alive:
            self._reader_hears(self.readers[letter.to], what)

    def feed(self, event: ev.SlotEvent) -> tuple[ev.SlotEffect, ...]:
        """Let kvd handle an event, and put what it wants done into the post."""
        index = event.ref.slot
        self.slots[index], effects = transition(self.slots[index], event, self.now, self.rules)
        refused = any(isinstance(effect, ev.Ignore) for effect in effects)
        if isinstance(event, ev.Written) and not refused:
            self.announced[event.ref] = {save.saver for save in event.saves}
            self.promised |= {(event.ref, spec.read) for spec in event.reads}
        elif isinstance(event, ev.Poisoned) and not refused:
            self.bad.add(event.ref)
        for effect in effects:
            self._perform(effect)
        return effects

    def _perform(self, effect: ev.SlotEffect) -> None:
        match effect:
            case ev.Release(ref):
                if ref in self.releases:
                    raise Corruption(f"{ref} is released twice")
                self.releases.add(ref)
                self.gate[ref.slot] = ref.epoch + 1
            case ev.OfferRead():
                for reader in self.readers.values():
                    if reader.alive:
                        self.send(reader.name, effect)
            case ev.GrantRead(_, _, executor):
                self.send(executor, effect)
            case ev.AskTruth(_, _, _, executor) | ev.AskFence(_, _, _, executor):
                self.send(executor, effect)
            case ev.RedirectRead(ref, read):
                self._end_once(ref, read.transfer, "redirected")
                if not self._is_in_pool(ref):
                    raise Corruption(f"{read} of {ref} is redirected to rows that nobody saved")
            case ev.FinishRead(ref, read):
                self._end_once(ref, read.transfer, "finished")
                if ref in self.bad:
                    raise Corruption(f"{read} of {ref} is said to have good rows")
            case ev.SettleSave(ref, saver, True):
                if ref in self.bad or saver not in self.pool.get(ref, {}):
                    raise Corruption(f"save {saver} of {ref} is said to be good")
            case ev.FailRead(ref, read):
                self._end_once(ref, read.transfer, "failed")
            case _:
                pass

    def _end_once(self, ref: SlotRef, transfer: str, outcome: str) -> None:
        key = (ref, ReadId(transfer, 0, 0, 0))
        if key in self.outcomes:
            raise Corruption(f"{transfer} of {ref} ended as {self.outcomes[key]} and {outcome}")
        self.outcomes[key] = outcome

    def _is_in_pool(self, ref: SlotRef) -> bool:
        saved = self.pool.get(ref, {})
        good = {saver for saver, content in saved.items() if content == self.contents[ref]}
        return ref not in self.bad and bool(good) and good == self.announced[ref]

    def _member_hears(self, what: ev.SlotEvent | ev.SlotEffect) -> None:
        if not isinstance(what, ev.AskTruth | ev.AskFence):
            return
        tenancy = self.tenancies.get(what.ref.slot)
        name = (what.ref, what.kind, what.owner)
        if tenancy is None or tenancy.ref != what.ref:
            self.own.append(ev.Answered(*name, Truth.UNKNOWN))
        elif isinstance(what, ev.AskFence):
            self._member_stops(tenancy, what)
        elif what.kind is HoldKind.COMPUTE:
            truth = Truth.RUNNING if tenancy.computing else Truth.ENDED_OK
            self.own.append(ev.Answered(*name, truth))
        elif isinstance(what.owner, str):
            self.own.append(ev.Answered(*name, self._truth_of_save(tenancy, what.owner)))

    def _truth_of_save(self, tenancy: Tenancy, saver: str) -> Truth:
        if saver in tenancy.saving:
            return Truth.RUNNING
        if saver in tenancy.saved:
            return Truth.ENDED_OK if tenancy.saved[saver] else Truth.ENDED_FAILED
        tenancy.may_save.discard(saver)
        tenancy.stopped.add(saver)
        return Truth.NEVER_STARTED

    def _member_stops(self, tenancy: Tenancy, what: ev.AskFence) -> None:
        if what.kind is HoldKind.COMPUTE:
            self.own.append(ev.Unfenceable(what.ref, what.kind, what.owner))
            return
        assert isinstance(what.owner, str)
        tenancy.saving.pop(what.owner, None)
        tenancy.may_save.discard(what.owner)
        tenancy.stopped.add(what.owner)
        self.own.append(ev.Fenced(what.ref, what.kind, what.owner))

    def _reader_hears(self, reader: Reader, what: ev.SlotEvent | ev.SlotEffect) -> None:
        if isinstance(what, ev.OfferRead):
            key = (what.ref, what.read)
            if not (key in reader.copies or key in reader.ended or key in reader.stopped):
                self.claim(reader, *key)
        elif isinstance(what, ev.GrantRead):
            key = (what.ref, what.read)
            if reader.claims.get(key) == what.claim and key not in reader.stopped:
                del reader.claims[key]
                self._read_begin(reader, key)
        elif isinstance(what, ev.AskTruth | ev.AskFence) and isinstance(what.owner, ReadId):
            self._reader_answers(reader, what, (what.ref, what.owner))

    def _read_begin(self, reader: Reader, key: tuple[SlotRef, ReadId]) -> None:
        ref, read = key
        content = self.memory[ref.slot]
        if content != self.contents[ref]:
            raise Corruption(f"{reader.name} begins to read {read} of {ref} in other rows")
        reader.copies[key] = Copy(ref, read, content)

    def _reader_answers(
        self, reader: Reader, what: ev.AskTruth | ev.AskFence, key: tuple[SlotRef, ReadId]
    ) -> None:
        name = (what.ref, what.kind, what.owner)
        if isinstance(what, ev.AskFence):
            reader.copies.pop(key, None)
            reader.claims.pop(key, None)
            reader.stopped.add(key)
            self.send("kvd", ev.Fenced(*name))
        elif key in reader.copies:
            self.send("kvd", ev.Answered(*name, Truth.RUNNING))
        elif key in reader.ended:
            truth = Truth.ENDED_OK if reader.ended[key] else Truth.ENDED_FAILED
            self.send("kvd", ev.Answered(*name, truth))
        else:
            reader.claims.pop(key, None)
            self.send("kvd", ev.Answered(*name, Truth.NEVER_STARTED))

    # Peace ---------------------------------------------------------------------------------------

    def settle_down(self, rounds_max: int) -> list[Slot]:
        """No more faults: the post works, copies and computations end, time passes.

        Returns: the slots that are still held after `rounds_max` rounds.
        """
        for _ in range(rounds_max):
            if not self.post and all(slot.is_free for slot in self.slots) and not self.own:
                return []
            for reader in self.readers.values():
                if reader.alive:
                    for key in list(reader.copies):
                        self.read_end(reader, key, True)
                else:
                    self.report_death(reader)
            self._engine_ends_everything()
            post, self.post = self.post, []
            for letter in post:
                self.deliver(letter)
            while self.own:
                self.deliver_own()
            self.now += self.rules.timing.compute
            for slot in list(self.slots):
                self.feed(ev.Ticked(slot.ref))
        return [slot for slot in self.slots if not slot.is_free]

    def _engine_ends_everything(self) -> None:
        for index, tenancy in self.tenancies.items():
            for saver in sorted(tenancy.may_save):
                self.save_begin(index, saver)
            for saver in list(tenancy.saving):
                self.save_end(index, saver, True)
            if tenancy.computing:
                self.compute_end(index, True)

    # What is true ------------------------------------------------------------------------------

    def copies(self) -> list[Copy]:
        """Every copy that touches a buffer now."""
        found = [copy for tenancy in self.tenancies.values() for copy in tenancy.saving.values()]
        for reader in self.readers.values():
            found += reader.copies.values()
        return found

    def _check_unchanged(self, copy: Copy) -> None:
        if self.memory[copy.ref.slot] != copy.saw:
            raise Corruption(f"{copy.owner} of {copy.ref} saw its rows change while it copied")

    def forgotten(self) -> list[tuple[SlotRef, ReadId]]:
        """Reads that were announced and have neither arrived nor failed nor been redirected."""
        return sorted(self.promised - self.outcomes.keys())

    def check(self) -> None:
        """Everybody who touches a slot has a hold on it, and free slots are published as such."""
        for copy in self.copies():
            slot = self.slots[copy.ref.slot]
            kind = HoldKind.READ if isinstance(copy.owner, ReadId) else HoldKind.SAVE
            if slot.ref != copy.ref or slot.find(kind, copy.owner) is None:
                raise Corruption(f"{copy.owner} of {copy.ref} touches memory without a hold")
        for index, slot in enumerate(self.slots):
            if slot.is_free and self.gate[index] != slot.ref.epoch:
                raise Corruption(f"slot {index} is free and its gate says otherwise")
