"""The machine's books: plain mutable records, changed only by the handlers of `Machine.handle`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from kvd.core.block_columns import BlockColumns
from kvd.core.block_queues import BlockQueues
from kvd.core.blocks import BlockShape, BlockTable
from kvd.core.errors import LocalError
from kvd.core.events import Layout, RegionSpec
from kvd.core.evictions import make_policy
from kvd.core.holds import Hold, Timing
from kvd.core.ids import MemberRef, ReadId, RequestKey, SlotRef, StepId
from kvd.core.prefix import BlockIndex
from kvd.core.slot import Rules, Slot
from kvd.core.slot_events import LoadSpec, ReadSpec, SaveSpec, StepOpened
from kvd.core.story import Story
from kvd.core.transfer_types import Source


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of everything that grows, fixed at start; names as in kvd.toml."""

    engines: int = 16
    members_per_engine: int = 17
    slots_per_member: int = 1024
    readers_per_slot: int = 64
    requests_per_engine: int = 4096
    blocks_per_request: int = 65_536
    batch_items: int = 256
    waiters: int = 1024
    transfers: int = 1024
    regions: int = 64
    story_entries: int = 16_384

    def check(self, what: str, value: int, key: str) -> None:
        """Refuse a value over its limit.

        Raises: LocalError(limit_reached).
        """
        limit = getattr(self, key)
        if value > limit:
            raise LocalError("limit_reached", what=what, value=value, limit=limit, key=key)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the machine takes from the configuration.

    pool_bytes:    size of the data region; the block count follows from the engine's stride.
    block_max:     most blocks whatever the size (metadata is laid out for that many).
    region_bytes:  cap of all decode regions together.
    lookup_lease:  how long pins of a look-up live without another word, ns.
    orphan_grace:  how long a committed block waits for its saves after its owner left, ns.
    keep_ended:    ended transfers remembered, to answer late questions.
    eviction:      name of the eviction policy.
    high_water:    share of the blocks in use above which ticks evict,
    low_water:     and the share where they stop; 1.0 for both: only a reserve evicts.
    checksums:     which spans of the pool have checksums: off, sampled or always.
    """

    pool_bytes: int = 0
    block_max: int = 1 << 20
    region_bytes: int = 0
    lookup_lease: int = 30_000_000_000
    orphan_grace: int = 30_000_000_000
    keep_ended: int = 1024
    eviction: str = "arc"
    high_water: float = 1.0
    low_water: float = 1.0
    checksums: str = "off"
    timing: Timing = field(default_factory=Timing)
    limits: Limits = field(default_factory=Limits)


@dataclass(slots=True)
class Tenancy:
    """What the machine knows about the occupant of one held slot beyond its holds.

    targets: blocks that its saves write or wrote, and which life of each.
    loads:   requests and blocks of the loads that run.
    spoiled: requests whose loads brought other bytes than were saved: no row of theirs is written
             out of the slot, and nothing is offered.
    """

    layer: int = -1
    saves: dict[str, SaveSpec] = field(default_factory=dict)
    targets: dict[int, int] = field(default_factory=dict)
    load_blocks: tuple[int, ...] = ()
    loads: tuple[tuple[str, tuple[int, ...]], ...] = ()
    spoiled: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class MemberStep:
    """An open step: what each of its layers saves and loads, and these blocks together."""

    id: StepId
    saves: tuple[SaveSpec, ...]
    loads: tuple[LoadSpec, ...]
    targets: frozenset[int]
    sources: tuple[int, ...]


@dataclass(slots=True)
class Member:
    """One attached member process and its slots.

    next_no:  number of the slot event expected next.
    codes:    refused events among the last `batch_items`, by number: what is sent again because
              its answer was lost gets the same answer.
    leaving:  its process is gone; it stays until remote readers of its slots have ended.
    held:     indices of slots that are not free (what a tick must look at).
    steps:    open steps by number; `last_step` is the highest number of any.
    refused:  steps that are not kept and were not closed, the latest of them: what their layers
              copy is asked for by their number all the same.
    """

    ref: MemberRef
    pid: int
    is_scheduler: bool
    rank: int
    shard: int
    contributes: bool
    slots: list[Slot]
    next_no: int = 0
    codes: dict[int, str] = field(default_factory=dict)
    leaving: bool = False
    silent: bool = False
    held: dict[int, Tenancy] = field(default_factory=dict)
    steps: dict[int, MemberStep] = field(default_factory=dict)
    refused: dict[int, StepOpened] = field(default_factory=dict)
    last_step: int = 0


@dataclass(slots=True)
class Request:
    """Blocks that a request of an engine keeps, in order of arrival.

    lease: when a mere look-up loses its pins, 0 once the request runs.
    ended: code and sentence with which every further call about it is refused.
    """

    key: RequestKey
    blocks: dict[int, object] = field(default_factory=dict)
    lease: int = 0
    ended: str = ""


@dataclass(slots=True)
class Engine:
    """One engine: what its members must agree on, and its requests."""

    name: str
    tp_size: int
    layout: Layout | None
    hash_probe: bytes
    namespace: int = -1
    members: dict[str, Member] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)


@dataclass(slots=True)
class Pool:
    """The prefill pool while it is formatted for some layout.

    free_low:   fewer free blocks than this are too few: high water.
    free_high:  so many are enough: low water.
    makes_room: whether ticks evict now.
    """

    stride: int
    digest: bytes
    blocks: BlockTable
    free_low: int = 0
    free_high: int = 0
    makes_room: bool = False


@dataclass(slots=True)
class OutRead:
    """A read that this kvd's engines offer: what an offer must say.

    lives: of its pool blocks when it was armed; nothing pins them before the redirect.
    hold: set once the read was redirected to the pool; while it is None the hold is the slot's.
    """

    spec: ReadSpec
    read: ReadId
    ref: SlotRef
    layer: int
    shard: int
    lives: tuple[int, ...] = ()
    hold: Hold | None = None
    poisoned: bool = False


@dataclass(slots=True)
class OutTransfer:
    """Producer's view of a transfer: it is over when no read is open.

    tokens: the furthest row offered so far.
    """

    transfer: str
    engine: str
    peer: str
    open: dict[tuple[int, int], OutRead] = field(default_factory=dict)
    failed: str = ""
    tokens: int = 0
    done: int = 0


@dataclass(slots=True)
class InRead:
    """A read that this kvd executes (consumer side).

    phase: 'claimed' (asked, no grant), 'copying', 'ended'.
    """

    read: ReadId
    peer: str
    ref: SlotRef
    end: int
    claim: int
    ask_at: int
    phase: str = "claimed"
    ok: bool = False
    source: Source | None = None


@dataclass(slots=True)
class InTransfer:
    """Consumer's view of a transfer: it is over when every layer has rows [0, tokens).

    received: per layer, row ranges that have arrived, merged, as {start: end}.
    """

    transfer: str
    engine: str
    region: str
    blocks: tuple[int, ...]
    tokens: int
    deadline: int
    received: list[dict[int, int]]
    reads: dict[ReadId, InRead] = field(default_factory=dict)
    failed: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether all rows of all layers have arrived."""
        return all(ranges.get(0, 0) >= self.tokens for ranges in self.received)

    @property
    def is_over(self) -> bool:
        """Complete or failed."""
        return bool(self.failed) or self.is_complete


@dataclass(slots=True)
class Waiter:
    """A request that is answered when a transfer is over, or at its deadline."""

    reply: int
    engine: str
    transfer: str
    deadline: int
    since: int


@dataclass(slots=True)
class Region:
    """A decode region. `ready` once its memory is there; `askers` wait for that."""

    name: str
    engine: str
    spec: RegionSpec
    ready: bool = False
    dropped: bool = False
    askers: list[int] = field(default_factory=list)
    generations: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class State:
    """Everything.

    roster: grows with every change of what the next life of kvd must know beside the blocks:
            the pool's layout, members, regions.
    absent, inherited_blocks, inherited_saves: see `adoption`.
    """

    settings: Settings
    index: BlockIndex
    rules: Rules
    story: Story
    engines: dict[str, Engine] = field(default_factory=dict)
    members: dict[MemberRef, Member] = field(default_factory=dict)
    namespaces: dict[bytes, int] = field(default_factory=dict)
    probes: dict[int, bytes] = field(default_factory=dict)
    pool: Pool | None = None
    outgoing: dict[str, OutTransfer] = field(default_factory=dict)
    incoming: dict[str, InTransfer] = field(default_factory=dict)
    waiters: list[Waiter] = field(default_factory=list)
    regions: dict[str, Region] = field(default_factory=dict)
    counters: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    next_claim: int = 1
    next_sweep: int = 0
    roster: int = 0
    absent: set[MemberRef] = field(default_factory=set)
    inherited_blocks: list[int] = field(default_factory=list)
    inherited_saves: set[SlotRef] = field(default_factory=set)
    queues: type[BlockQueues] = BlockQueues

    def count(self, what: str) -> None:
        """Add one to a counter; names are fixed strings of the code, never input."""
        self.counters[what] += 1

    def member(self, ref: MemberRef) -> Member:
        """The live member with this exact incarnation.

        Raises: LocalError(stale_incarnation).
        """
        found = self.members.get(ref)
        if found is None or found.leaving:
            raise LocalError("stale_incarnation", member=ref)
        return found

    def scheduler(self, ref: MemberRef) -> Engine:
        """The engine of a member that may decide about requests.

        Raises: LocalError(stale_incarnation | not_scheduler).
        """
        if not self.member(ref).is_scheduler:
            raise LocalError("not_scheduler", member=ref)
        return self.engines[ref.engine]

    def make_pool(
        self, shape: BlockShape, stride: int, digest: bytes, columns: BlockColumns | None = None
    ) -> Pool:
        """Format the pool for a layout; what was in it is forgotten.

        columns: of an earlier life, which the table is about to adopt.
        """
        if columns is None:
            total = min(self.settings.pool_bytes // stride, self.settings.block_max)
        else:
            total = len(columns)
        self.index.clear(total)
        self.roster += 1
        policy = make_policy(self.settings.eviction, total, self.queues)
        self.pool = Pool(
            stride,
            digest,
            BlockTable(total, shape, self.index, policy, columns),
            _blocks_above(self.settings.high_water, total),
            _blocks_above(self.settings.low_water, total),
        )
        return self.pool


def _blocks_above(mark: float, total: int) -> int:
    """How many of the blocks lie above a water mark, rounded down; 1 - 0.99 is not quite 0.01."""
    return int(total * (1 - mark) + 1e-6)
