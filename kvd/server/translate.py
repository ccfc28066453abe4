"""Frames to events, results to frames; and slot events of the wire to those of the core.

Written for speed where a batch passes through: one small function for each kind of item.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from kvd.core import effects as ef
from kvd.core import events as ev
from kvd.core import results as res
from kvd.core import slot_events as se
from kvd.core.blocks import BlockShape
from kvd.core.errors import KvdError, LocalError
from kvd.core.holds import HoldKind, Truth
from kvd.core.ids import MemberRef, ReadId, SlotRef, slot_ref
from kvd.core.prefix import HASH_BYTES
from kvd.core.use_events import Used
from kvd.plan.layout import BlockLayout
from kvd.wire import messages as msg
from kvd.wire import slot_items as si
from kvd.wire.layout import BlockLayoutSpec

OWNER_CHARS_MAX: Final = 256

# Slot items -----------------------------------------------------------------------------------


def _step_opened(member: MemberRef, item: si.StepOpenedItem) -> se.StepOpened:
    return se.StepOpened(member, item.step, load_specs(item.loads), save_specs(item.saves))


def _step_closed(member: MemberRef, item: si.StepClosedItem) -> se.StepClosed:
    return se.StepClosed(member, item.step)


def load_specs(items: Sequence[si.LoadItem]) -> tuple[se.LoadSpec, ...]:
    """Loads of a member, in its order."""
    return tuple([se.LoadSpec(load.request, tuple(load.blocks), load.tokens) for load in items])


def save_specs(items: Sequence[si.SaveItem]) -> tuple[se.SaveSpec, ...]:
    """Saves of a member, in its order."""
    return tuple(
        [
            se.SaveSpec(save.saver, tuple(save.blocks), tuple(save.tokens), _requests(save))
            for save in items
        ]
    )


def _requests(save: si.SaveItem) -> tuple[str, ...]:
    names = save.requests
    return tuple(names) * (len(save.blocks) if len(names) == 1 else 1)


def _acquired(member: MemberRef, item: si.AcquiredItem) -> se.SlotEvent:
    loads = load_specs(item.loads) if item.loads else ()
    return se.Acquired(slot_ref(member, item.slot, item.epoch), item.layer, loads)


def _load_ended(member: MemberRef, item: si.LoadEndedItem) -> se.SlotEvent:
    bad = tuple([se.BadSum(one.block, one.expected, one.got) for one in item.bad])
    return se.LoadEnded(slot_ref(member, item.slot, item.epoch), item.ok, bad)


def _written(member: MemberRef, item: si.WrittenItem) -> se.SlotEvent:
    saves = save_specs(item.saves) if item.saves else ()
    reads = tuple(read_spec(item.layer, read) for read in item.reads) if item.reads else ()
    ref = slot_ref(member, item.slot, item.epoch)
    return se.Written(ref, item.layer, saves, reads)


def read_spec(layer: int, item: si.ReadItem) -> se.ReadSpec:
    """A read that a member offers, first attempt."""
    return se.ReadSpec(
        ReadId(item.transfer, layer, item.start, 0),
        item.peer,
        item.end,
        tuple(item.device_blocks),
        tuple(item.pool_blocks),
    )


def _computed(member: MemberRef, item: si.ComputedItem) -> se.SlotEvent:
    return se.Computed(slot_ref(member, item.slot, item.epoch), item.ok)


def _save_ended(member: MemberRef, item: si.SaveEndedItem) -> se.SlotEvent:
    tokens = tuple(item.tokens) if item.tokens else ()
    return se.SaveEnded(
        slot_ref(member, item.slot, item.epoch), item.saver, item.ok, tokens, item.sums
    )


def _poisoned(member: MemberRef, item: si.PoisonedItem) -> se.SlotEvent:
    return se.Poisoned(slot_ref(member, item.slot, item.epoch))


def _used(member: MemberRef, item: si.UsedItem) -> Used:
    ref = slot_ref(member, item.slot, item.epoch)
    return Used(ref, item.layer, item.did, item.loads, item.saves, item.saver)


OwnEvent = se.SlotEvent | se.StepOpened | se.StepClosed | Used
"""What a member says of its own slots and steps."""

_ITEMS: Final[dict[type, Callable[[MemberRef, Any], OwnEvent]]] = {
    si.StepOpenedItem: _step_opened,
    si.StepClosedItem: _step_closed,
    si.AcquiredItem: _acquired,
    si.LoadEndedItem: _load_ended,
    si.WrittenItem: _written,
    si.ComputedItem: _computed,
    si.SaveEndedItem: _save_ended,
    si.PoisonedItem: _poisoned,
    si.UsedItem: _used,
}


def slot_events(ref: MemberRef, items: list[si.SlotItem]) -> tuple[OwnEvent, ...]:
    """A member's items as events of the core, in order."""
    table = _ITEMS
    return tuple([table[type(item)](ref, item) for item in items])


# Requests -------------------------------------------------------------------------------------


def layout_of(spec: BlockLayoutSpec) -> ev.Layout:
    """What the core must know of a block layout.

    Raises: LocalError(frame_malformed) for a layout that is none.
    """
    try:
        layout = BlockLayout(spec)
    except ValueError as error:
        raise LocalError("frame_malformed", detail=str(error)) from error
    shape = BlockShape(spec.block_tokens, layout.num_layers, spec.num_shards)
    return ev.Layout(layout.digest(), shape, layout.stride, layout.describe())


def joined(
    reply: int, ref: MemberRef, pid: int, num_slots: int, frame: msg.Hello
) -> ev.MemberJoined:
    """A hello as an event.

    Raises: LocalError(frame_malformed).
    """
    layout = layout_of(frame.layout) if frame.layout is not None else None
    if layout is not None and frame.shard >= layout.shape.num_shards:
        raise LocalError("frame_malformed", detail=f"shard {frame.shard} is not in the layout")
    return ev.MemberJoined(
        reply,
        ref,
        pid,
        frame.is_scheduler,
        frame.rank,
        frame.tp_size,
        frame.shard,
        frame.contributes,
        num_slots,
        layout,
        frame.hash_probe,
        tuple(_announced(slot) for slot in frame.slots),
    )


def _announced(said: msg.SlotAnnounce) -> ev.SlotAnnounced:
    return ev.SlotAnnounced(
        said.slot,
        said.word_epoch,
        said.word_free,
        said.acquired,
        said.computing,
        tuple(said.savers),
        tuple(read_spec(said.layer, read) for read in said.reads),
    )


def commit_items(frame: msg.Commit) -> tuple[ev.CommitItem, ...]:
    """The items of a commit.

    Raises: LocalError(frame_malformed) when its three lists do not have the same length.
    """
    count = len(frame.blocks)
    if len(frame.hashes) != count * HASH_BYTES or len(frame.tokens) != count:
        raise LocalError("frame_malformed", detail="blocks, hashes and tokens differ in number")
    hashes = frame.hashes
    return tuple(
        ev.CommitItem(block, hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES], tokens, frame.request)
        for at, (block, tokens) in enumerate(zip(frame.blocks, frame.tokens, strict=True))
    )


def answer(ref: MemberRef, frame: msg.Answer) -> ev.Event:
    """A member's truth about a hold of its own.

    Raises: LocalError(frame_malformed).
    """
    if len(frame.owner) > OWNER_CHARS_MAX:
        # It is recorded whatever it says.
        raise LocalError("frame_malformed", detail="no owner has such a long name")
    try:
        kind, truth = HoldKind(frame.kind), Truth(frame.truth)
    except ValueError as error:
        raise LocalError("frame_malformed", detail=str(error)) from error
    member = ref._replace(incarnation=frame.incarnation)
    slot = SlotRef(member, frame.slot, frame.epoch)
    return ev.MemberAnswered(ref, slot, kind, frame.owner, truth)


# Replies --------------------------------------------------------------------------------------


def reply_frame(number: int, boot_id: bytes, result: res.Result) -> msg.ServerFrame:
    """A result as a frame; the caller, who knows the session, makes those of hello and events."""
    match result:
        case res.Found(blocks):
            return msg.Found(number, boot_id, list(blocks))
        case res.Taken(blocks):
            return msg.Taken(number, boot_id, list(blocks))
        case res.ItemStatuses(codes):
            return msg.Statuses(number, boot_id, list(codes))
        case res.TransferOver(tokens):
            return msg.TransferOver(number, boot_id, tokens)
        case res.Done():
            return msg.Done(number, boot_id)
        case res.Joined() | res.SlotsSeen():
            raise AssertionError("the session makes the replies to hello and events")


def error_frame(number: int, boot_id: bytes, error: KvdError) -> msg.Error:
    """A refusal as a frame."""
    return msg.Error(number, boot_id, error.code, error.context)


def query_frame(boot_id: bytes, effect: ef.AskMember) -> msg.Query:
    """A question to a member about a hold of its own."""
    owner = str(effect.owner)
    return msg.Query(0, boot_id, effect.ref.slot, effect.ref.epoch, effect.kind.value, owner)
