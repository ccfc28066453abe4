"""A worker rank: takes slots by the gate, loads, computes, writes, saves and offers them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_shim.gate import AcquiredEpochs
from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.holds import HoldKind, Truth
from kvd.core.ids import MemberRef, SlotRef
from kvd.wire.gate_layout import STATE_FREE, split_word
from tests.sim import layer_work
from tests.sim.clock import MS
from tests.sim.kept import KeptStep
from tests.sim.member import Member
from tests.sim.memory import area
from tests.sim.regions import PoolMemory
from tests.sim.tenancy import Step, Tenancy

if TYPE_CHECKING:
    from tests.sim.prefill import PrefillEngine


class Worker(Member):
    """Rank `rank` of a prefill engine, with a slot for each bound layer and the rotating ones."""

    def __init__(self, engine: PrefillEngine, ref: MemberRef, rank: int) -> None:
        super().__init__(engine.world, engine.node, ref)
        options = engine.world.options
        self.engine = engine
        self.rank = rank
        self.shard = rank if options.num_shards > 1 else 0
        self.contributes = options.num_shards > 1 or rank == 0
        num_slots = options.num_bound + options.num_rotating
        num_rows = options.device_blocks * options.block_tokens
        self.slot_areas = [area(f"{ref} slot {slot}", num_rows) for slot in range(num_slots)]
        for slot, place in enumerate(self.slot_areas):
            self.world.slots[ref, slot] = place
        self.gate = AcquiredEpochs(num_slots)
        self.held: dict[int, Tenancy] = {}
        self.step: Step | None = None
        self.layers: list[Tenancy] = []
        self.num_computed = 0
        self.last_step = 0
        self.kept_loads: KeptStep | None = None
        self.kept_saves: KeptStep | None = None

    @property
    def pool(self) -> PoolMemory:
        """The pool that its session maps."""
        return self.node.pools[self.boot]

    # Attaching -------------------------------------------------------------------------------

    def hello(self) -> ev.MemberJoined:
        """Announce every slot that was ever used, as architecture §9 "re-attach" says."""
        options = self.world.options
        slots = [self._announce(slot) for slot in range(len(self.slot_areas))] if self.page else []
        return ev.MemberJoined(
            0, self.ref, 1, False, self.rank, options.tp_size, self.shard, self.contributes,
            len(self.slot_areas), self.engine.layout, b"probe", tuple(slots),
        )  # fmt: skip

    def _announce(self, slot: int) -> ev.SlotAnnounced:
        epoch, state = split_word(self.page[slot])
        acquired = self.gate.last(slot)
        tenancy = self.held.get(slot)
        if tenancy is None or (epoch > acquired and not tenancy.saves_running):
            return ev.SlotAnnounced(slot, epoch, state == STATE_FREE, acquired)
        computing = not tenancy.computed_said
        savers = tuple(tenancy.saves_running)
        return ev.SlotAnnounced(
            slot, epoch, False, acquired, computing, savers, tuple(tenancy.reads)
        )

    def on_attached(self) -> None:
        """The engine may go on once all its members are attached."""
        self.engine.member_attached()

    def on_lost(self) -> None:
        """No pool, no step: what runs in the slots ends by itself, nothing new is taken."""
        self.engine.member_lost()

    # Steps -----------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Run all layers of a step."""
        self.step = step
        self.layers = []
        self.num_computed = 0
        if self.boot and self.world.options.steps and not step.failed:
            layer_work.keep(self, step)
        self.advance()

    def slot_of(self, layer: int) -> int:
        """Bound layers have a slot of their own, the others take turns."""
        options = self.world.options
        if layer < options.num_bound:
            return layer
        return options.num_bound + (layer - options.num_bound) % options.num_rotating

    def gate_changed(self, slot: int) -> None:
        """Maybe the next layer's slot is free now."""
        self.advance()

    def advance(self) -> None:
        """Take the slots that may be taken, and compute the next layer once it is loaded."""
        step, options = self.step, self.world.options
        if step is None or not self.boot:
            return
        while len(self.layers) < options.num_layers:
            layer = len(self.layers)
            if (
                layer > self.num_computed + options.lookahead
                or step.failed
                or not self._take(layer)
            ):
                break
        if step.failed:
            self.cancel()
            self.engine.worker_done(self, step)
            return
        if self.num_computed < len(self.layers):
            tenancy = self.layers[self.num_computed]
            if tenancy.ready and not tenancy.started:
                layer_work.compute(self, tenancy)

    def _take(self, layer: int) -> bool:
        step = self.step
        assert step is not None
        if layer_work.awaits_step(self, layer):
            return False
        slot = self.slot_of(layer)
        if slot in self.held and self.held[slot].saves_running:
            # A save that kvd refused when it ran already.
            return False
        word, early = self.page[slot], self.world.options.early
        if not self.gate.may_acquire(slot, word, early=early):
            return False
        epoch = self.gate.acquire(slot, word, early=early)
        self.world.oracle.acquired(self.ref, slot, epoch, self.slot_areas[slot])
        tenancy = Tenancy(SlotRef(self.ref, slot, epoch), layer, step)
        self.held[slot] = tenancy
        self.layers.append(tenancy)
        layer_work.acquire(self, tenancy)
        return True

    def layer_computed(self, tenancy: Tenancy) -> None:
        """A layer is behind us: say so, and go on."""
        step = tenancy.step
        self.say_computed(tenancy, not (tenancy.load_failed or step.failed))
        self.num_computed += 1
        if self.num_computed == self.world.options.num_layers:
            self.step = None
            self.close_steps()
            self.engine.worker_done(self, step)
        else:
            self.advance()

    def say_computed(self, tenancy: Tenancy, ok: bool) -> None:
        """COMPUTE ends, once."""
        if not tenancy.computed_said:
            tenancy.computed_said = True
            self.say(se.Computed(tenancy.ref, ok))
            self.end_said(tenancy)

    def end_said(self, tenancy: Tenancy) -> None:
        """Its computation or a save of it has ended: maybe that was all, and all was our own."""
        owed = any(save.saver not in tenancy.results for save in tenancy.saves)
        if tenancy.computed_said and not (owed or tenancy.reads or tenancy.busy):
            self.gate.is_over(tenancy.ref.slot)

    def cancel(self) -> None:
        """Give the step up: each taken slot is given back as soon as nothing runs in it."""
        self.step = None
        self.close_steps()
        for tenancy in self.layers:
            tenancy.cancelled = True
            if tenancy.load_asked:
                self.say(se.LoadEnded(tenancy.ref, False))
            if not tenancy.busy:
                self.say_computed(tenancy, False)
        self.layers = []

    @property
    def has_kept(self) -> bool:
        """Whether kvd keeps blocks for the step that runs."""
        return any(kept is not None and kept.counts for kept in (self.kept_loads, self.kept_saves))

    def die(self) -> None:
        """See `Member`."""
        if self.alive and self.has_kept:
            self.world.marks["death with an open step"] += 1
        super().die()

    def close_steps(self) -> None:
        """No layer of the step begins a copy any more."""
        for kept in (self.kept_loads, self.kept_saves):
            if kept is not None:
                kept.close()
        self.kept_loads = self.kept_saves = None

    # Questions -------------------------------------------------------------------------------

    def asked(self, boot: int, ref: SlotRef, kind: HoldKind, owner: str) -> None:
        """Answer with the truth; what is not acknowledged yet counts as running."""
        tenancy = self.held.get(ref.slot)
        truth = Truth.UNKNOWN
        if tenancy is not None and tenancy.ref == ref:
            if kind is HoldKind.COMPUTE:
                ended = tenancy.computed_said and not self.is_unheard(ref)
                truth = Truth.ENDED_OK if ended else Truth.RUNNING
            else:
                truth = tenancy.results.get(owner, Truth.RUNNING)
        if boot == self.boot:
            answer = ev.MemberAnswered(self.ref, ref, kind, owner, truth)
            self.say_once(answer)
            if self.world.happens(self.world.options.duplication):
                self.later(self.world.rng.randint(1, 100 * MS), self.say_once, answer)
