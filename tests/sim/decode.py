"""A decode engine: one member, its region, its own block allocator, and transfers into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvd.core import events as ev
from kvd.core.errors import KvdError
from kvd.core.ids import MemberRef
from kvd.core.results import Done, ItemStatuses, TransferOver
from tests.sim.clock import MS
from tests.sim.content import Document
from tests.sim.member import Answer, Member
from tests.sim.memory import Violation, must_be_quiet, write
from tests.sim.regions import RegionMemory

if TYPE_CHECKING:
    from tests.sim.node import Node
    from tests.sim.world import World

REGION_CODES = ("region_exists", "memory_short")
TRANSFERS_MAX = 5
WAIT_CODES = ("transfer_failed", "deadline_exceeded", "transfer_unknown")
"""Unknown: it ended, the answer was lost, and it was forgotten before it was asked for again."""


@dataclass(eq=False, slots=True)
class Incoming:
    """One transfer. Its blocks go back to the free list only when no copy can write them.

    era: which of the engine's regions, one after the other, its blocks lie in.
    """

    name: str
    document: Document
    length: int
    blocks: tuple[int, ...]
    deadline: int
    era: int
    over: bool = False


class DecodeEngine(Member):
    """One life of a decode engine."""

    def __init__(self, world: World, node: Node, name: str, incarnation: int) -> None:
        super().__init__(world, node, MemberRef(name, "worker0", incarnation))
        options = world.options
        self.name = name
        self.ready = False
        self.era = 0
        self.region = f"region-{name}"
        self.spec = ev.RegionSpec(
            options.num_layers, options.region_blocks, options.region_block_tokens, 8
        )
        self.memory = RegionMemory("none", self.spec)
        self.free = list(range(options.region_blocks))
        self.generations = dict.fromkeys(self.free, 0)
        self.transfers: dict[str, Incoming] = {}
        self.later(world.rng.randint(0, 5 * MS), self.attach)

    # The session and the region --------------------------------------------------------------

    def hello(self) -> ev.MemberJoined:
        """See `Member`."""
        return ev.MemberJoined(0, self.ref, 1, True, 0, 1, 0, False, 0, None, b"")

    def on_attached(self) -> None:
        """Ask for the region: the one of an earlier session, or a new one."""
        self._ask_region()

    def on_lost(self) -> None:
        """Everything under way fails; blocks come back once the next session has dropped it."""
        self.ready = False
        self.era += 1
        for transfer in list(self.transfers.values()):
            transfer.over = True

    def renew(self) -> None:
        """Give the region back, and ask for it again."""
        if self.ready:
            self.on_lost()
            event = ev.RegionDropped(0, self.ref, self.region)
            self.ask(event, lambda answer: self._renewed(answer))

    def _renewed(self, answer: Answer) -> None:
        if isinstance(answer, KvdError) and answer.code != "region_unknown":
            raise Violation("never", f"the end of a region was refused with {answer}")
        if answer is not None:
            self._ask_region()

    def _ask_region(self) -> None:
        self.ask(ev.RegionAsked(0, self.ref, self.region, self.spec), self._has_region)

    def _has_region(self, answer: Answer) -> None:
        if isinstance(answer, Done):
            self.ready = True
            self.memory = self.node.mapped[self.boot, self.region]
            for transfer in list(self.transfers.values()):
                self._drop(transfer)
        elif isinstance(answer, KvdError):
            if answer.code not in REGION_CODES:
                raise Violation("never", f"region refused with {answer}")
            self.later(30 * MS, self._ask_region)

    # Transfers -------------------------------------------------------------------------------

    def begin(self, document: Document, length: int) -> None:
        """Take blocks for a transfer and announce them; it is not begun when there is no room."""
        need = -(-length // self.spec.block_tokens)
        if not self.ready or len(self.free) < need or len(self.transfers) >= TRANSFERS_MAX:
            return
        blocks = tuple(self.free.pop(0) for _ in range(need))
        pairs = []
        for block in blocks:
            self.generations[block] += 1
            pairs.append((block, self.generations[block]))
        deadline = self.world.clock.now + self.world.rng.choice((400, 1200, 2500)) * MS
        name = f"t{self.world.next_number()}"
        transfer = Incoming(name, document, length, blocks, deadline, self.era)
        event = ev.BlocksAllocated(0, self.ref, self.region, tuple(pairs))
        self.ask(event, lambda answer: self._allocated(transfer, answer))

    def _allocated(self, transfer: Incoming, answer: Answer) -> None:
        if not isinstance(answer, ItemStatuses) or transfer.era != self.era:
            if isinstance(answer, KvdError) and answer.code != "region_unknown":
                raise Violation("never", f"allocation refused with {answer}")
            self._give_back(transfer)
            return
        # Allocation is sent again when its answer is lost: then it is the same generation.
        codes = answer.codes or ("",) * len(transfer.blocks)
        if any(code not in ("", "destination_busy", "stale_generation") for code in codes):
            raise Violation("never", f"allocation of {transfer.name}: {codes}")
        if "destination_busy" in codes:
            self._give_back(transfer)
            return
        for block in transfer.blocks:
            for layer in self.memory.areas:
                must_be_quiet(layer[block], "destination reused", transfer.name)
        rng = self.world.rng
        self.transfers[transfer.name] = transfer
        self.world.oracle.transfers[transfer.name] = (transfer.document, transfer.length, 0)
        event = ev.TransferExpected(
            0, self.ref, transfer.name, self.region, transfer.blocks, transfer.length,
            self.spec.num_layers, transfer.deadline,
        )  # fmt: skip
        early = rng.random() < 0.3
        if early:
            self._order(transfer)
        self.ask(event, lambda answer: self._expected(transfer, early, answer))

    def _order(self, transfer: Incoming) -> None:
        self.world.order(self, transfer.name, transfer.document, transfer.length)

    def _expected(self, transfer: Incoming, ordered: bool, answer: Answer) -> None:
        if transfer.over or answer is None:
            return
        if isinstance(answer, KvdError):
            if answer.code not in ("destination_busy", "region_unknown"):
                raise Violation("never", f"transfer {transfer.name} refused with {answer}")
            self._over(transfer)
            return
        if not ordered:
            self._order(transfer)
        deadline = transfer.deadline + self.world.rng.choice((-100, 50)) * MS
        event = ev.TransferAwaited(0, self.ref, transfer.name, deadline)
        self.ask(event, lambda answer: self._ended(transfer, answer))
        if self.world.happens(self.world.options.drop_rate):
            self.later(self.world.rng.randint(0, 300 * MS), self._drop, transfer)

    def _ended(self, transfer: Incoming, answer: Answer) -> None:
        if transfer.over or answer is None:
            return
        if isinstance(answer, TransferOver):
            self._check(transfer)
            self.world.num_transfers += 1
            # Decoding: new rows follow the transferred ones in the last block.
            size = self.spec.block_tokens
            if transfer.length % size:
                for layer in self.memory.areas:
                    place = layer[transfer.blocks[-1]]
                    write(place, transfer.length % size, (1,), False, transfer.name)
            self.later(self.world.rng.randint(0, 50 * MS), self._over, transfer)
            return
        assert isinstance(answer, KvdError)
        if answer.code not in WAIT_CODES:
            raise Violation("never", f"the wait for {transfer.name} was refused with {answer}")
        self._drop(transfer)

    def _check(self, transfer: Incoming) -> None:
        """Rule 6."""
        size = self.spec.block_tokens
        shard = self.world.oracle.transfers[transfer.name][2]
        for layer, areas in enumerate(self.memory.areas):
            for at, block in enumerate(transfer.blocks):
                rows = (transfer.document, at * size, min(transfer.length, (at + 1) * size))
                self.world.oracle.rows_are(
                    areas[block], 0, rows, layer, shard, "transfer", transfer.name
                )

    def _drop(self, transfer: Incoming) -> None:
        """Give it up; the blocks are free when kvd says that nothing writes them."""
        if transfer.name not in self.transfers:
            return
        transfer.over = True
        event = ev.TransferDropped(0, self.ref, transfer.name)
        self.ask(event, lambda answer: self._dropped(transfer, answer))

    def _dropped(self, transfer: Incoming, answer: Answer) -> None:
        if isinstance(answer, KvdError):
            if answer.code != "destination_busy":
                raise Violation("never", f"drop of {transfer.name} refused with {answer}")
            self.later(15 * MS, self._drop, transfer)
        elif answer is not None:
            for block in transfer.blocks:
                for layer in self.memory.areas:
                    must_be_quiet(layer[block], "destination free", transfer.name)
            self._over(transfer)

    def _over(self, transfer: Incoming) -> None:
        if self.transfers.pop(transfer.name, None) is not None:
            transfer.over = True
            self._give_back(transfer)

    def _give_back(self, transfer: Incoming) -> None:
        self.free += transfer.blocks
