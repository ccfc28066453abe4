"""Frames between two kvds about reads: the producer's DEALER to the consumer's ROUTER.

They carry the token that the *receiver* gave: the consumer's token came with `peer_welcome`, the
producer's with the consumer's attach. All but the hello are one-way, may be lost or repeated, and
name (incarnation, slot, epoch, transfer, layer, start, attempt).
"""

from __future__ import annotations

import msgspec

from kvd.wire.protocol import BootId, Name, Positive, Token, TransferName, Unsigned
from kvd.wire.slot_items import BadSumItem


class ReadName(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`kvd.core.ids.ReadId` on the wire."""

    transfer: TransferName
    layer: int
    start: Unsigned
    attempt: Unsigned


class TenancyName(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`kvd.core.ids.SlotRef` on the wire."""

    engine: Name
    member: Name
    incarnation: Unsigned
    slot: Unsigned
    epoch: Unsigned


class SourceItem(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`kvd.core.transfer_types.Source` on the wire; kind is `slot` or `pool`."""

    tenancy: TenancyName
    kind: str
    blocks: list[Unsigned]
    shard: Unsigned = 0


class OfferItem(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Rows [read.start, end) can be claimed."""

    read: ReadName
    end: Positive
    source: SourceItem


class PeerFrame(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What every frame between kvds starts with: the token of the receiver, the sender's life."""

    token: Token
    boot_id: BootId


class PeerHello(PeerFrame, frozen=True, tag="peer_hello"):
    """The producer's kvd introduces itself.

    kernel_boot_id: of the host; equal ids mean the same host.
    attach_path:    its attach.sock, where the consumer's kvd attaches as a reader.
    nonce:          to be shown at that attach, which proves that this hello came from there.
    """

    protocol_min: Unsigned
    protocol_max: Unsigned
    kernel_boot_id: str
    attach_path: str
    nonce: bytes


class PeerWelcome(PeerFrame, frozen=True, tag="peer_welcome"):
    """The consumer's kvd has attached; `your_token` goes into the producer's frames."""

    protocol: Unsigned
    your_token: Token


class PeerRefused(PeerFrame, frozen=True, tag="peer_refused"):
    """The consumer's kvd will not talk; code and context of the catalogue."""

    code: str
    context: dict[str, str] = {}


class Offers(PeerFrame, frozen=True, tag="offers"):
    """Producer: these rows can be claimed."""

    items: list[OfferItem]


class Claim(PeerFrame, frozen=True, tag="claim"):
    """Consumer: may I read? The grant must repeat `claim`."""

    tenancy: TenancyName
    read: ReadName
    claim: Unsigned


class Decline(PeerFrame, frozen=True, tag="decline"):
    """Consumer: this offer will never be claimed."""

    tenancy: TenancyName
    read: ReadName


class Grant(PeerFrame, frozen=True, tag="grant"):
    """Producer: read now, from here."""

    read: ReadName
    claim: Unsigned
    source: SourceItem


class Revoke(PeerFrame, frozen=True, tag="revoke"):
    """Producer: there is nothing to read under this name (any more)."""

    read: ReadName
    why: str


class ReadOver(PeerFrame, frozen=True, tag="read_ended"):
    """Consumer: a granted read has ended; with `bad` pool blocks it was not ok."""

    tenancy: TenancyName
    read: ReadName
    ok: bool
    bad: list[BadSumItem] = []


class PeerQuery(PeerFrame, frozen=True, tag="query"):
    """Producer: what became of this read? `fence`: answer only when nothing runs."""

    tenancy: TenancyName
    read: ReadName
    fence: bool


class PeerAnswer(PeerFrame, frozen=True, tag="answer"):
    """Consumer: the truth about a read."""

    tenancy: TenancyName
    read: ReadName
    truth: str
    fence: bool


class MemberGone(PeerFrame, frozen=True, tag="member_gone"):
    """Producer: this member's memory is not used any more; unmap it."""

    engine: Name
    member: Name
    incarnation: Unsigned


class Ping(PeerFrame, frozen=True, tag="ping"):
    """Either side, when nothing else was said for a while: the link is alive."""


ToConsumer = PeerHello | Offers | Grant | Revoke | PeerQuery | MemberGone | Ping
ToProducer = PeerWelcome | PeerRefused | Claim | Decline | ReadOver | PeerAnswer | Ping
