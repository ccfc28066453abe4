"""Items of an `events` frame: a member's own slot events, in its order.

Each is an array that starts with its kind; fields are only appended, with defaults.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kvd.wire.protocol import Address, Positive, RequestName, SaverName, TransferName, Unsigned


class LoadItem(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Blocks loaded for one request; `tokens` in all of them together."""

    request: RequestName
    blocks: list[Unsigned]
    tokens: Unsigned


class SaveItem(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One save: target blocks, and for each the tokens that are valid once it has ended.

    requests: for each block the request that it must still be of, [] for not checked; a single one
        is that of all of them.
    """

    saver: SaverName
    blocks: list[Unsigned]
    tokens: list[Unsigned]
    requests: list[RequestName] = []


class ReadItem(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Rows [start, end) of the layer offered to a transfer."""

    transfer: TransferName
    peer: Address
    start: Unsigned
    end: Unsigned
    device_blocks: list[Unsigned]
    pool_blocks: list[Unsigned] = []


class StepOpenedItem(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="step_opened"):
    """A step begins whose layers all load and save these blocks; at most one save.

    Once it was answered without a code, the loads of its layers may start without an answer of
    their own, and its saves as soon as they were posted. After a refusal nothing is kept, but until
    it is closed a `UsedItem` may name it: then each layer has an answer of its own.
    """

    step: Positive
    loads: list[LoadItem] = []
    saves: list[SaveItem] = []


class StepClosedItem(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="step_closed"):
    """No copy of this step begins any more, and those that were refused have ended."""

    step: Positive


class AcquiredItem(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="acquired"):
    """A free slot was taken; loads may start once this was answered without a code."""

    slot: Unsigned
    epoch: Unsigned
    layer: int = -1
    loads: list[LoadItem] = []


class BadSumItem(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A loaded block whose span had another checksum than it was saved with."""

    block: Unsigned
    expected: Unsigned
    got: Unsigned


class LoadEndedItem(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="load_ended"):
    """The tenancy's loads have ended; with `bad` ones they were not ok."""

    slot: Unsigned
    epoch: Unsigned
    ok: bool
    bad: list[BadSumItem] = []


class WrittenItem(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="written"):
    """The rows are final: all saves and reads of the tenancy."""

    slot: Unsigned
    epoch: Unsigned
    layer: Unsigned
    saves: list[SaveItem] = []
    reads: list[ReadItem] = []


class ComputedItem(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="computed"):
    """Attention over the slot has ended."""

    slot: Unsigned
    epoch: Unsigned
    ok: bool = True


class SaveEndedItem(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="save_ended"):
    """A save has ended; `tokens` for each target block, [] = as announced.

    sums: checksum of each target block's span, n x u32 little endian: CRC-32C over the valid rows
        of its parts in order. 0: none (a CRC of 0 is said as 2^32 - 1); b"": none at all.
    """

    slot: Unsigned
    epoch: Unsigned
    saver: SaverName
    ok: bool
    tokens: list[Unsigned] = []
    sums: bytes = b""


ACQUIRED: Final = 1
LOADED: Final = 2
WRITTEN: Final = 4
COMPUTED: Final = 8
SAVED: Final = 16
"""What a `UsedItem` can tell."""

DID_MAX: Final = ACQUIRED | LOADED | WRITTEN | COMPUTED | SAVED
"""All of it."""


class UsedItem(msgspec.Struct, array_like=True, gc=False, tag="used"):
    """These things happened in a tenancy, in the order of their numbers, and all went well.

    Whoever tells it may add to it until it is sent.

    did:   sum of `ACQUIRED` ... `SAVED`; another one is refused.
    loads: step whose loads began when the slot was acquired, 0 for none; of one that was refused
        they have not begun.
    saves: the same for the saves that were announced when it was written, 0 for none.
    saver: whose save has ended, "" for none.
    """

    slot: Unsigned
    epoch: Unsigned
    layer: int = -1
    did: Unsigned = ACQUIRED
    loads: Unsigned = 0
    saves: Unsigned = 0
    saver: Annotated[str, msgspec.Meta(max_length=64)] = ""


class PoisonedItem(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="poisoned"):
    """The tenancy's rows are not valid."""

    slot: Unsigned
    epoch: Unsigned


StepItem = StepOpenedItem | StepClosedItem
"""What is said of a step, and of no slot."""

SlotItem = (
    AcquiredItem
    | LoadEndedItem
    | WrittenItem
    | ComputedItem
    | SaveEndedItem
    | PoisonedItem
    | UsedItem
    | StepOpenedItem
    | StepClosedItem
)
