"""Taking slots: waiting at the gate, and until kvd has pinned what is loaded into them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple

from engine_shim.client.announcements import AGAIN, RETRY_MAX_S, RETRY_MIN_S, Announcements
from engine_shim.client.errors import KvdRefused, SlotQuarantined
from engine_shim.client.gate_view import GateView
from engine_shim.client.item_sizes import LAYERS_MAX, PLAIN_BYTES
from engine_shim.client.kept import KeptStep
from engine_shim.client.options import left_ns, left_s
from engine_shim.client.session import Core, LinkState
from engine_shim.client.slots import SlotUse, Tenancy
from engine_shim.client.tickets import Ticket
from kvd.wire.gate_layout import (
    EPOCH_MAX,
    STATE_FREE,
    STATE_QUARANTINED,
    make_word,
    split_word,
)
from kvd.wire.slot_items import (
    ACQUIRED,
    AcquiredItem,
    ComputedItem,
    LoadEndedItem,
    LoadItem,
    SlotItem,
)

LOOK_S: Final = 0.25
"""How often a thread that waits for our own use of a slot looks whether kvd has given it up."""


class _Wanted(NamedTuple):
    """What `begin` was asked for.

    kept:     only where the loads are those of the step, or some of them.
    is_whole: whether they are those of the step.
    sizes:    encoded, of what will be said; [] when it is short for sure.
    """

    slot: int
    layer: int
    loads: list[LoadItem]
    boot_id: bytes | None
    end: int
    early: bool
    kept: KeptStep | None
    is_whole: bool
    sizes: list[int]


class Acquiring(Announcements):
    """Part of `SlotDesk`."""

    def __init__(self, core: Core, member: str) -> None:
        super().__init__(core)
        self._member = member

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self._core.books.num_slots

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

        Args: as `begin`.
        Raises: as `begin` and `await_loads`.
        """
        end = self._end(deadline_s)
        tenancy, ticket = self.begin(slot, layer, loads, deadline_s, boot_id=boot_id, early=early)
        if loads:
            self.await_loads(tenancy, layer, loads, ticket, left_s(end))
        return tenancy

    def begin(
        self,
        slot: int,
        layer: int = -1,
        loads: Sequence[LoadItem] = (),
        deadline_s: float | None = None,
        *,
        boot_id: bytes | None = None,
        early: bool = False,
        kept: KeptStep | None = None,
    ) -> tuple[Tenancy, Ticket]:
        """Wait until the slot may be written, take it, and ask kvd to pin what its loads read.

        Args:
            slot: 0 .. num_slots - 1.
            layer: that will use it; required with loads.
            loads: blocks of the pool that will be copied into the slot.
            deadline_s: None for the client's default.
            boot_id: life of kvd that the blocks are of, None for the present one.
            early: a slot whose last tenancy was offered to nobody, and ended by our own word, is
                taken without waiting until kvd has heard it.
            kept: an open step that keeps all blocks of `loads`, once kvd has said so.
        Returns: the tenancy, and kvd's answer, that to the step where it still counts. After a yes
            the loads may start. Otherwise, of a step, only kvd's answer to this layer counts
            (`answer_to_begin`); where that is no yes either, `await_loads` comes first, or gives
            the slot back.
        Raises: KvdRefused; the slot is not taken:
            slot_unknown, deadline_exceeded, busy, unreachable, closed, process_forked;
            pool_lost: the blocks of `loads` are of an earlier life of kvd.
            SlotQuarantined: rebind its layers to a spare slot.
        """
        core = self._core
        core.check_process()
        end = self._end(deadline_s)
        if not 0 <= slot < self.num_slots:
            count = self.num_slots
            raise KvdRefused("slot_unknown", slot=slot, count=count, member=self._member)
        core.await_event_room(end)
        loads, kept = list(loads), kept if loads else None
        is_whole = kept is not None and kept.loads == loads
        is_short = (is_whole or not loads) and -1 <= layer < LAYERS_MAX
        sizes = [] if is_short else self._checked(AcquiredItem(slot, EPOCH_MAX, layer, loads))
        wanted = _Wanted(slot, layer, loads, boot_id, end, early, kept, is_whole, sizes)
        tenancy, ticket, is_awaited = self._take(wanted)
        if is_awaited:
            core.send()
        return tenancy, ticket

    def answer_to_begin(self, tenancy: Tenancy) -> Ticket:
        """kvd's answer to the `begin` of the present tenancy, whatever it says to its step.

        Raises: KvdRefused(tenancy_misused).
        """
        core = self._core
        with core.lock:
            ticket = core.books.use_of(tenancy).acquired
        assert ticket is not None
        return ticket

    def await_loads(
        self,
        tenancy: Tenancy,
        layer: int,
        loads: Sequence[LoadItem],
        ticket: Ticket,
        deadline_s: float | None = None,
    ) -> None:
        """Wait until kvd lets the loads of a `begin` start, asking again while a span is saved.

        Raises: KvdRefused; the slot has been given back: deadline_exceeded, unreachable, closed,
            pool_lost, and what kvd answered (block_poisoned, request_ended ...).
        """
        with ExitStack() as undo:
            undo.callback(self.abandon, tenancy)
            self._await_loads(tenancy, layer, loads, ticket, self._end(deadline_s))
            undo.pop_all()

    def _take(self, wanted: _Wanted) -> tuple[Tenancy, Ticket, bool]:
        """Returns: also whether the answer is waited for."""
        core, slot, end = self._core, wanted.slot, wanted.end
        gate: GateView | None = None
        while True:
            gate = core.await_gate(gate, end)
            if wanted.early:
                taken = self._take_early(gate, wanted)
                if taken is not None:
                    return taken
            spin_ns = core.options.spin_us * 1000
            outcome, epoch = gate.wait_free(slot, core.books.last(slot), left_ns(end), spin_ns)
            with core.lock:
                core.gate_waits[outcome] += 1
                if outcome == "free" and self._is_present(gate):
                    self._check_life(wanted)
                    word = make_word(epoch, STATE_FREE)
                    if self._may_take(slot, word, end):
                        return self._begin(wanted, word)
                    gate = None
            if outcome == "quarantined":
                raise SlotQuarantined(slot)
            if outcome == "timeout":
                raise KvdRefused("deadline_exceeded", what=f"the wait for slot {slot}")
            if outcome == "hangup" and gate is not None:
                gate.is_suspect = True
                core.wakeup.set()

    def _take_early(self, gate: GateView, wanted: _Wanted) -> tuple[Tenancy, Ticket, bool] | None:
        """Take the slot as soon as our own last use of it is over; None: ask the gate."""
        core, slot = self._core, wanted.slot
        with core.lock:
            while self._is_present(gate):
                self._check_life(wanted)
                word = gate.word(slot)
                if not core.books.is_in_use(slot):
                    how = core.books.opening(slot, word)
                    if not how:
                        return None
                    core.gate_waits[how] += 1
                    return self._begin(wanted, word, early=True)
                left = left_s(wanted.end)
                if left == 0 or split_word(word)[1] == STATE_QUARANTINED:
                    return None
                core.room.wait(min(left, LOOK_S))
        return None

    def _check_life(self, wanted: _Wanted) -> None:
        if wanted.boot_id is not None and wanted.boot_id != self._core.boot_id:
            raise KvdRefused("pool_lost", what=f"the step of slot {wanted.slot}")

    def _begin(
        self, wanted: _Wanted, word: int, *, early: bool = False
    ) -> tuple[Tenancy, Ticket, bool]:
        """Take a slot that may be taken, and say so; the lock is held."""
        core, layer, loads = self._core, wanted.layer, list(wanted.loads)
        kept = wanted.kept if wanted.kept is not None and self._counts(wanted.kept) else None
        sizes = wanted.sizes
        if wanted.is_whole and kept is None:
            sizes = core.sizes_of([AcquiredItem(wanted.slot, EPOCH_MAX, layer, loads)])
        tenancy = core.books.take(wanted.slot, word, core.generation, layer, loads, early=early)
        use = core.books.use_of(tenancy)
        # Without loads kvd need not know: the next event of the tenancy says it. Nor with those
        # of a step: it keeps their blocks already.
        is_awaited = bool(loads) and kept is None
        if not loads:
            ticket = self._tell(use, ACQUIRED, layer=layer)
        elif kept is not None and wanted.is_whole:
            ticket = self._tell(use, ACQUIRED, layer=layer, loads=kept.number)
        else:
            item = AcquiredItem(tenancy.slot, tenancy.epoch, layer, loads)
            ticket = core.post([item], sizes, rides=not is_awaited)
        if kept is not None:
            kept.copies += 1
        use.acquired, use.kept = ticket, kept
        return tenancy, ticket if kept is None else kept.answer, is_awaited

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
        ticket: Ticket,
        end: int,
    ) -> None:
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
            with core.lock:
                is_lost = core.generation != tenancy.generation
            if is_lost:
                raise KvdRefused("pool_lost", what=what)
            if code not in AGAIN or left_s(end) <= pause_s:
                raise KvdRefused(code, what=what, slot=tenancy.slot, layer=layer, path=core.path)
            with core.lock:
                core.changed.wait(pause_s)
                if core.generation != tenancy.generation:
                    raise KvdRefused("pool_lost", what=what)
                item = AcquiredItem(tenancy.slot, tenancy.epoch, layer, list(loads))
                ticket = core.post([item], core.sizes_of([item]))
            core.send()
            pause_s = min(2 * pause_s, RETRY_MAX_S)

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
            closing = self._end_copies(use.kept) if use.loads else []
            ticket = self._post_end(use, items, [PLAIN_BYTES] * len(items), closing)
            use.loads, use.kept = (), None
            if use.is_computing:
                use.compute.ended, use.compute.ok = ticket, False
            core.books.ended(use)
        core.send()

    def _post_end(
        self,
        use: SlotUse,
        items: Sequence[SlotItem],
        sizes: Sequence[int],
        closing: Sequence[SlotItem] = (),
        *,
        rides: bool = False,
    ) -> Ticket:
        """Post what ends a use of a slot, and rouse whoever waits for that; the lock is held.

        closing: plain events that go along.
        """
        self._core.room.notify_all()
        use.told = None
        sizes = [*sizes, *(PLAIN_BYTES,) * len(closing)]
        return self._core.post([*items, *closing], sizes, rides=rides, is_awaited=False)

    def _tell_end(
        self,
        use: SlotUse,
        did: int,
        closing: Sequence[SlotItem] = (),
        *,
        saver: str = "",
        rides: bool = False,
    ) -> Ticket:
        """The same for an end that went well."""
        core = self._core
        core.room.notify_all()
        ticket = self._tell(use, did, saver=saver)
        if closing:
            core.post(closing, (PLAIN_BYTES,) * len(closing), is_awaited=False)
        elif not rides:
            core.stream.push()
        return ticket
