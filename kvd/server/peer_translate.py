"""Messages between kvds to and from the core's types."""

from __future__ import annotations

from kvd.core.errors import PeerError
from kvd.core.holds import Truth
from kvd.core.ids import MemberRef, ReadId, SlotRef
from kvd.core.transfer_types import Offer, Source, SourceKind
from kvd.wire import peer_messages as pm


def read_name(read: ReadId) -> pm.ReadName:
    """To the wire."""
    return pm.ReadName(read.transfer, read.layer, read.start, read.attempt)


def read_id(name: pm.ReadName) -> ReadId:
    """From the wire."""
    return ReadId(name.transfer, name.layer, name.start, name.attempt)


def tenancy_name(ref: SlotRef) -> pm.TenancyName:
    """To the wire."""
    member = ref.member
    return pm.TenancyName(member.engine, member.member, member.incarnation, ref.slot, ref.epoch)


def slot_ref(name: pm.TenancyName) -> SlotRef:
    """From the wire."""
    member = MemberRef(name.engine, name.member, name.incarnation)
    return SlotRef(member, name.slot, name.epoch)


def source_item(source: Source) -> pm.SourceItem:
    """To the wire."""
    return pm.SourceItem(
        tenancy_name(source.ref), source.kind.value, list(source.blocks), source.shard
    )


def source_from(item: pm.SourceItem) -> Source:
    """From the wire.

    Raises: PeerError(frame_malformed).
    """
    try:
        kind = SourceKind(item.kind)
    except ValueError as error:
        raise PeerError("frame_malformed", detail=str(error)) from error
    return Source(slot_ref(item.tenancy), kind, tuple(item.blocks), item.shard)


def offer_item(offer: Offer) -> pm.OfferItem:
    """To the wire."""
    return pm.OfferItem(read_name(offer.read), offer.end, source_item(offer.source))


def offer_from(item: pm.OfferItem) -> Offer:
    """From the wire.

    Raises: PeerError(frame_malformed).
    """
    return Offer(read_id(item.read), item.end, source_from(item.source))


def truth_from(text: str) -> Truth:
    """From the wire.

    Raises: PeerError(frame_malformed).
    """
    try:
        return Truth(text)
    except ValueError as error:
        raise PeerError("frame_malformed", detail=str(error)) from error
