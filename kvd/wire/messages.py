"""Frames between a member and its kvd on engine.sock (ZeroMQ DEALER to ROUTER).

A request is one msgpack array `[op, request_no, token, deadline_ms_left, body...]`, a reply
`[op, request_no, boot_id, body...]`. Fields are only appended, with defaults; unknown trailing
fields are ignored. Every request gets exactly one reply or `error` frame.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvd.wire.hot_figures import LAYERS_MAX, REQUESTS_MAX, LayerFigures, RequestFigures
from kvd.wire.layout import BlockLayoutSpec, DeviceLayout, ResidentPart
from kvd.wire.protocol import (
    BootId,
    Digest,
    Name,
    OptionalName,
    Positive,
    RequestName,
    Token,
    TransferName,
    Unsigned,
)
from kvd.wire.slot_items import ReadItem, SlotItem

# Requests ----------------------------------------------------------------------------------------


class Request(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What every request starts with.

    request_no:       the client's number of the request; its reply repeats it.
    token:            the session token that attach.sock gave.
    deadline_ms_left: how long the client waits; never a clock value.
    """

    request_no: Unsigned
    token: Token
    deadline_ms_left: Unsigned


class SlotAnnounce(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One slot of a member that ran before this kvd did; see `kvd.core.events.SlotAnnounced`."""

    slot: Unsigned
    word_epoch: Unsigned
    word_free: bool
    acquired: int
    computing: bool = False
    savers: list[Name] = []
    layer: int = -1
    reads: list[ReadItem] = []


class Hello(Request, frozen=True, tag="hello"):
    """First frame of a session: who the member is, and how its memory is laid out.

    kv_port: base of the ports on which kvd listens for producers, 0 for none.
    store:   which store of the node the engine's configuration names, '' for the node's default.
    about:   what the member says of itself, for people; see `kvd.wire.protocol.about_problem`.
    """

    protocol_min: Unsigned
    protocol_max: Unsigned
    is_scheduler: bool
    rank: int
    tp_size: Positive
    dp_rank: Unsigned
    shard: Unsigned
    contributes: bool
    hash_probe: Digest
    layout: BlockLayoutSpec | None
    device: DeviceLayout | None
    resident: list[ResidentPart] = []
    slots: list[SlotAnnounce] = []
    kv_port: Unsigned = 0
    store: OptionalName = ""
    about: dict[Name, str] = {}


class Lookup(Request, frozen=True, tag="lookup"):
    """Longest prefix hit; hashes is one blob of n x 32 bytes."""

    request: RequestName
    hashes: bytes
    pin: bool = True


class Reserve(Request, frozen=True, tag="reserve"):
    """Private blocks for a request; all or nothing."""

    request: RequestName
    count: Positive


class Commit(Request, frozen=True, tag="commit"):
    """Keys for blocks: hashes is n x 32 bytes for `blocks`, tokens for each.

    request: whose blocks they must still be, '' for not checked.
    """

    blocks: list[Unsigned]
    hashes: bytes
    tokens: list[Positive]
    request: OptionalName = ""


class Unpin(Request, frozen=True, tag="unpin"):
    """The request needs these blocks no more; None: it has ended."""

    request: RequestName
    blocks: list[Unsigned] | None = None


class Abort(Request, frozen=True, tag="abort"):
    """The request was aborted: its uncommitted blocks are worthless."""

    request: RequestName


class Renew(Request, frozen=True, tag="renew"):
    """Keep the pins of a looked-up request for another lease."""

    request: RequestName


class Events(Request, frozen=True, tag="events"):
    """A member's slot events in order; `first_no` numbers items[0], each item counts one.

    quiet: nobody waits for the answer: where nothing is refused it may come a moment later, with
        that to the frame behind it.
    """

    boot_id: BootId
    incarnation: Unsigned
    first_no: Unsigned
    items: list[SlotItem]
    quiet: bool = False


class Answer(Request, frozen=True, tag="answer"):
    """The truth about a hold that kvd asked about (see `Query`)."""

    boot_id: BootId
    incarnation: Unsigned
    slot: Unsigned
    epoch: Unsigned
    kind: str
    owner: str
    truth: str


class Poison(Request, frozen=True, tag="poison"):
    """These blocks hold wrong bytes."""

    blocks: list[Unsigned]


class RegionCreate(Request, frozen=True, tag="region_create"):
    """A decode region of [num_layers][num_blocks][block_tokens] rows; answered when populated."""

    region: Name
    num_layers: Positive
    num_blocks: Positive
    block_tokens: Positive
    row_bytes: Positive


class RegionDestroy(Request, frozen=True, tag="region_destroy"):
    """Give a region back."""

    region: Name


class Allocated(Request, frozen=True, tag="allocated"):
    """Engine block ids that are used anew, each with its generation."""

    region: Name
    blocks: list[tuple[Unsigned, Positive]]


class Expect(Request, frozen=True, tag="expect"):
    """The destination of a transfer: rows [0, tokens) in these blocks of the region.

    lifetime_ms: when the transfer has failed, from now.
    """

    transfer: TransferName
    region: Name
    blocks: list[Unsigned]
    tokens: Positive
    num_layers: Positive
    lifetime_ms: Positive


class AwaitTransfer(Request, frozen=True, tag="await_transfer"):
    """Answered when the transfer is over, or when this request's deadline passes."""

    transfer: TransferName


class DropTransfer(Request, frozen=True, tag="drop_transfer"):
    """Give a transfer up.

    peer: where its rows would be read, for a producer that has not offered any yet.
    """

    transfer: TransferName
    peer: OptionalName = ""


class Stats(Request, frozen=True, tag="stats"):
    """Figures that the engine wants to see in status and metrics: name -> value.

    layers, requests: what decode does with hot buffers; each frame replaces what was said before.
    """

    values: dict[Name, float]
    layers: Annotated[list[LayerFigures], Meta(max_length=LAYERS_MAX)] = []
    requests: Annotated[list[RequestFigures], Meta(max_length=REQUESTS_MAX)] = []


class Goodbye(Request, frozen=True, tag="goodbye"):
    """The member touches nothing more and leaves."""


ClientFrame = (
    Hello
    | Lookup
    | Reserve
    | Commit
    | Unpin
    | Abort
    | Renew
    | Events
    | Answer
    | Poison
    | RegionCreate
    | RegionDestroy
    | Allocated
    | Expect
    | AwaitTransfer
    | DropTransfer
    | Stats
    | Goodbye
)

# Replies ------------------------------------------------------------------------------------------


class Answered(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What every reply starts with."""

    request_no: Unsigned
    boot_id: BootId


class HelloOk(Answered, frozen=True, tag="hello_ok"):
    """The member is registered; its gate page shows `epochs` now.

    checksums: off, sampled or always: which spans it checksums (see `kvd.plan.sums`).
    """

    protocol: Unsigned
    num_blocks: Unsigned
    block_stride: Unsigned
    epochs: list[Unsigned]
    next_no: Unsigned
    frame_bytes_max: Unsigned
    batch_items_max: Unsigned
    checksums: str = "off"


class Done(Answered, frozen=True, tag="done"):
    """It is done."""


class Found(Answered, frozen=True, tag="found"):
    """Blocks of the longest prefix hit."""

    blocks: list[Unsigned]


class Taken(Answered, frozen=True, tag="taken"):
    """Blocks reserved."""

    blocks: list[Unsigned]


class Statuses(Answered, frozen=True, tag="statuses"):
    """One code for each item, '' is ok; [] means that all are ok."""

    codes: list[str] = []


class Seen(Answered, frozen=True, tag="seen"):
    """Slot events before `next_no` are seen; codes as in `Statuses`.

    since: events from this number to those of the frame are answered, too, each without a code:
        they came in quiet frames; -1 for none.
    """

    next_no: Unsigned
    codes: list[str] = []
    since: int = -1


class TransferOver(Answered, frozen=True, tag="transfer_over"):
    """All rows [0, tokens) have arrived, or have been read."""

    tokens: Unsigned


class Error(Answered, frozen=True, tag="error"):
    """Nothing was changed; code and context of the catalogue."""

    code: str
    context: dict[str, str] = {}


class Query(Answered, frozen=True, tag="query"):
    """kvd asks the member about a hold of its own (request_no 0); answered by `Answer`."""

    slot: Unsigned
    epoch: Unsigned
    kind: str
    owner: str


ServerFrame = HelloOk | Done | Found | Taken | Statuses | Seen | TransferOver | Error | Query
