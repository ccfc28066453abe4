"""What a new life of kvd finds of the last one, as facts; `adoption` decides what follows."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.core.block_columns import BlockColumns
from kvd.core.block_types import BlockShape
from kvd.core.ids import MemberRef
from kvd.core.record import record
from kvd.core.transfer_events import RegionSpec


@dataclass(slots=True)
class AdoptedBlocks:
    """What the headers say.

    columns: of each block whether it is ready and under what key, or being filled; its writer may
             still be at it. Namespaces have the numbers that `AdoptedPool` gives them.
    torn:    blocks whose header was not whole; they hold nothing any more.
    odd:     blocks that were ready under a key that this pool does not know; their headers are
             still as they were.
    """

    columns: BlockColumns
    torn: list[int] = field(default_factory=list)
    odd: list[int] = field(default_factory=list)


@record
class AdoptedPool:
    """A pool that is formatted; `namespaces` are (digest, hash probe) in order of their numbers."""

    digest: bytes
    stride: int
    shape: BlockShape
    namespaces: tuple[tuple[bytes, bytes], ...]
    blocks: AdoptedBlocks


@record
class NodeAdopted:
    """The first event of a life that follows another one.

    absent:  members of the last life: each may still copy, until it says hello or is proven dead.
    regions: (name, engine, shape) of decode regions whose memory is there.
    """

    pool: AdoptedPool | None
    absent: tuple[MemberRef, ...]
    regions: tuple[tuple[str, str, RegionSpec], ...]
