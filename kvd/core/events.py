"""Everything that can happen to the machine. Past tense; one frozen dataclass each.

`reply` is the shell's handle of the request that waits for an answer; the machine gives it back in
exactly one `Reply` or `Refuse`. Handle 0 means that nobody waits.
"""

from __future__ import annotations

from kvd.core.adopted import NodeAdopted
from kvd.core.blocks import BlockShape
from kvd.core.holds import HoldKind, Truth
from kvd.core.ids import MemberRef, SlotRef
from kvd.core.record import record
from kvd.core.slot_events import ReadSpec, SlotEvent, StepClosed, StepOpened
from kvd.core.transfer_events import (
    BlocksAllocated,
    ClaimCame,
    CopyEnded,
    DeclineCame,
    EndCame,
    FenceEnded,
    GrantCame,
    OfferCame,
    PeerLost,
    QueryCame,
    ReadAnswered,
    RegionAsked,
    RegionDropped,
    RegionMade,
    RegionSpec,
    RevokeCame,
    TransferAwaited,
    TransferDropped,
    TransferExpected,
)
from kvd.core.use_events import Used

__all__ = [
    "BlocksAllocated",
    "BlocksPoisoned",
    "ClaimCame",
    "CommitItem",
    "Committed",
    "CopyEnded",
    "DeclineCame",
    "EndCame",
    "Event",
    "ExecutorLost",
    "FenceEnded",
    "GrantCame",
    "Layout",
    "LookedUp",
    "MemberAnswered",
    "MemberDied",
    "MemberJoined",
    "MemberSilent",
    "NodeAdopted",
    "OfferCame",
    "PeerLost",
    "QueryCame",
    "ReadAnswered",
    "RegionAsked",
    "RegionDropped",
    "RegionMade",
    "RegionSpec",
    "Renewed",
    "RequestEnded",
    "Reserved",
    "RevokeCame",
    "SlotAnnounced",
    "SlotsChanged",
    "Tick",
    "TransferAwaited",
    "TransferDropped",
    "TransferExpected",
]

# Engines and members --------------------------------------------------------------------------


@record
class Layout:
    """How an engine's KV divides into blocks, as far as the core must know.

    namespace: digest of model, layout, dtype, block size, plan, shards and tenant.
    stride:    bytes of one block in the pool.
    text:      for people: what the digest covers.
    """

    namespace: bytes
    shape: BlockShape
    stride: int
    text: str = ""


@record
class SlotAnnounced:
    """One slot as a member that already ran announces it to a new kvd.

    word_epoch, word_free: the last gate word the member saw on its old page.
    acquired:  the last epoch it acquired, -1 for none.
    computing: whether it still computes in the slot.
    savers:    its saves still running.
    reads:     reads that were armed and may still be running.
    """

    slot: int
    word_epoch: int
    word_free: bool
    acquired: int
    computing: bool = False
    savers: tuple[str, ...] = ()
    reads: tuple[ReadSpec, ...] = ()


@record
class MemberJoined:
    """A member said hello.

    is_scheduler: it may look up, reserve, commit and end requests.
    rank:         rank of a worker, -1 for a scheduler without one.
    shard:        the span of each layer that this worker loads and, if it contributes, saves.
    contributes:  whether this worker's saves make up stored blocks.
    layout:       None for a decode engine that uses no pool.
    """

    reply: int
    ref: MemberRef
    pid: int
    is_scheduler: bool
    rank: int
    tp_size: int
    shard: int
    contributes: bool
    num_slots: int
    layout: Layout | None
    hash_probe: bytes
    slots: tuple[SlotAnnounced, ...] = ()


@record
class MemberDied:
    """Proven: the member's process has ended, or it said goodbye and touches nothing more."""

    ref: MemberRef
    why: str = "process ended"


@record
class MemberSilent:
    """The member's attach socket closed, but its process is not proven dead."""

    ref: MemberRef


# Requests and blocks --------------------------------------------------------------------------


@record
class LookedUp:
    """A scheduler asks for the longest prefix hit; `hashes` is n x 32 bytes."""

    reply: int
    ref: MemberRef
    request: str
    hashes: bytes
    pin: bool = True


@record
class Reserved:
    """A scheduler asks for private blocks for a request."""

    reply: int
    ref: MemberRef
    request: str
    count: int


@record
class CommitItem:
    """One block's key and token count.

    request: whose block it must still be, '' for not checked: block ids are used again, and a
        commit that was late or sent twice must not name the next owner's block.
    """

    block: int
    block_hash: bytes
    tokens: int
    request: str = ""


@record
class Committed:
    """A scheduler gives blocks their keys."""

    reply: int
    ref: MemberRef
    items: tuple[CommitItem, ...]


@record
class RequestEnded:
    """A scheduler unpins a request's blocks.

    blocks:  only these, or None for all (the request is over).
    aborted: its uncommitted blocks are worthless at once.
    """

    reply: int
    ref: MemberRef
    request: str
    blocks: tuple[int, ...] | None = None
    aborted: bool = False


@record
class Renewed:
    """A scheduler keeps the pins of a looked-up request for another lease."""

    reply: int
    ref: MemberRef
    request: str


@record
class BlocksPoisoned:
    """An engine found that the bytes of these blocks are not what they should be."""

    reply: int
    ref: MemberRef
    blocks: tuple[int, ...]


# Slots -------------------------------------------------------------------------------------


@record
class SlotsChanged:
    """A batch of a member's own slot events, in its order.

    first_no: number of items[0]; each item counts one. What was seen is not done again, a gap is
        refused, so events that arm or lift holds keep their order per member.
    """

    reply: int
    ref: MemberRef
    first_no: int
    items: tuple[SlotEvent | StepOpened | StepClosed | Used, ...]


@record
class MemberAnswered:
    """A member said what became of a hold that it executes."""

    ref: MemberRef
    slot: SlotRef
    kind: HoldKind
    owner: str
    truth: Truth


@record
class ExecutorLost:
    """Proven: this process has ended; nothing that it executed touches memory any more."""

    executor: str


# Time --------------------------------------------------------------------------------------


@record
class Tick:
    """Time passed; deadlines are looked at."""


Event = (
    NodeAdopted
    | MemberJoined
    | MemberDied
    | MemberSilent
    | LookedUp
    | Reserved
    | Committed
    | RequestEnded
    | Renewed
    | BlocksPoisoned
    | SlotsChanged
    | MemberAnswered
    | ExecutorLost
    | ClaimCame
    | DeclineCame
    | EndCame
    | ReadAnswered
    | FenceEnded
    | TransferExpected
    | TransferAwaited
    | TransferDropped
    | OfferCame
    | GrantCame
    | RevokeCame
    | QueryCame
    | CopyEnded
    | PeerLost
    | RegionAsked
    | RegionMade
    | RegionDropped
    | BlocksAllocated
    | Tick
)
