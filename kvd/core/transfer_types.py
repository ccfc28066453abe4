"""What travels between two kvds about one read: offer, claim, grant, end, question, answer."""

from __future__ import annotations

from enum import Enum

from kvd.core.ids import ReadId, SlotRef
from kvd.core.record import record


class SourceKind(Enum):
    """Where the rows of an offer lie: in the slot itself, or in blocks of the pool."""

    SLOT = "slot"
    POOL = "pool"


@record
class Source:
    """Memory that a read reads.

    ref:    the tenancy that wrote the rows; also names the offer in every message.
    kind:   SLOT: `blocks` are the producer's block ids in the slot; POOL: pool block ids.
    blocks: the blocks that hold rows [start, end), in order; row `start` lies in blocks[0] at
            offset start % block_tokens.
    shard:  which span of a pool block (POOL).
    """

    ref: SlotRef
    kind: SourceKind
    blocks: tuple[int, ...]
    shard: int = 0


@record
class Offer:
    """Rows [read.start, end) of one layer can be claimed."""

    read: ReadId
    end: int
    source: Source
