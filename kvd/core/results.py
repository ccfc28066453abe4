"""What the machine answers, one frozen dataclass for each kind of question."""

from __future__ import annotations

from kvd.core.record import record


@record
class Done:
    """It is done; nothing more to say."""


@record
class Joined:
    """A member is registered.

    epochs:  for each of its slots the epoch now published on its gate page.
    next_no: the number that its next slot event must carry.
    """

    num_blocks: int
    block_stride: int
    epochs: tuple[int, ...]
    next_no: int = 0


@record
class Found:
    """Blocks of the longest prefix hit, first block first."""

    blocks: tuple[int, ...]


@record
class Taken:
    """Blocks reserved."""

    blocks: tuple[int, ...]


@record
class ItemStatuses:
    """One code for each item of a batch; '' is ok. () means that all are ok."""

    codes: tuple[str, ...] = ()


@record
class SlotsSeen:
    """Slot events up to `next_no` - 1 are seen; one code for each item, () = all ok."""

    next_no: int
    codes: tuple[str, ...] = ()


@record
class TransferOver:
    """All rows have come (consumer) or gone (producer)."""

    tokens: int


Result = Done | Joined | Found | Taken | ItemStatuses | SlotsSeen | TransferOver
