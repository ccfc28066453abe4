"""Everything the machine can ask of the world. Imperative; performed in order by the shell.

Effects are requests (R9): they may be repeated, they may be lost on the way, and their receivers
are idempotent by the names they carry.
"""

from __future__ import annotations

from kvd.core.errors import KvdError
from kvd.core.events import RegionSpec
from kvd.core.holds import HoldKind, Truth
from kvd.core.ids import MemberRef, Owner, ReadId, SlotRef
from kvd.core.record import record
from kvd.core.results import Result
from kvd.core.slot_events import BadSum
from kvd.core.transfer_types import Offer, Source


@record
class Reply:
    """Answer the request with this handle."""

    reply: int
    result: Result


@record
class Refuse:
    """Answer the request with this handle: nothing was changed, and why."""

    reply: int
    error: KvdError


@record
class StoreGate:
    """Publish a slot's word on its member's gate page, then wake the member."""

    member: MemberRef
    slot: int
    epoch: int
    state: int


@record
class FormatPool:
    """Lay the pool out anew: every header reset, no checksum known."""

    stride: int
    total: int
    digest: bytes
    num_spans: int = 0


@record
class WriteSums:
    """Record the checksums of one span of some blocks, before a header says that they are ready.

    tokens: valid rows of each block.
    sums:   as in `SaveEnded`.
    """

    span: int
    blocks: tuple[int, ...]
    tokens: tuple[int, ...]
    sums: bytes


@record
class WriteHeader:
    """Record a block that became ready; performed before the commit is answered."""

    block: int
    namespace: bytes
    block_hash: bytes
    tokens: int


@record
class MarkFilling:
    """Record that these blocks are being filled."""

    blocks: tuple[int, ...]


@record
class MarkVoid:
    """Record that these blocks hold nothing valid, although somebody may still write or read."""

    blocks: tuple[int, ...]


@record
class ClearHeaders:
    """Record that these blocks are reset."""

    blocks: tuple[int, ...]


@record
class DropMember:
    """Forget a member's memory and session: nobody touches its slots any more."""

    ref: MemberRef


@record
class AskMember:
    """Ask a member what became of a hold of its own."""

    member: MemberRef
    ref: SlotRef
    kind: HoldKind
    owner: Owner


@record
class FenceMember:
    """Prove that a member's process has ended; answer with FenceEnded or MemberDied."""

    member: MemberRef
    ref: SlotRef
    kind: HoldKind
    owner: Owner


@record
class SendOffer:
    """Offer rows to the kvd at this address."""

    address: str
    offer: Offer


@record
class SendGrant:
    """Tell the kvd with this executor name that it may read."""

    executor: str
    read: ReadId
    claim: int
    source: Source


@record
class SendRevoke:
    """Tell a reader that there is nothing to read (any more).

    to: executor name, or address when nobody has claimed.
    """

    to: str
    read: ReadId
    why: str


@record
class SendQuery:
    """Ask the executor of a read what became of it; `fence`: and have it stopped."""

    executor: str
    ref: SlotRef
    read: ReadId
    fence: bool


@record
class SendClaim:
    """Claim an offered read from the peer that offered it."""

    peer: str
    ref: SlotRef
    read: ReadId
    claim: int


@record
class SendDecline:
    """Tell the peer that its offer will never be claimed."""

    peer: str
    ref: SlotRef
    read: ReadId


@record
class StartCopy:
    """Copy rows [read.start, end) from a peer's memory into a region, then say CopyEnded."""

    peer: str
    read: ReadId
    end: int
    source: Source
    region: str
    blocks: tuple[int, ...]


@record
class SendReadEnded:
    """Tell the producer's kvd that a granted read has ended, and what it found damaged."""

    peer: str
    ref: SlotRef
    read: ReadId
    ok: bool
    bad: tuple[BadSum, ...] = ()


@record
class SendAnswer:
    """Answer a producer's question about a read; `fence`: this answers a fence request."""

    peer: str
    ref: SlotRef
    read: ReadId
    truth: Truth
    fence: bool


@record
class MakeRegion:
    """Create and populate the memory of a region, then say RegionMade."""

    region: str
    spec: RegionSpec


@record
class FreeRegion:
    """Give the memory of a region back."""

    region: str


Effect = (
    Reply
    | Refuse
    | StoreGate
    | FormatPool
    | WriteSums
    | WriteHeader
    | MarkFilling
    | MarkVoid
    | ClearHeaders
    | DropMember
    | AskMember
    | FenceMember
    | SendOffer
    | SendGrant
    | SendRevoke
    | SendQuery
    | SendClaim
    | SendDecline
    | StartCopy
    | SendReadEnded
    | SendAnswer
    | MakeRegion
    | FreeRegion
)
