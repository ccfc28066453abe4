"""A kvd without sockets: the real machine, and a member's slots and blocks on top of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from engine_shim.client import KeptStep, KvdRefused, SlotQuarantined, Tenancy, Ticket
from engine_shim.gate import AcquiredEpochs
from kvd.core import effects as ef
from kvd.core import events as ev
from kvd.core import results as res
from kvd.core import slot_events as se
from kvd.core.check import problems
from kvd.core.ids import MemberRef, SlotRef
from kvd.core.machine import Machine
from kvd.core.state import Settings
from kvd.memory.sum_area import SumArea
from kvd.server.translate import OwnEvent, layout_of, load_specs, read_spec, save_specs
from kvd.store.dict_index import DictIndex
from kvd.wire.gate_layout import make_word
from kvd.wire.layout import BlockLayoutSpec
from kvd.wire.slot_items import BadSumItem, LoadItem, ReadItem, SaveItem
from kvd.wire.sum_layout import SumShape, SumView
from kvd_kernels.host import Mapping

MEMBER = MemberRef("engine", "rank0", 7)


class FakeKvd:
    """A member's client (`SlotClient`, `BlockClient`) whose kvd is in this process.

    `quarantined`: slots whose gate will not open.
    `busy_saves`: announcements of saves that are refused, as if another rank loaded their blocks.
    """

    def __init__(
        self, layout: BlockLayoutSpec, num_slots: int, num_blocks: int, checksums: str = "off"
    ) -> None:
        self._lock = threading.Condition()
        made = layout_of(layout)
        size = made.stride * num_blocks
        self.checksums = checksums
        self.sums: SumArea | None = None
        self._sums_map: Mapping | None = None
        settings = Settings(pool_bytes=size, checksums=checksums)
        self.machine = Machine(settings, DictIndex())
        self._acquired = AcquiredEpochs(num_slots)
        self._next_no = 0
        self.generation = 1
        self.quarantined: set[int] = set()
        self.busy_saves = 0
        fd = os.memfd_create("fake-pool", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        self.pool: Mapping | None = Mapping(fd, size, writable=True)
        os.close(fd)
        self._words = [make_word(0, 1)] * num_slots
        self.handle(
            ev.MemberJoined(1, MEMBER, 1, True, 0, 1, 0, True, num_slots, made, b""),
        )
        self.slots = FakeDesk(self)

    def handle(self, event: ev.Event) -> res.Result | None:
        """Apply one event; what it answers. Raises KvdRefused for a refusal."""
        with self._lock:
            answer: res.Result | None = None
            for effect in self.machine.handle([event], time.monotonic_ns()):
                if isinstance(effect, ef.StoreGate):
                    self._words[effect.slot] = make_word(effect.epoch, effect.state)
                elif isinstance(effect, ef.Reply):
                    answer = effect.result
                elif isinstance(effect, ef.FormatPool) and self.checksums != "off":
                    self.sums = SumArea(SumShape(effect.total, effect.num_spans, effect.digest))
                elif isinstance(effect, ef.WriteSums):
                    assert self.sums is not None
                    self.sums.store(effect.span, effect.blocks, effect.tokens, effect.sums)
                elif isinstance(effect, ef.Refuse):
                    raise KvdRefused(effect.error.code, **effect.error.context)
            found = problems(self.machine.state)
            assert not found, found
            self._lock.notify_all()
            return answer

    def span_sums(self) -> SumView | None:
        """See `SlotClient`."""
        if self.sums is None:
            return None
        if self._sums_map is None:
            self._sums_map = Mapping(self.sums.fd, self.sums.size, writable=False)
        return SumView(self._sums_map)

    @property
    def is_attached(self) -> bool:
        """It never goes away."""
        return True

    def close(self) -> None:
        """Unmap the pool and its checksums."""
        for mapping in (self.pool, self._sums_map, self.sums):
            if mapping is not None:
                mapping.close()

    def post(self, item: OwnEvent) -> Ticket:
        """Apply one slot event; its ticket is settled."""
        with self._lock:
            number = self._next_no
            self._next_no += 1
            answer = self.handle(ev.SlotsChanged(1, MEMBER, number, (item,)))
        assert isinstance(answer, res.SlotsSeen)
        ticket = Ticket(threading.Lock(), 1)
        ticket.settle(answer.codes[0] if answer.codes else "")
        return ticket

    def take(self, slot: int, seconds: float) -> int:
        """Wait at the gate and take the slot; returns its epoch."""
        with self._lock:
            self.await_free(slot, seconds)
            return self._acquired.acquire(slot, self._words[slot])

    def await_free(self, slot: int, seconds: float) -> None:
        """Wait at the gate and leave the slot as it is."""
        with self._lock:
            free = self._lock.wait_for(
                lambda: (
                    slot in self.quarantined or self._acquired.may_acquire(slot, self._words[slot])
                ),
                seconds,
            )
        if slot in self.quarantined:
            raise SlotQuarantined(slot)
        if not free:
            raise KvdRefused("deadline_exceeded", what=f"slot {slot}")

    def lose_pool(self) -> None:
        """As after a restart of kvd: every block is void."""
        self.generation += 1

    def holds(self, slot: int) -> list[str]:
        """Kinds of the holds on a slot."""
        member = self.machine.state.members[MEMBER]
        return sorted(hold.kind.value for hold in member.slots[slot].holds)

    def all_free(self) -> bool:
        """Whether every slot is free."""
        return not self.machine.state.members[MEMBER].held

    def wait_all_free(self, seconds: float = 10.0) -> None:
        """Until every slot is free."""
        with self._lock:
            assert self._lock.wait_for(self.all_free, seconds)

    def wait_blocks_free(self, seconds: float = 10.0) -> None:
        """Until no block is in use: saves that were running have ended."""
        pool = self.machine.state.pool
        assert pool is not None
        with self._lock:
            assert self._lock.wait_for(lambda: len(pool.blocks.free) == pool.blocks.total, seconds)

    # Blocks -----------------------------------------------------------------------------------

    def lookup(self, request: str, hashes: Sequence[bytes]) -> list[int]:
        """See `BlockClient`."""
        answer = self.handle(ev.LookedUp(1, MEMBER, request, b"".join(hashes)))
        assert isinstance(answer, res.Found)
        return list(answer.blocks)

    def reserve(self, request: str, count: int) -> list[int]:
        """See `BlockClient`."""
        answer = self.handle(ev.Reserved(1, MEMBER, request, count))
        assert isinstance(answer, res.Taken)
        return list(answer.blocks)

    def commit(
        self,
        blocks: Sequence[int],
        hashes: Sequence[bytes],
        tokens: Sequence[int],
        deadline_s: float | None = None,
        *,
        request: str = "",
    ) -> list[str]:
        """See `BlockClient`."""
        items = tuple(
            ev.CommitItem(block, key, count, request)
            for block, key, count in zip(blocks, hashes, tokens, strict=True)
        )
        answer = self.handle(ev.Committed(1, MEMBER, items))
        assert isinstance(answer, res.ItemStatuses)
        return list(answer.codes) or [""] * len(items)

    def unpin(self, request: str, blocks: Sequence[int] | None = None) -> None:
        """See `BlockClient`."""
        some = None if blocks is None else tuple(blocks)
        self.handle(ev.RequestEnded(1, MEMBER, request, some))

    def abort(self, request: str) -> None:
        """See `BlockClient`."""
        self.handle(ev.RequestEnded(1, MEMBER, request, None, aborted=True))


class FakeDesk:
    """The slots of a `FakeKvd`'s member."""

    def __init__(self, kvd: FakeKvd) -> None:
        self._kvd = kvd
        self._saves: dict[tuple[int, int], Ticket] = {}
        self._said: dict[tuple[int, int], se.Written] = {}
        self._kept_loads: dict[tuple[int, int], KeptStep] = {}
        self._kept_saves: dict[tuple[int, int], KeptStep] = {}
        self._steps = 0
        self._asked: dict[tuple[int, int], Ticket] = {}

    def open_step(
        self,
        loads: Sequence[LoadItem] = (),
        saves: Sequence[SaveItem] = (),
        deadline_s: float | None = None,
    ) -> KeptStep:
        """See `Desk`."""
        self._steps += 1
        number = self._steps
        event = se.StepOpened(MEMBER, number, load_specs(loads), save_specs(saves))
        ticket = self._kvd.post(event)
        return KeptStep(number, self._kvd.generation, list(loads), list(saves), ticket)

    def close_step(self, kept: KeptStep) -> None:
        """See `Desk`."""
        kept.closes = True
        self._end_copies(kept, 0)

    def _end_copies(self, kept: KeptStep | None, count: int = 1) -> None:
        if kept is None:
            return
        with self._kvd._lock:
            kept.copies -= count
            ends = kept.closes and not kept.copies and not kept.closed
            kept.closed = kept.closed or ends
        if ends:
            self._kvd.post(se.StepClosed(MEMBER, kept.number))

    def _begin_copies(self, kept: KeptStep | None, count: int) -> KeptStep | None:
        if kept is None or kept.closes or not count:
            return None
        with self._kvd._lock:
            kept.copies += count
        return kept

    def may_save(self, tenancy: Tenancy, saver: str) -> Ticket:
        """See `Desk`."""
        use = tenancy.slot, tenancy.epoch
        kept = self._kept_saves.get(use)
        return self._saves[use] if kept is None else kept.answer

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
        """See `Desk`."""
        tenancy, ticket = self.begin(slot, layer, loads, deadline_s, boot_id=boot_id, early=early)
        self.await_loads(tenancy, layer, loads, ticket, deadline_s)
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
        """See `Desk`."""
        epoch = self._kvd.take(slot, deadline_s or 10.0)
        tenancy = Tenancy(slot, epoch, self._kvd.generation)
        kept = self._begin_copies(kept, 1 if loads else 0)
        if kept is not None and kept.is_kept and kept.loads == list(loads):
            event = se.Acquired(_ref(tenancy), layer, (), kept.number)
            ticket = self._asked[slot, epoch] = self._kvd.post(event)
        else:
            ticket = self._acquired(tenancy, layer, loads)
        if kept is None:
            return tenancy, ticket
        self._kept_loads[slot, epoch] = kept
        return tenancy, kept.answer

    def asked(self, tenancy: Tenancy) -> Ticket:
        """See `Desk`."""
        return self._asked[tenancy.slot, tenancy.epoch]

    def _acquired(self, tenancy: Tenancy, layer: int, loads: Sequence[LoadItem]) -> Ticket:
        ticket = self._kvd.post(se.Acquired(_ref(tenancy), layer, load_specs(loads)))
        self._asked[tenancy.slot, tenancy.epoch] = ticket
        return ticket

    def await_loads(
        self,
        tenancy: Tenancy,
        layer: int,
        loads: Sequence[LoadItem],
        ticket: Ticket,
        deadline_s: float | None = None,
    ) -> None:
        """See `Desk`."""
        end = time.monotonic() + (deadline_s or 10.0)
        while code := ticket.code:
            if code not in ("span_busy", "span_unwritten") or time.monotonic() > end:
                self._kvd.post(se.Computed(_ref(tenancy), False))  # the slot is given back
                raise KvdRefused(code, slot=tenancy.slot)
            with self._kvd._lock:
                self._kvd._lock.wait(0.01)
            ticket = self._acquired(tenancy, layer, loads)

    def await_free(self, slot: int, deadline_s: float | None = None) -> None:
        """See `KvdClient`."""
        self._kvd.await_free(slot, 10.0 if deadline_s is None else deadline_s)

    def await_untouched(self, slots: Sequence[int], deadline_s: float | None = None) -> None:
        """See `Desk`."""
        end = time.monotonic() + (deadline_s or 10.0)
        for slot in slots:
            self._kvd.await_free(slot, end - time.monotonic())

    def abandon(self, tenancy: Tenancy) -> None:
        """See `Desk`."""
        ref = _ref(tenancy)
        kinds = self._kvd.holds(tenancy.slot)
        if "compute" in kinds:
            self._kvd.post(se.LoadEnded(ref, False))
            self._end_copies(self._kept_loads.pop((tenancy.slot, tenancy.epoch), None))
            self._kvd.post(se.Computed(ref, False))

    def check_loaded(self, tenancy: Tenancy) -> None:
        """See `Desk`."""

    def load_ended(self, tenancy: Tenancy, ok: bool, bad: Sequence[BadSumItem] = ()) -> Ticket:
        """See `Desk`."""
        damaged = tuple(se.BadSum(one.block, one.expected, one.got) for one in bad)
        ticket = self._kvd.post(se.LoadEnded(_ref(tenancy), ok, damaged))
        self._end_copies(self._kept_loads.pop((tenancy.slot, tenancy.epoch), None))
        return ticket

    def written(
        self,
        tenancy: Tenancy,
        layer: int,
        saves: Sequence[SaveItem] = (),
        reads: Sequence[ReadItem] = (),
        deadline_s: float | None = None,
        *,
        kept: KeptStep | None = None,
    ) -> Ticket:
        """See `Desk`."""
        specs, number = save_specs(saves), 0
        kept = self._begin_copies(kept, len(saves))
        if kept is not None:
            self._kept_saves[tenancy.slot, tenancy.epoch] = kept
            if kept.is_kept and kept.saves == list(saves):
                specs, number = (), kept.number
        offered = tuple(read_spec(layer, it) for it in reads)
        return self._announce(tenancy, se.Written(_ref(tenancy), layer, specs, offered, number))

    def _announce(self, tenancy: Tenancy, event: se.Written) -> Ticket:
        kvd = self._kvd
        with kvd._lock:
            if event.saves and kvd.busy_saves:
                kvd.busy_saves -= 1
                ticket = Ticket(threading.Lock(), 1)
                ticket.settle("span_busy")
            else:
                ticket = kvd.post(event)
            self._said[tenancy.slot, tenancy.epoch] = event
            self._saves[tenancy.slot, tenancy.epoch] = ticket
            return ticket

    def confirm(self, tenancy: Tenancy, deadline_s: float | None = None) -> Ticket:
        """See `Desk`."""
        use = tenancy.slot, tenancy.epoch
        while (ticket := self._saves[use]).code == "span_busy":
            self._announce(tenancy, self._said[use])
        return ticket

    def computed(self, tenancy: Tenancy, ok: bool = True, *, rides: bool = False) -> Ticket:
        """See `Desk`."""
        return self._kvd.post(se.Computed(_ref(tenancy), ok))

    def save_started(self, tenancy: Tenancy, saver: str, deadline_s: float | None = None) -> None:
        """See `Desk`."""
        use = tenancy.slot, tenancy.epoch
        kept = self._kept_saves.get(use)
        if kept is not None and kept.is_kept:
            return
        with self._kvd._lock:
            self._kvd._lock.wait_for(lambda: self._saves[use].code != "span_busy", deadline_s)
        code = self._saves[use].code
        if code:
            raise KvdRefused(code, slot=tenancy.slot)

    def save_ended(
        self,
        tenancy: Tenancy,
        saver: str,
        ok: bool,
        tokens: Sequence[int] = (),
        sums: bytes = b"",
        *,
        rides: bool = False,
        posted: Callable[[], None] = lambda: None,
    ) -> Ticket:
        """See `Desk`."""
        ticket = self._kvd.post(se.SaveEnded(_ref(tenancy), saver, ok, tuple(tokens), sums))
        self._end_copies(self._kept_saves.pop((tenancy.slot, tenancy.epoch), None))
        posted()
        return ticket


def _ref(tenancy: Tenancy) -> SlotRef:
    return SlotRef(MEMBER, tenancy.slot, tenancy.epoch)
