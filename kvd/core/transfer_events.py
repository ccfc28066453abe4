"""Events about reads, transfers and decode regions; see `events.py` for all others."""

from __future__ import annotations

from kvd.core.holds import HoldKind, Truth
from kvd.core.ids import MemberRef, ReadId, SlotRef
from kvd.core.record import record
from kvd.core.slot_events import BadSum
from kvd.core.transfer_types import Offer, Source

# Reads, producer side ----------------------------------------------------------------------------


@record
class ClaimCame:
    """A reader asks for its grant."""

    executor: str
    ref: SlotRef
    read: ReadId
    claim: int


@record
class DeclineCame:
    """A reader will never claim this offer."""

    executor: str
    ref: SlotRef
    read: ReadId


@record
class EndCame:
    """A reader's granted read has ended; `bad`: pool blocks that it found damaged."""

    executor: str
    ref: SlotRef
    read: ReadId
    ok: bool
    bad: tuple[BadSum, ...] = ()


@record
class ReadAnswered:
    """The kvd `executor`, which is reached at `address`, said what became of a read.

    fence: it answers a fence request: whatever it says, nothing runs any more.
    """

    executor: str
    address: str
    ref: SlotRef
    read: ReadId
    truth: Truth
    fence: bool = False


@record
class FenceEnded:
    """The answer to a fence request: whether the party of this hold is provably stopped."""

    ref: SlotRef
    kind: HoldKind
    owner: str | ReadId
    stopped: bool


# Transfers, consumer side ------------------------------------------------------------------------


@record
class TransferExpected:
    """A decode engine names the destination of a transfer.

    blocks:   its block ids in `region`, generation for each; rows [0, tokens) land there in order.
    deadline: when the transfer has failed, ns of the machine's clock.
    """

    reply: int
    ref: MemberRef
    transfer: str
    region: str
    blocks: tuple[int, ...]
    tokens: int
    num_layers: int
    deadline: int


@record
class TransferAwaited:
    """Somebody wants to know when the transfer has ended; producer or consumer side."""

    reply: int
    ref: MemberRef
    transfer: str
    deadline: int


@record
class TransferDropped:
    """The engine gives the transfer up (request aborted).

    peer: address of the reader's kvd, for a producer that has offered nothing yet.
    """

    reply: int
    ref: MemberRef
    transfer: str
    peer: str = ""


@record
class OfferCame:
    """A peer offers rows."""

    peer: str
    offer: Offer


@record
class GrantCame:
    """A peer granted claim number `claim`."""

    peer: str
    read: ReadId
    claim: int
    source: Source


@record
class RevokeCame:
    """A peer has no such offer any more, or its data is not valid."""

    peer: str
    read: ReadId
    why: str


@record
class QueryCame:
    """A peer asks what became of a read; `fence`: and that it be stopped."""

    peer: str
    ref: SlotRef
    read: ReadId
    fence: bool


@record
class CopyEnded:
    """A copy that this kvd executed has ended; `bad`: the peer's pool blocks that are damaged."""

    read: ReadId
    ok: bool
    detail: str = ""
    bad: tuple[BadSum, ...] = ()


@record
class PeerLost:
    """The link to a peer kvd is gone, or a new life of it took its place."""

    peer: str


# Regions -----------------------------------------------------------------------------------


@record
class RegionSpec:
    """Shape of a decode region: [layer][block][row], one row for each token."""

    num_layers: int
    num_blocks: int
    block_tokens: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Size of the region."""
        return self.num_layers * self.num_blocks * self.block_tokens * self.row_bytes


@record
class RegionAsked:
    """A decode engine asks for its region (or for the one that it already has)."""

    reply: int
    ref: MemberRef
    region: str
    spec: RegionSpec


@record
class RegionMade:
    """The memory of an asked region exists and is populated, or could not be had."""

    region: str
    code: str = ""
    context: tuple[tuple[str, str], ...] = ()


@record
class RegionDropped:
    """A decode engine destroys its region."""

    reply: int
    ref: MemberRef
    region: str


@record
class BlocksAllocated:
    """A decode engine reuses block ids of its region: (block, generation) pairs."""

    reply: int
    ref: MemberRef
    region: str
    blocks: tuple[tuple[int, int], ...]
