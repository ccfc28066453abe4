"""A node for tests of the admin surface: the real machine, and a shell that is told what to say."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvd.config.load import ConfigRow
from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.blocks import BlockShape
from kvd.core.effects import Effect
from kvd.core.ids import MemberRef, ReadId, SlotRef
from kvd.core.machine import Machine
from kvd.core.results import Taken
from kvd.core.state import Limits, Settings, State
from kvd.memory.region import RegionSnapshot
from kvd.server.node_view import Holding, LinkInfo, Phase, SessionInfo
from kvd.server.translate import OwnEvent
from kvd.store.dict_index import DictIndex
from kvd.wire.hot_figures import LayerFigures, RequestFigures

SECOND = 1_000_000_000
STRIDE = 4096
SHAPE = BlockShape(block_tokens=16, num_layers=2)
LAYOUT = ev.Layout(b"n" * 32, SHAPE, STRIDE, "model m, bfloat16, 16 tokens")
WALL = 1_700_000_100.0


def ref(engine: str = "e0", member: str = "w0", incarnation: int = 0x1F) -> MemberRef:
    """A member."""
    return MemberRef(engine, member, incarnation)


def region(**changes: object) -> RegionSnapshot:
    """The pool's region on ordinary pages."""
    made = RegionSnapshot(
        name="pool",
        provider="memfd",
        asked=1 << 20,
        got=1 << 20,
        populated=1 << 20,
        page_kind="base",
        page_size=4096,
        huge=0,
        survives=("engine",),
        reason="huge pages are off",
        nodes=((0, 1 << 20),),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@dataclass
class FakeNode:
    """`NodeView` over a real machine. `time` is the machine's clock."""

    settings: Settings = field(
        default_factory=lambda: Settings(pool_bytes=1 << 20, limits=Limits(story_entries=1024))
    )
    boot_id: str = "b0" * 16
    version: str = "0.1.0"
    started_at: float = WALL - 100
    time: int = 1000 * SECOND
    wait_limit: int = 120 * SECOND
    the_phase: Phase = field(default_factory=lambda: Phase("ready"))
    the_regions: list[RegionSnapshot] = field(default_factory=lambda: [region()])
    the_holding: Holding = field(default_factory=lambda: Holding("none", "none", ("engine",)))
    the_sessions: list[SessionInfo] = field(default_factory=list)
    the_links: list[LinkInfo] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    the_stats: dict[str, dict[str, float]] = field(default_factory=dict)
    hot: dict[str, tuple[list[LayerFigures], list[RequestFigures]]] = field(default_factory=dict)
    rows: list[ConfigRow] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=lambda: {"rss_bytes": 2.0**20})

    def __post_init__(self) -> None:
        self.machine = Machine(self.settings, DictIndex())
        self._numbers: dict[MemberRef, int] = {}

    def now(self) -> int:
        return self.time

    def state(self) -> State:
        return self.machine.state

    def phase(self) -> Phase:
        return self.the_phase

    def regions(self) -> list[RegionSnapshot]:
        return self.the_regions

    def holding(self) -> Holding:
        """See `NodeView`."""
        return self.the_holding

    def sessions(self) -> list[SessionInfo]:
        return self.the_sessions

    def links(self) -> list[LinkInfo]:
        return self.the_links

    def shell_counters(self) -> dict[str, int]:
        return self.counters

    def stats(self) -> dict[str, dict[str, float]]:
        return self.the_stats

    def hot_figures(self) -> dict[str, tuple[list[LayerFigures], list[RequestFigures]]]:
        return self.hot

    def config_rows(self) -> list[ConfigRow]:
        return self.rows

    def oldest_wait_limit(self) -> int:
        return self.wait_limit

    def loop_figures(self) -> dict[str, float]:
        return self.figures

    # What happens to it -----------------------------------------------------------------------

    def handle(self, *events: ev.Event) -> list[Effect]:
        return self.machine.handle(events, self.time)

    def pass_time(self, seconds: float) -> None:
        """Let time pass, with a tick at its end."""
        self.time += int(seconds * SECOND)
        self.handle(ev.Tick())

    def join(
        self,
        member: MemberRef | None = None,
        slots: int = 4,
        layout: ev.Layout | None = LAYOUT,
        rank: int = 0,
        scheduler: bool = True,
    ) -> MemberRef:
        """A member that is worker, and scheduler at once unless told otherwise."""
        who = member or ref()
        event = ev.MemberJoined(1, who, 100, scheduler, rank, 1, 0, True, slots, layout, b"probe")
        self.handle(event)
        return who

    def slot_events(self, who: MemberRef, *items: OwnEvent) -> list[Effect]:
        first = self._numbers.get(who, 0)
        self._numbers[who] = first + len(items)
        return self.handle(ev.SlotsChanged(2, who, first, items))

    def reserve(self, who: MemberRef, request: str, count: int) -> tuple[int, ...]:
        """Blocks of a request; fails the test when there are none."""
        for effect in self.handle(ev.Reserved(3, who, request, count)):
            result = getattr(effect, "result", None)
            if isinstance(result, Taken):
                return result.blocks
        raise AssertionError("nothing was reserved")

    def fill(self, who: MemberRef, request: str, count: int, tokens: int = 16) -> tuple[int, ...]:
        """Ready blocks: reserved, saved in every layer, committed, unpinned."""
        blocks = self.reserve(who, request, count)
        for layer in range(SHAPE.num_layers):
            slot = SlotRef(who, 0, self.epoch(who, 0))
            save = se.SaveSpec("s", blocks, (tokens,) * count)
            self.slot_events(
                who,
                se.Acquired(slot, layer),
                se.Written(slot, layer, (save,)),
                se.Computed(slot),
                se.SaveEnded(slot, "s", True),
            )
        items = tuple(ev.CommitItem(b, b.to_bytes(32), tokens) for b in blocks)
        self.handle(ev.Committed(4, who, items), ev.RequestEnded(5, who, request))
        return blocks

    def load_in_step(self, who: MemberRef, number: int, request: str, *blocks: int) -> SlotRef:
        """A step that loads blocks; its first layer, in slot 0, does so now."""
        load = se.LoadSpec(request, blocks, 16 * len(blocks))
        held = SlotRef(who, 0, self.epoch(who, 0))
        self.slot_events(
            who, se.StepOpened(who, number, (load,)), se.Acquired(held, 0, step=number)
        )
        assert number in self.state().members[who].steps
        return held

    def save_in_step(self, who: MemberRef, number: int, *blocks: int) -> SlotRef:
        """A step that saves into blocks; its first layer, in slot 1, does so now."""
        save = se.SaveSpec("s", blocks, (16,) * len(blocks), self.owners(*blocks))
        held = SlotRef(who, 1, self.epoch(who, 1))
        self.slot_events(
            who,
            se.StepOpened(who, number, (), (save,)),
            se.Acquired(held, 0),
            se.Written(held, 0, step=number),
        )
        assert number in self.state().members[who].steps
        return held

    def owners(self, *blocks: int) -> tuple[str, ...]:
        """The request that fills each of these blocks."""
        pool = self.state().pool
        assert pool is not None
        return tuple(pool.blocks.fills[block].owner.request for block in blocks)

    def epoch(self, who: MemberRef, slot: int) -> int:
        return self.state().members[who].slots[slot].ref.epoch

    def hold(self, who: MemberRef, slot: int, layer: int = 1) -> SlotRef:
        """Compute in a slot and do not end."""
        held = SlotRef(who, slot, self.epoch(who, slot))
        self.slot_events(who, se.Acquired(held, layer))
        return held

    def offer(self, who: MemberRef, slot: int, transfer: str, rows: int = 16) -> SlotRef:
        """A slot whose computing has ended and whose read is offered."""
        held = self.hold(who, slot, 0)
        spec = se.ReadSpec(ReadId(transfer, 0, 0, 0), "tcp://d:1", rows, (7,))
        self.slot_events(who, se.Written(held, 0, (), (spec,)), se.Computed(held))
        return held

    def quarantine(self, who: MemberRef, slot: int) -> SlotRef:
        """A slot whose computing can be neither asked nor fenced."""
        held = self.hold(who, slot)
        timing = self.settings.timing
        self.time += timing.compute
        for _ in range(timing.query_attempts + 1):
            self.handle(ev.Tick())
            self.time += timing.interval
        hold = self.state().members[who].slots[slot].holds[0]
        self.handle(ev.FenceEnded(held, hold.kind, hold.owner, stopped=False))
        assert self.state().members[who].slots[slot].is_quarantined
        return held
