"""A kvd without sockets: the real machine, and a member's slots and blocks on top of it."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from engine_shim.client import KvdRefused, SlotQuarantined, Ticket
from engine_shim.client.tickets import Calls
from engine_shim.gate import AcquiredEpochs
from kvd.core import effects as ef
from kvd.core import events as ev
from kvd.core import results as res
from kvd.core import slot_events as se
from kvd.core.check import problems
from kvd.core.machine import Machine
from kvd.core.state import Settings
from kvd.memory.sum_area import SumArea
from kvd.server.translate import OwnEvent, layout_of
from kvd.store.dict_index import DictIndex
from kvd.wire.gate_layout import make_word
from kvd.wire.layout import BlockLayoutSpec
from kvd.wire.sum_layout import SumShape, SumView
from kvd_kernels.host import Mapping
from tests.unit.engine_shim.fake_desk import MEMBER, FakeDesk

__all__ = ["MEMBER", "FakeDesk", "FakeKvd"]

ENDS: Final = (se.LoadEnded, se.Computed, se.SaveEnded, se.StepClosed)


class FakeKvd:
    """A member's client (`SlotClient`, `BlockClient`) whose kvd is in this process.

    `quarantined`: slots whose gate will not open.
    `busy_saves`: announcements of saves that are refused, as if another rank loaded their blocks.
    `said`: slot events that have reached kvd, in order.

    After `hold` slot events are under way until `deliver`; what other members say overtakes them.
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
        self.is_attached = True
        self.said: list[OwnEvent] = []
        self._under_way: deque[tuple[OwnEvent, Ticket]] = deque()
        self._is_holding = False
        self._ticket_lock = threading.Lock()
        self._calls: Calls = deque()
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

    def close(self) -> None:
        """Unmap the pool and its checksums."""
        for mapping in (self.pool, self._sums_map, self.sums):
            if mapping is not None:
                mapping.close()

    def post(self, item: OwnEvent) -> Ticket:
        """Apply one slot event; its ticket is settled, unless events are held."""
        ticket = Ticket(self._ticket_lock, 1, self._calls)
        with self._lock:
            self._under_way.append((item, ticket))
            self._lock.notify_all()
            if self._is_holding:
                return ticket
            while self._under_way:
                self._apply_next()
        self._run_calls()
        return ticket

    def refuse(self, code: str) -> Ticket:
        """The ticket of an event that kvd refuses."""
        ticket = Ticket(self._ticket_lock, 1, self._calls)
        with self._ticket_lock:
            ticket.settle(code)
        return ticket

    def hold(self) -> None:
        """What is said from here on is under way until it is delivered."""
        with self._lock:
            self._is_holding = True

    @property
    def num_held(self) -> int:
        """Slot events that are under way."""
        return len(self._under_way)

    def deliver(self, count: int | None = None) -> None:
        """Let kvd hear the first `count` that are under way; None: all, and no more is held."""
        with self._lock:
            for _ in range(self.num_held if count is None else count):
                self._apply_next()
            self._is_holding = count is not None
        self._run_calls()

    def until_posted(self, kind: type[OwnEvent], count: int, seconds: float = 10.0) -> None:
        """Wait until so many events of one kind are under way."""

        def come() -> bool:
            return sum(isinstance(item, kind) for item, _ in self._under_way) >= count

        with self._lock:
            assert self._lock.wait_for(come, seconds), "they were not posted"

    def go_away(self) -> None:
        """The connection ends: nothing is heard any more."""
        with self._lock:
            self._is_holding, self.is_attached = True, False

    def come_back(self, *, another: bool) -> None:
        """The same kvd hears what it missed; or another life, to which all blocks are void."""
        if not another:
            self.is_attached = True
            self.deliver()
            return
        with self._lock:
            lost = list(self._under_way)
            # The announcement of the slots says as much as the ends do.
            ends = [item for item, _ in lost if isinstance(item, ENDS)]
            made = [Ticket(self._ticket_lock, 1, self._calls) for _ in ends]
            self._under_way = deque(zip(ends, made, strict=True))
            self.generation += 1
        with self._ticket_lock:
            for _, ticket in lost:
                ticket.settle("pool_lost")
        self._run_calls()
        self.is_attached = True
        self.deliver()

    def _apply_next(self) -> None:
        item, ticket = self._under_way.popleft()
        number = self._next_no
        self._next_no += 1
        answer = self.handle(ev.SlotsChanged(1, MEMBER, number, (item,)))
        assert isinstance(answer, res.SlotsSeen)
        self.said.append(item)
        with self._ticket_lock:
            ticket.settle(answer.codes[0] if answer.codes else "")

    def _run_calls(self) -> None:
        """Call who waits for answers, with no lock held."""
        while self._calls:
            self._calls.popleft()()

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
