"""A small kvd for stories about the machine: two ranks of a prefill engine, one decode engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvd.core import effects as fx
from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.block_types import BlockShape
from kvd.core.blocks import BlockTable
from kvd.core.check import problems
from kvd.core.holds import Timing
from kvd.core.ids import MemberRef, ReadId, SlotRef
from kvd.core.machine import Machine
from kvd.core.results import SlotsSeen, Taken
from kvd.core.state import Settings
from kvd.core.use_events import Used
from kvd.store.dict_index import DictIndex

LAYOUT = ev.Layout(b"layout", BlockShape(4, 1), 64, "tiny")
SCHEDULER = MemberRef("p", "scheduler", 1)
WORKERS = (MemberRef("p", "w0", 1), MemberRef("p", "w1", 1))
DECODER = MemberRef("d", "w0", 1)
READER = "kvd#d"
SPEC = ev.RegionSpec(1, 8, 4, 8)
KEY = b"k" * 32


class Kvd:
    """A machine with a prefill engine of two ranks and a decode engine; checked at every step."""

    def __init__(
        self,
        announced: tuple[ev.SlotAnnounced, ...] = (),
        *,
        last_life: ev.NodeAdopted | None = None,
        joined: bool = True,
        **settings: Any,
    ) -> None:
        """announced: slots of worker 0. last_life: what it begins with. joined: all say hello."""
        timing = Timing(400, 250, 300, 150, 40, 3, 3)
        self.machine = Machine(
            Settings(4 * 64, region_bytes=1 << 20, timing=timing, **settings), DictIndex()
        )
        self.now = 0
        self.sent: list[fx.Effect] = []
        self.numbers = dict.fromkeys(WORKERS, 0)
        worker = replace(hello(WORKERS[0]), slots=announced)
        if last_life is not None:
            self.tell(last_life)
        if joined:
            for event in (hello(SCHEDULER), worker, hello(WORKERS[1]), hello(DECODER)):
                self.ask(event)

    def tell(self, event: ev.Event) -> list[fx.Effect]:
        self.sent = self.machine.handle((event,), self.now)
        assert problems(self.machine.state) == []
        return self.sent

    def ask(self, event: Any) -> Any:
        answers: list[Any] = []
        for effect in self.tell(replace(event, reply=7)):
            if isinstance(effect, fx.Reply):
                answers.append(effect.result)
            elif isinstance(effect, fx.Refuse):
                answers.append(effect.error)
        assert len(answers) == 1
        return answers[0]

    def say(
        self, *items: se.SlotEvent | se.StepOpened | se.StepClosed | Used, rank: int = 0
    ) -> tuple[str, ...]:
        member = WORKERS[rank]
        seen = self.ask(ev.SlotsChanged(0, member, self.numbers[member], items))
        assert isinstance(seen, SlotsSeen)
        self.numbers[member] = seen.next_no
        return seen.codes

    def reserve(self, request: str, count: int = 1) -> tuple[int, ...]:
        taken = self.ask(ev.Reserved(0, SCHEDULER, request, count))
        assert isinstance(taken, Taken)
        return taken.blocks

    def end(self, request: str) -> None:
        self.ask(ev.RequestEnded(0, SCHEDULER, request))

    def save(self, epoch: int, request: str, block: int, tokens: int = 4) -> tuple[str, ...]:
        ref = slot(epoch)
        save = se.SaveSpec("s", (block,), (tokens,), (request,))
        return self.say(se.Acquired(ref), se.Written(ref, 0, (save,)), se.Computed(ref))

    def tick(self, later: int) -> list[fx.Effect]:
        self.now += later
        return self.tell(ev.Tick())

    @property
    def table(self) -> BlockTable:
        pool = self.machine.state.pool
        assert pool is not None
        return pool.blocks


def hello(ref: MemberRef) -> ev.MemberJoined:
    is_scheduler = ref.member == "scheduler" or ref == DECODER
    rank = -1 if is_scheduler else int(ref.member[1:])
    layout = None if ref == DECODER else LAYOUT
    num_slots = 2 if rank >= 0 else 0
    contributes = rank == 0
    return ev.MemberJoined(
        0, ref, 1, is_scheduler, rank, 2, 0, contributes, num_slots, layout, b""
    )  # fmt: skip


def slot(epoch: int, index: int = 0, rank: int = 0) -> SlotRef:
    return SlotRef(WORKERS[rank], index, epoch)


def read_spec(transfer: str, *blocks: int, end: int = 4) -> se.ReadSpec:
    return se.ReadSpec(ReadId(transfer, 0, 0, 0), "d", end, (0,), blocks)
