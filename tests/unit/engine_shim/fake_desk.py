"""The slots of a member whose kvd is in this process: what `SlotDesk` says, said to the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from engine_shim.client import KeptStep, KvdRefused, Tenancy, Ticket
from kvd.core import slot_events as se
from kvd.core.ids import MemberRef, SlotRef
from kvd.server.translate import load_specs, read_spec, save_specs
from kvd.wire.slot_items import BadSumItem, LoadItem, ReadItem, SaveItem

if TYPE_CHECKING:
    from tests.unit.engine_shim.fake_kvd import FakeKvd

MEMBER: Final = MemberRef("engine", "rank0", 7)


class FakeDesk:
    """The slots of a `FakeKvd`'s member."""

    def __init__(self, kvd: FakeKvd) -> None:
        self._kvd = kvd
        self._saves: dict[tuple[int, int], Ticket] = {}
        self._said: dict[tuple[int, int], se.Written] = {}
        self._kept_loads: dict[tuple[int, int], KeptStep] = {}
        self._kept_saves: dict[tuple[int, int], KeptStep] = {}
        self.opened: list[KeptStep] = []
        """Steps that were opened so far."""
        self._loading: set[tuple[int, int]] = set()
        self._computed: set[tuple[int, int]] = set()
        self._begun: dict[tuple[int, int], Ticket] = {}
        self._asked: dict[tuple[int, int], Ticket] = {}

    def open_step(
        self,
        loads: Sequence[LoadItem] = (),
        saves: Sequence[SaveItem] = (),
        deadline_s: float | None = None,
    ) -> KeptStep:
        """See `Desk`."""
        number = len(self.opened) + 1
        event = se.StepOpened(MEMBER, number, load_specs(loads), save_specs(saves))
        ticket = self._kvd.post(event)
        kept = KeptStep(number, self._kvd.generation, list(loads), list(saves), ticket)
        self.opened.append(kept)
        return kept

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
        if ends and not kept.is_refused:
            self._kvd.post(se.StepClosed(MEMBER, kept.number))

    def _begin_copies(self, kept: KeptStep | None, count: int) -> KeptStep | None:
        kvd = self._kvd
        if kept is None or kept.closes or kept.is_refused or not count:
            return None
        if not kvd.is_attached or kept.generation != kvd.generation:
            return None
        with self._kvd._lock:
            kept.copies += count
        return kept

    def answer_to_save(self, tenancy: Tenancy, saver: str) -> Ticket:
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
        if loads:
            self._loading.add((slot, epoch))
        kept = self._begin_copies(kept, 1 if loads else 0)
        if kept is None:
            return tenancy, self._acquired(tenancy, layer, loads)
        self._kept_loads[slot, epoch] = kept
        if kept.is_kept and kept.loads == list(loads):
            begun = self._kvd.post(se.Acquired(_ref(tenancy), layer, (), kept.number))
        else:
            begun = self._acquired(tenancy, layer, loads)
        self._begun[slot, epoch] = self._asked[slot, epoch] = begun
        return tenancy, kept.answer

    def answer_to_begin(self, tenancy: Tenancy) -> Ticket:
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
        while code := ticket.wait(max(0.0, end - time.monotonic())):
            if code not in ("span_busy", "span_unwritten") or time.monotonic() > end:
                self.abandon(tenancy)
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
        use = tenancy.slot, tenancy.epoch
        if use in self._loading:
            self.load_ended(tenancy, False)
        if use not in self._computed:
            self.computed(tenancy, False)

    def check_loaded(self, tenancy: Tenancy) -> Ticket | None:
        """See `Desk`."""
        if not self._kvd.is_attached or tenancy.generation != self._kvd.generation:
            raise KvdRefused("pool_lost", what=f"the loads of slot {tenancy.slot}")
        begun = self._begun.pop((tenancy.slot, tenancy.epoch), None)
        if begun is not None and begun.code:
            raise KvdRefused(begun.code, slot=tenancy.slot)
        return begun

    def load_ended(self, tenancy: Tenancy, ok: bool, bad: Sequence[BadSumItem] = ()) -> Ticket:
        """See `Desk`."""
        self._loading.discard((tenancy.slot, tenancy.epoch))
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
        if saves and tenancy.generation != self._kvd.generation:
            raise KvdRefused("pool_lost", what=f"the saves of slot {tenancy.slot}")
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
            if (event.saves or event.step) and kvd.busy_saves:
                kvd.busy_saves -= 1
                ticket = kvd.refuse("span_busy")
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
        use = tenancy.slot, tenancy.epoch
        if use in self._loading:
            raise KvdRefused("load_open", slot=tenancy.slot)
        if use in self._computed:
            raise KvdRefused("tenancy_misused", slot=tenancy.slot, epoch=tenancy.epoch, detail="")
        self._computed.add(use)
        return self._kvd.post(se.Computed(_ref(tenancy), ok))

    def save_started(
        self, tenancy: Tenancy, saver: str, deadline_s: float | None = None
    ) -> Ticket | None:
        """See `Desk`."""
        use = tenancy.slot, tenancy.epoch
        kept = self._kept_saves.get(use)
        heard = self._saves[use] if kept is not None and kept.is_kept else None
        code = heard.code if heard is not None else self._saves[use].wait(deadline_s or 0.0)
        if code == "span_busy" and heard is None:
            with self._kvd._lock:
                self._kvd._lock.wait_for(lambda: self._saves[use].code != "span_busy", deadline_s)
            code = self._saves[use].code
        if not code and tenancy.generation != self._kvd.generation:
            code = "pool_lost"
        if code:
            raise KvdRefused(code, slot=tenancy.slot)
        return heard

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
