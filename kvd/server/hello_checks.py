"""What a hello says of a member is checked here, before any of it is believed.

The machine trusts that sizes are sane: everything that it, or a gate page, would choke on, or that
would take it long, is refused first.
"""

from __future__ import annotations

from typing import Final

from kvd.config.model import Config
from kvd.core.errors import LocalError
from kvd.server.sessions import MemberSession
from kvd.server.story_text import line
from kvd.wire import messages as msg
from kvd.wire.gate_layout import EPOCH_MAX
from kvd.wire.layout import BlockLayoutSpec, DeviceLayout, SlotArea
from kvd.wire.protocol import about_problem

SPANS_MAX: Final = 1 << 17
"""Spans of a block: 1024 ranks x 64 layers x 2 parts. Each is an object while blocks are laid out,
and a number in every block that is being filled."""

PORT_MAX: Final = 65_535

_EPOCHS_LEFT: Final = 1 << 32
"""Epochs that a slot still has when it is announced: years of releases."""


def check_hello(session: MemberSession, frame: msg.Hello, config: Config) -> None:
    """Refuse a hello that describes what cannot be; changes nothing.

    Raises: LocalError(frame_malformed | limit_reached).
    """
    limits = config.limits
    if frame.tp_size > limits.members_per_engine:
        raise _over("tp_size", frame.tp_size, limits.members_per_engine, "members_per_engine")
    if not -1 <= frame.rank < frame.tp_size:
        raise _malformed(f"rank {frame.rank} is not one of tp_size {frame.tp_size}")
    if frame.layout is not None:
        _check_layout(frame.layout, limits.members_per_engine)
    _check_device(session, frame)
    _check_announced(frame.slots, limits.readers_per_slot)
    if problem := about_problem(frame.about):
        raise _malformed(problem)


def port_of(frame: msg.Hello) -> int:
    """The port on which producers reach this rank, 0 for none.

    Raises: LocalError(frame_malformed) for a port that does not exist.
    """
    if not frame.kv_port:
        return 0
    port = frame.kv_port + frame.dp_rank * frame.tp_size + max(frame.rank, 0)
    if port > PORT_MAX:
        raise _malformed(
            f"kv_port {frame.kv_port} gives dp_rank {frame.dp_rank}, rank {frame.rank} the port "
            f"{port}, over {PORT_MAX}"
        )
    return port


def store_of(session: MemberSession, frame: msg.Hello, config: Config) -> str:
    """The store that the member uses: the one that it names, else the default.

    Raises: LocalError(store_unknown).
    """
    store = frame.store or config.store.default
    if store not in config.store.names:
        names = ", ".join(config.store.names)
        raise LocalError("store_unknown", engine=session.ref.engine, store=store, names=names)
    return store


def about_of(frame: msg.Hello) -> dict[str, str]:
    """What the member says of itself, as lines that may go to a terminal."""
    return {key: line(text) for key, text in frame.about.items()}


def _check_layout(layout: BlockLayoutSpec, shards_max: int) -> None:
    if layout.num_shards > shards_max:
        raise _over("num_shards", layout.num_shards, shards_max, "members_per_engine")
    spans = layout.num_shards * sum(len(parts) for parts in layout.layers)
    if spans > SPANS_MAX:
        raise _malformed(f"a block of {spans} spans, over {SPANS_MAX}")


def _check_device(session: MemberSession, frame: msg.Hello) -> None:
    """Whether the memory that a member describes is the memory that it passed."""
    device = frame.device
    size = session.device.size if session.device is not None else 0
    if device is not None:
        _check_slots(device, session.num_slots, size)
    elif session.num_slots and session.device is not None:
        raise _malformed("device memory came without its layout")
    for part in frame.resident:
        if any(offset >= size for offset in part.layers.values()):
            raise _malformed(f"part {part.part} lies outside")


def _check_slots(device: DeviceLayout, num_slots: int, size: int) -> None:
    if len(device.slot_offsets) != num_slots or len(device.slot_kinds) != num_slots:
        raise _malformed("the layout has another number of slots")
    if any(kind >= len(device.kinds) for kind in device.slot_kinds):
        raise _malformed("a slot of a kind that is not described")
    rows = device.num_blocks * device.block_tokens
    ends = [max((_end(area, rows) for area in areas), default=0) for areas in device.kinds]
    for slot, (offset, kind) in enumerate(zip(device.slot_offsets, device.slot_kinds, strict=True)):
        if offset + ends[kind] > size:
            raise _malformed(f"slot {slot} ends at {offset + ends[kind]}, outside {size} bytes")


def _end(area: SlotArea, rows: int) -> int:
    return area.offset + rows * area.row_bytes


def _check_announced(slots: list[msg.SlotAnnounce], readers_max: int) -> None:
    """What a member says of the time before this kvd: each slot once, each hold once."""
    if len({said.slot for said in slots}) != len(slots):
        raise _malformed("a slot is announced twice")
    rows = [(said.layer, read.transfer, read.start) for said in slots for read in said.reads]
    if len(set(rows)) != len(rows):
        raise _malformed("a read is announced twice")
    for said in slots:
        if max(said.word_epoch, said.acquired) > EPOCH_MAX - _EPOCHS_LEFT:
            raise _malformed(f"slot {said.slot} is announced at an epoch that none reaches")
        if len(said.reads) > readers_max:
            raise _over("readers of a slot", len(said.reads), readers_max, "readers_per_slot")
        if said.reads and said.layer < 0:
            raise _malformed(f"slot {said.slot} is read, but of no layer")
        if len(set(said.savers)) != len(said.savers):
            raise _malformed(f"slot {said.slot}: a saver is announced twice")


def _malformed(detail: str) -> LocalError:
    return LocalError("frame_malformed", detail=detail)


def _over(what: str, value: int, limit: int, key: str) -> LocalError:
    return LocalError("limit_reached", what=what, value=value, limit=limit, key=key)
