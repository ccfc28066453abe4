"""Messages on attach.sock (UNIX SEQPACKET), each with the file descriptors it names.

The connection stays open for the life of the session: its end is noticed by both sides at once.
"""

from __future__ import annotations

import msgspec

from kvd.wire.layout import BlockLayoutSpec, DeviceLayout
from kvd.wire.protocol import BootId, Name, RequestName, Token, Unsigned


class AttachMember(msgspec.Struct, array_like=True, frozen=True, tag="member"):
    """A member of an engine attaches. fds: its pidfd, then its slot memory if device_bytes > 0.

    incarnation: random for each life of the process.
    device_bytes: size of the memory that holds its slots and resident parts, 0 for none.
    """

    protocol_min: Unsigned
    protocol_max: Unsigned
    engine: Name
    member: Name
    incarnation: Unsigned
    num_slots: Unsigned
    device_bytes: Unsigned


class AttachReader(msgspec.Struct, array_like=True, frozen=True, tag="reader"):
    """Another kvd attaches to read for its engines. fds: its pidfd.

    nonce: from the hello of the kvd that it attaches to.
    your_token: the token to put into frames to the reader.
    """

    protocol_min: Unsigned
    protocol_max: Unsigned
    boot_id: BootId
    nonce: bytes
    your_token: Token


class Attached(msgspec.Struct, array_like=True, frozen=True, tag="attached"):
    """fds for a member: gate page, wake-up eventfd, pool data; for a reader: pool data.

    pool_bytes: size of the pool data, 0 for none (then no fd of it comes).
    gate_bytes: size of the gate page, 0 for none.
    """

    protocol: Unsigned
    boot_id: BootId
    token: Token
    pool_bytes: Unsigned
    gate_bytes: Unsigned


class MapRegion(msgspec.Struct, array_like=True, frozen=True, tag="map_region"):
    """A member asks for a region of its engine."""

    region: Name


class MapSums(msgspec.Struct, array_like=True, frozen=True, tag="map_sums"):
    """A member asks for the checksum area of the pool (see `kvd.wire.sum_layout`)."""


class MapMember(msgspec.Struct, array_like=True, frozen=True, tag="map_member"):
    """A reader asks for a member's slot memory."""

    engine: Name
    member: Name
    incarnation: Unsigned


class Mapped(msgspec.Struct, array_like=True, frozen=True, tag="mapped"):
    """fds: the memory. For a member's memory also how it, and the pool, are laid out.

    sums_bytes: size of the pool's checksum area, whose fd follows that of a member's memory; 0 for
        none (then no fd of it comes).
    """

    num_bytes: Unsigned
    device: DeviceLayout | None = None
    layout: BlockLayoutSpec | None = None
    sums_bytes: Unsigned = 0


class Refused(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """Nothing was attached; code and context of the catalogue."""

    code: str
    context: dict[str, str] = {}


AttachRequest = AttachMember | AttachReader | MapRegion | MapMember | MapSums
AttachReply = Attached | Mapped | Refused

__all__ = [
    "AttachMember",
    "AttachReader",
    "AttachReply",
    "AttachRequest",
    "Attached",
    "MapMember",
    "MapRegion",
    "MapSums",
    "Mapped",
    "Refused",
    "RequestName",
]
