"""One node's kvd: the machine, and a shell that performs its effects in the simulated world."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvd.core import effects as fx
from kvd.core import events as ev
from kvd.core.errors import KvdError
from kvd.core.ids import MemberRef, ReadId, kvd_executor
from kvd.core.machine import Machine
from kvd.core.results import Found, Result
from kvd.core.transfer_types import Source, SourceKind
from kvd.store.dict_index import DictIndex
from kvd.wire.gate_layout import make_word
from tests.sim import cover
from tests.sim.clock import MS
from tests.sim.memory import Copy, free, must_be_quiet
from tests.sim.oracle import Handles
from tests.sim.peers import Peers
from tests.sim.regions import PoolMemory, RegionMemory, pieces_of
from tests.sim.remains import Remains
from tests.sim.trace import show

if TYPE_CHECKING:
    from tests.sim.member import Member
    from tests.sim.world import World


class Node:
    """A kvd and the memory it owns. `machine` is None while it is down."""

    def __init__(self, world: World, address: str) -> None:
        self.world = world
        self.address = address
        self.boot = 0
        self.machine: Machine | None = None
        self.peers = Peers(self)
        self.handles = Handles(address)
        self.sessions: dict[MemberRef, Member] = {}
        self.pages: dict[MemberRef, list[int]] = {}
        self.pools: dict[int, PoolMemory] = {}
        self.regions: dict[str, RegionMemory] = {}
        self.mapped: dict[tuple[int, str], RegionMemory] = {}
        self.remains = Remains()
        self._callers: dict[int, tuple[Member, int, ev.Event]] = {}
        self._joining = False
        self.fuse = False

    @property
    def executor(self) -> str:
        """Name of this life as an executor of reads."""
        return kvd_executor(f"{self.address}.{self.boot}")

    # Life and death --------------------------------------------------------------------------

    def start(self) -> None:
        """A new life: an empty machine, new memory; peers and members find it by themselves."""
        world = self.world
        self.boot += 1
        self.machine = Machine(world.options.settings, DictIndex())
        self.handles = Handles(f"{self.address}.{self.boot}")
        self.sessions = {}
        self.pages = {}
        self._callers = {}
        if not world.options.persistent or self.boot == 1:
            self.remains = Remains()
            self.regions = {}
            name = f"pool {self.address}.{self.boot}"
            self.pools[self.boot] = PoolMemory(name, world.options.shape)
        else:
            self.pools[self.boot] = self.pools[self.boot - 1]
        world.trace(f"{self.address} starts, boot {self.boot}")
        if world.options.persistent and self.boot > 1:
            self._adopt()
        self.peers.start()
        world.clock.at(world.options.tick, self._tick, self.boot)

    def kill(self) -> None:
        """SIGKILL. What it copied stops; who was attached sees its socket close."""
        world = self.world
        world.trace(f"{self.address} is killed, boot {self.boot}")
        pool = self.machine.state.pool if self.machine is not None else None
        if pool is not None and pool.blocks.steps:
            world.marks["kvd killed with open steps"] += 1
        self.machine = None
        self.fuse = False
        world.dma.stop_all(self.executor)
        if world.options.persistent:
            for copy in world.dma.live:
                if copy.guard is self and copy.cover is not None and copy.cover.reads_pool:
                    world.dma.doubt(copy)
        for member in self.sessions.values():
            world.clock.at(world.rng.randint(0, 5 * MS), member.lost, self.boot)

    def _adopt(self) -> None:
        """Begin with what the last life left; of its members some are dead by now."""
        world = self.world
        event = self.remains.adopted(self.regions)
        self.regions = {name: self.regions[name] for name, _, _ in event.regions}
        for name, region in self.regions.items():
            self.mapped[self.boot, name] = region
        self.handle(event)
        for ref in event.absent:
            member = world.members[ref]
            if not member.alive:
                world.prove_death(self, member)

    def knows(self, ref: MemberRef) -> bool:
        """Whether a death of this process is news to this kvd."""
        machine = self.machine
        return ref in self.sessions or (machine is not None and ref in machine.state.absent)

    def _tick(self, boot: int) -> None:
        if boot == self.boot and self.machine is not None:
            self.handle(ev.Tick())
            self.world.clock.at(self.world.options.tick, self._tick, boot)

    # Events and effects ----------------------------------------------------------------------

    def handle(self, event: ev.Event) -> None:
        """Give one event to the machine, check everything, perform what it says."""
        machine = self.machine
        if machine is None:
            return
        world = self.world
        self._joining = type(event) is ev.MemberJoined
        effects = machine.handle((event,), world.clock.now)
        world.num_events += 1
        if world.tracing:
            if effects or type(event) is not ev.Tick:
                world.trace(f"{self.address} < {show(event)}")
            for effect in effects:
                world.trace(f"{self.address} >   {show(effect)}")
        self.remains.record(machine.state)
        world.oracle.books_are_right(machine, self.address)
        cover.check(self, world.dma.live)
        last = len(effects)
        if self.fuse and effects:
            # Killed between a decision and its effects: only some of them are performed.
            last = world.rng.randrange(last)
        for effect in effects[:last]:
            _PERFORM[type(effect)](self, effect)
        if self.fuse and effects:
            self.kill()

    def request(self, boot: int, member: Member, number: int, event: ev.Event) -> None:
        """A member's request arrived; `event.reply` is set here to a handle of this life."""
        if boot != self.boot or self.machine is None:
            return
        is_hello = isinstance(event, ev.MemberJoined)
        if not is_hello and member.ref not in self.sessions:
            return
        if is_hello:
            if member.said_goodbye:
                return
            self.sessions[member.ref] = member
        handle = self.handles.new(type(event).__name__)
        self._callers[handle] = (member, number, event)
        self.handle(self.world.with_reply(event, handle))
        if is_hello and not member.alive:
            self.world.prove_death(self, member)

    def tell(self, boot: int, event: ev.Event) -> None:
        """Something that nobody waits for, from this node or for this life of it."""
        if boot == self.boot:
            self.handle(event)

    # Answers ---------------------------------------------------------------------------------

    def _reply(self, effect: fx.Reply) -> None:
        _, _, event = self._callers[effect.reply]
        if isinstance(event, ev.LookedUp) and isinstance(effect.result, Found):
            pool = self.pools[self.boot]
            spans = [pool.block(block) for block in effect.result.blocks]
            self.world.oracle.hit_is_right(spans, event.hashes, f"{self.address} {event.request}")
        elif isinstance(event, ev.MemberJoined):
            page = self.pages.setdefault(event.ref, [0] * event.num_slots)
            self._callers[effect.reply][0].page_ready(self.boot, page)
        self._answer(effect.reply, effect.result)

    def _refuse(self, effect: fx.Refuse) -> None:
        self._answer(effect.reply, effect.error)

    def _answer(self, handle: int, result: Result | KvdError) -> None:
        self.handles.answered(handle)
        member, number, _ = self._callers.pop(handle)
        member.down.send(member.call, member.answered, self.boot, number, result)

    # The pool and its headers ----------------------------------------------------------------

    def _format(self, effect: fx.FormatPool) -> None:
        self.remains.format(effect)

    def _filling(self, effect: fx.MarkFilling) -> None:
        for block in effect.blocks:
            for place in self.pools[self.boot].block(block):
                must_be_quiet(place, "block reserved", self.address)
        self.remains.mark(effect.blocks)

    def _void(self, effect: fx.MarkVoid) -> None:
        self.remains.mark(effect.blocks)

    def _write_header(self, effect: fx.WriteHeader) -> None:
        self.remains.write(effect)

    def _clear_headers(self, effect: fx.ClearHeaders) -> None:
        self.remains.clear(effect.blocks)

    # Members ---------------------------------------------------------------------------------

    def _store_gate(self, effect: fx.StoreGate) -> None:
        world = self.world
        place = world.slots[effect.member, effect.slot]
        words = (effect.slot, effect.epoch, effect.state)
        world.oracle.stored(self.boot, effect.member, words, self._joining, place)
        word = make_word(effect.epoch, effect.state)
        if self._joining:
            member = self.sessions[effect.member]
            page = self.pages.setdefault(effect.member, [0] * len(member.slot_areas))
            page[effect.slot] = word
            return
        page = self.pages[effect.member]
        world.clock.at(
            world.rng.randint(0, world.options.gate_delay), self._visible, effect.member, page,
            effect.slot, word,
        )  # fmt: skip

    def _visible(self, ref: MemberRef, page: list[int], slot: int, word: int) -> None:
        if word > page[slot]:
            page[slot] = word
        member = self.world.members[ref]
        member.call(member.gate_changed, slot)

    def _drop_member(self, effect: fx.DropMember) -> None:
        member = self.sessions.pop(effect.ref)
        for place in member.slot_areas:
            free(place, f"{self.address} drops {effect.ref}")

    def _ask_member(self, effect: fx.AskMember) -> None:
        member = self.sessions.get(effect.member)
        if member is not None:
            boot, ref, kind, owner = self.boot, effect.ref, effect.kind, effect.owner
            assert isinstance(owner, str)
            member.down.send(member.call, member.asked, boot, ref, kind, owner)

    def _fence_member(self, effect: fx.FenceMember) -> None:
        self.world.fence_process(self, effect)

    # Reads that this kvd executes ------------------------------------------------------------

    def check_rows(self, read: ReadId, source: Source) -> None:
        """What is offered or granted is readable now: the right rows, and nobody writes them."""
        assert self.machine is not None
        transfer = self.machine.state.outgoing.get(read.transfer)
        found = transfer.open.get((read.layer, read.start)) if transfer is not None else None
        if found is None:
            # It ended within the step that offered it.
            return
        document, _, shard = self.world.oracle.transfers[read.transfer]
        size = self.world.options.block_tokens
        for at, block in enumerate(source.blocks):
            first = (read.start // size + at) * size
            start, end = max(first, read.start), min(first + size, found.spec.end)
            if source.kind is SourceKind.SLOT:
                place = self.world.slots[source.ref.member, source.ref.slot]
                offset = block * size + start - first
            else:
                place = self.pools[self.boot].span(block, read.layer, source.shard)
                offset = start - first
            rows = (document, start, end)
            self.world.oracle.rows_are(place, offset, rows, read.layer, shard, "offer", str(read))

    def _start_copy(self, effect: fx.StartCopy) -> None:
        world, read, source = self.world, effect.read, effect.source
        tokens = world.options.block_tokens
        if source.kind is SourceKind.SLOT:
            sources = [world.slots[source.ref.member, source.ref.slot]]
        else:
            address, boot = self.peers.resolve(effect.peer)
            pool = world.nodes[address].pools[boot]
            sources = [pool.span(block, read.layer, source.shard) for block in source.blocks]
        region = self.regions[effect.region]
        targets = [region.areas[read.layer][block] for block in effect.blocks]
        rows = (read.start, effect.end)
        pieces = pieces_of(
            rows, sources, source.blocks, tokens, source.kind, targets, region.spec.block_tokens
        )
        producer, boot = self.peers.resolve(effect.peer)
        copy = Copy(
            f"read {read} by {self.executor}",
            self.executor,
            pieces,
            world.nodes[producer],
            cover.ReadCover(boot, read, self.executor, source),
        )
        world.run_copy(copy, self._copy_ended, self.boot, read)
        node = world.nodes[producer]
        if source.kind is SourceKind.POOL and (node.boot != boot or node.machine is None):
            # A grant of a kvd that is dead by now: who copies sees that at the end.
            world.dma.doubt(copy)

    def _copy_ended(self, ok: bool, boot: int, read: ReadId) -> None:
        event = ev.CopyEnded(read, ok)
        self.tell(boot, event)
        if self.world.happens(self.world.options.duplication):
            self.world.clock.at(self.world.rng.randint(1, 50 * MS), self.tell, boot, event)

    def _make_region(self, effect: fx.MakeRegion) -> None:
        world = self.world
        failed = world.happens(world.options.memory_failure)
        world.clock.at(world.rng.randint(1, 10 * MS), self._region_made, self.boot, effect, failed)

    def _region_made(self, boot: int, effect: fx.MakeRegion, failed: bool) -> None:
        if boot != self.boot or self.machine is None:
            return
        if failed:
            self.handle(ev.RegionMade(effect.region, "memory_short", (("region", "a region"),)))
            return
        name = f"{effect.region} of {self.address}.{boot}"
        region = RegionMemory(name, effect.spec)
        self.regions[effect.region] = self.mapped[boot, effect.region] = region
        self.handle(ev.RegionMade(effect.region))

    def _free_region(self, effect: fx.FreeRegion) -> None:
        for layer in self.regions.pop(effect.region).areas:
            for place in layer:
                free(place, f"{self.address} frees {effect.region}")

    # Peers -----------------------------------------------------------------------------------

    def _send(self, effect: fx.Effect) -> None:
        self.peers.send(effect)


_PERFORM: dict[type, Callable[[Node, Any], None]] = {
    fx.Reply: Node._reply,
    fx.Refuse: Node._refuse,
    fx.StoreGate: Node._store_gate,
    fx.FormatPool: Node._format,
    fx.WriteHeader: Node._write_header,
    fx.MarkFilling: Node._filling,
    fx.MarkVoid: Node._void,
    fx.ClearHeaders: Node._clear_headers,
    fx.DropMember: Node._drop_member,
    fx.AskMember: Node._ask_member,
    fx.FenceMember: Node._fence_member,
    fx.SendOffer: Node._send,
    fx.SendGrant: Node._send,
    fx.SendRevoke: Node._send,
    fx.SendQuery: Node._send,
    fx.SendClaim: Node._send,
    fx.SendDecline: Node._send,
    fx.StartCopy: Node._start_copy,
    fx.SendReadEnded: Node._send,
    fx.SendAnswer: Node._send,
    fx.MakeRegion: Node._make_region,
    fx.FreeRegion: Node._free_region,
}
