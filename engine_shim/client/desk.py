"""What a pipeline says about its slots: the only way to acquire one, and to report its steps.

Each call checks, changes the books and appends the slot event in one step under the client's lock,
so the books, the event stream and an announcement never contradict each other.

    acquire --> load_ended --> written --> save_started, save_ended ...
                                  |
                                  +------> computed

The caller reports each step once. What ends something (`load_ended`, `computed`, `save_ended`,
`poisoned`, `abandon`) never waits and is never refused for want of a connection: it has happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from engine_shim.client.announcements import AGAIN, RETRY_MAX_S, RETRY_MIN_S, Announcements
from engine_shim.client.errors import KvdRefused, SlotQuarantined
from engine_shim.client.gate_view import GateView
from engine_shim.client.options import left_ns, left_s
from engine_shim.client.session import Core, LinkState
from engine_shim.client.slots import Tenancy
from engine_shim.client.tickets import Ticket
from kvd.wire.gate_layout import (
    EPOCH_MAX,
    STATE_FREE,
    STATE_QUARANTINED,
    make_word,
    split_word,
)
from kvd.wire.slot_items import (
    AcquiredItem,
    BadSumItem,
    ComputedItem,
    LoadEndedItem,
    LoadItem,
    PoisonedItem,
    SaveEndedItem,
    SlotItem,
)

LOOK_S: Final = 0.25
"""How often a thread that waits for our own use of a slot looks whether kvd has given it up."""


class SlotDesk(Announcements):
    """The slots of one worker member."""

    def __init__(self, core: Core, member: str, contributes: bool = False) -> None:
        """member: for errors; contributes: whether it saves the spans that it loads."""
        super().__init__(core)
        self._member = member
        self._contributes = contributes

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self._core.books.num_slots

    # Acquire ----------------------------------------------------------------------------------

    def acquire(
        self,
        slot: int,
        layer: int = -1,
        loads: Sequence[LoadItem] = (),
        deadline_s: float | None = None,
        *,
        boot_id: bytes | None = None,
        early: bool = False,
    ) -> Tenancy:
        """Wait until the slot may be written, and take it.

        With loads, also wait until kvd has pinned what they read; then they may start. A span that
        is still being saved is waited for. A restart of kvd meanwhile is waited out.

        Args:
            slot: 0 .. num_slots - 1.
            layer: that will use it; required with loads.
            loads: blocks of the pool that will be copied into the slot.
            deadline_s: None for the client's default.
            boot_id: life of kvd that the blocks are of, None for the present one.
            early: a slot whose last tenancy was offered to nobody, and ended by our own word, is
                taken without waiting until kvd has heard it.

        Raises: KvdRefused; the slot is not taken, or has been given back:
            slot_unknown, deadline_exceeded, busy, unreachable, closed, process_forked;
            pool_lost: the blocks of `loads` are of an earlier life of kvd;
            what kvd answered to the loads (block_poisoned, request_ended ...).
            SlotQuarantined: rebind its layers to a spare slot.
        """
        core = self._core
        core.check_process()
        end = self._end(deadline_s)
        if not 0 <= slot < self.num_slots:
            count = self.num_slots
            raise KvdRefused("slot_unknown", slot=slot, count=count, member=self._member)
        core.await_event_room(end)
        sizes = core.sizes_of([AcquiredItem(slot, EPOCH_MAX, layer, list(loads))])
        tenancy, ticket = self._take(slot, layer, loads, sizes, boot_id, end, early)
        if not loads:
            return tenancy
        core.send()
        with ExitStack() as undo:
            undo.callback(self.abandon, tenancy)
            self._await_loads(tenancy, layer, loads, sizes, ticket, end)
            undo.pop_all()
        return tenancy

    def _take(
        self,
        slot: int,
        layer: int,
        loads: Sequence[LoadItem],
        sizes: Sequence[int],
        boot_id: bytes | None,
        end: int,
        early: bool,
    ) -> tuple[Tenancy, Ticket]:
        core = self._core
        gate: GateView | None = None
        while True:
            gate = core.await_gate(gate, end)
            if early:
                taken = self._take_early(gate, slot, layer, loads, sizes, boot_id, end)
                if taken is not None:
                    return taken
            spin_ns = core.options.spin_us * 1000
            outcome, epoch = gate.wait_free(slot, core.books.last(slot), left_ns(end), spin_ns)
            with core.lock:
                core.gate_waits[outcome] += 1
                if outcome == "free" and self._is_present(gate):
                    if boot_id is not None and boot_id != core.boot_id:
                        raise KvdRefused("pool_lost", what=f"the step of slot {slot}")
                    word = make_word(epoch, STATE_FREE)
                    if self._may_take(slot, word, end):
                        tenancy = core.books.take(slot, word, core.generation, layer, loads)
                        item = AcquiredItem(slot, epoch, layer, list(loads))
                        # Without loads kvd need not know: the next event of the tenancy says it.
                        return tenancy, core.post([item], sizes, rides=not loads)
                    gate = None
            if outcome == "quarantined":
                raise SlotQuarantined(slot)
            if outcome == "timeout":
                raise KvdRefused("deadline_exceeded", what=f"the wait for slot {slot}")
            if outcome == "hangup" and gate is not None:
                gate.is_suspect = True
                core.wakeup.set()

    def _take_early(
        self,
        gate: GateView,
        slot: int,
        layer: int,
        loads: Sequence[LoadItem],
        sizes: Sequence[int],
        boot_id: bytes | None,
        end: int,
    ) -> tuple[Tenancy, Ticket] | None:
        """Take the slot as soon as our own last use of it is over; None: ask the gate."""
        core = self._core
        with core.lock:
            while self._is_present(gate):
                if boot_id is not None and boot_id != core.boot_id:
                    raise KvdRefused("pool_lost", what=f"the step of slot {slot}")
                word = gate.word(slot)
                if not core.books.is_in_use(slot):
                    if not core.books.may_take(slot, word, early=True):
                        return None
                    core.gate_waits["free" if core.books.may_take(slot, word) else "early"] += 1
                    tenancy = core.books.take(slot, word, core.generation, layer, loads, early=True)
                    item = AcquiredItem(slot, tenancy.epoch, layer, list(loads))
                    return tenancy, core.post([item], sizes, rides=not loads)
                left = left_s(end)
                if left == 0 or split_word(word)[1] == STATE_QUARANTINED:
                    return None
                core.room.wait(min(left, LOOK_S))
        return None

    def _may_take(self, slot: int, word: int, end: int) -> bool:
        """Whether a free slot may be taken now; False: look again. The lock is held.

        Not while our own copies touch it: kvd holds nothing for a step that it refused.
        """
        core = self._core
        if not core.books.may_take(slot, word):
            return False  # another thread took it
        if not core.books.is_in_use(slot):
            return True
        left = left_s(end)
        if left == 0:
            what = f"the last use of slot {slot} by this process"
            raise KvdRefused("deadline_exceeded", what=what)
        core.room.wait(left)
        return False

    def _is_present(self, gate: GateView) -> bool:
        """Whether this gate still counts: once the connection is lost nothing is acquired."""
        core = self._core
        session = core.session
        return core.state is LinkState.ATTACHED and session is not None and session.gate is gate

    def _await_loads(
        self,
        tenancy: Tenancy,
        layer: int,
        loads: Sequence[LoadItem],
        sizes: Sequence[int],
        ticket: Ticket,
        end: int,
    ) -> None:
        """Wait until kvd lets the loads start; ask again while a span is being saved."""
        core = self._core
        pause_s, before = RETRY_MIN_S, ""
        while True:
            code = ticket.wait(left_s(end))
            if not code:
                return
            # What kvd said last says more than that the time ran out meanwhile.
            code = before if code == "deadline_exceeded" and before else code
            before = code
            what = f"the loads of slot {tenancy.slot} for layer {layer}"
            if code not in AGAIN or left_s(end) <= pause_s:
                raise KvdRefused(code, what=what, slot=tenancy.slot, layer=layer, path=core.path)
            with core.lock:
                core.changed.wait(pause_s)
                if core.generation != tenancy.generation:
                    raise KvdRefused("pool_lost", what=what)
                item = AcquiredItem(tenancy.slot, tenancy.epoch, layer, list(loads))
                ticket = core.post([item], sizes)
            core.send()
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    # Steps of a tenancy -----------------------------------------------------------------------

    def check_loaded(self, tenancy: Tenancy) -> None:
        """To be asked when all loads of the tenancy have ended, before their rows are used.

        While kvd lives it keeps the blocks of a load. If it died before the copy's end, its next
        life may have given them to somebody else meanwhile: the rows are not to be trusted.

        Raises: KvdRefused(pool_lost).
        """
        core = self._core
        with core.lock:
            session = core.session
            gate = session.gate if session is not None else None
            is_kept = (
                core.state is LinkState.ATTACHED
                and tenancy.generation == core.generation
                and gate is not None
                and not gate.hung_up()
            )
        if not is_kept:
            raise KvdRefused("pool_lost", what=f"the loads of slot {tenancy.slot}")

    def load_ended(self, tenancy: Tenancy, ok: bool, bad: Sequence[BadSumItem] = ()) -> Ticket:
        """All loads of the tenancy have ended; not ok poisons its rows.

        Args: bad: blocks whose bytes are not those that were saved; kvd poisons them. With ok,
            the rows of their requests are neither saved nor offered from here on.
        Raises: KvdRefused(tenancy_misused).
        """
        core = self._core
        item = LoadEndedItem(tenancy.slot, tenancy.epoch, ok, list(bad))
        sizes = self._checked(item)
        with core.lock:
            use = core.books.use_of(tenancy)
            use.loads = ()
            # It frees the spans to be saved again: that only who contributes does, and after this.
            rides = ok and not bad and self._contributes
            ticket = self._post_end([item], sizes, rides=rides)
        if not rides:
            core.send()
        return ticket

    def computed(self, tenancy: Tenancy, ok: bool = True, *, rides: bool = False) -> Ticket:
        """Attention over the slot has ended.

        Args: rides: nobody waits for kvd to hear it; a later event takes it along.
        Raises: KvdRefused(tenancy_misused | load_open).
        """
        core = self._core
        item = ComputedItem(tenancy.slot, tenancy.epoch, ok)
        sizes = self._checked(item)
        with core.lock:
            use = core.books.use_of(tenancy)
            core.books.check_computed(use)
            # What is still saved keeps the slot as long, and its end takes this along.
            rides = bool(use.savers) or (rides and not use.reads)
            ticket = self._post_end([item], sizes, rides=rides)
            use.compute.ended, use.compute.ok = ticket, ok
            core.books.ended(use)
        if not rides:
            core.send()
        return ticket

    def save_ended(
        self,
        tenancy: Tenancy,
        saver: str,
        ok: bool,
        tokens: Sequence[int] = (),
        sums: bytes = b"",
        *,
        rides: bool = False,
    ) -> Ticket:
        """A save has ended; it touches neither slot nor blocks any more.

        Args:
            tokens: valid ones for each target block, () = as announced in `written`.
            sums: checksum of each target block, as `SaveEndedItem` says; b"" for none.
            rides: nobody waits for kvd to hear it; a later event takes it along.
        Raises: KvdRefused(tenancy_misused).
        """
        core = self._core
        item = SaveEndedItem(tenancy.slot, tenancy.epoch, saver, ok, list(tokens), sums)
        sizes = self._checked(item)
        with core.lock:
            use = core.books.use_of(tenancy)
            save = core.books.save_of(use, saver)
            core.books.check_counts(use, save, tokens)
            rides = rides and not use.reads
            ticket = self._post_end([item], sizes, rides=rides)
            save.ended, save.ok = ticket, ok
            core.books.ended(use)
        if not rides:
            core.send()
        return ticket

    def poisoned(self, tenancy: Tenancy) -> Ticket:
        """The tenancy's rows are not valid, and nothing copied out of it may be used.

        Raises: KvdRefused(tenancy_misused).
        """
        core = self._core
        item = PoisonedItem(tenancy.slot, tenancy.epoch)
        sizes = self._checked(item)
        with core.lock:
            core.books.use_of(tenancy)
            ticket = core.post([item], sizes)
        core.send()
        return ticket

    def abandon(self, tenancy: Tenancy) -> None:
        """End what is left of loads and computing, as failed; harmless when nothing is.

        Saves that run go on until they are reported.
        """
        core = self._core
        core.check_process()
        slot, epoch, _ = tenancy
        load, compute = LoadEndedItem(slot, epoch, False), ComputedItem(slot, epoch, False)
        with core.lock:
            use = core.books.use_of(tenancy)
            items: list[SlotItem] = [load] if use.loads else []
            if use.is_computing:
                items.append(compute)
            if not items:
                return
            ticket = self._post_end(items, core.sizes_of(items))
            use.loads = ()
            if use.is_computing:
                use.compute.ended, use.compute.ok = ticket, False
            core.books.ended(use)
        core.send()

    def _post_end(
        self, items: Sequence[SlotItem], sizes: Sequence[int], *, rides: bool = False
    ) -> Ticket:
        """Post what ends a use of a slot, and rouse whoever waits for that; the lock is held."""
        self._core.room.notify_all()
        return self._core.post(items, sizes, rides=rides)
