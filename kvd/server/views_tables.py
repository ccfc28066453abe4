"""From the live node to pages of slots, blocks and engines.

A page ends at its limit, or earlier when its items are heavy; `next` then says where to go on.
Things may come and go between two pages: a cursor is a place in the order, not an item, so that
nothing else is skipped or told twice.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal

from kvd.core.blocks import BlockState, BlockTable
from kvd.core.ids import LoadId, MemberRef, Pin, RequestKey, StepId
from kvd.core.slot import Slot
from kvd.core.state import Engine, Member, State
from kvd.server.engine_words import engine_words, sessions_of
from kvd.server.models import BlockStateName, StepCounts
from kvd.server.models_tables import (
    BlockPage,
    BlockView,
    EnginePage,
    EngineView,
    HoldView,
    MemberView,
    SlotPage,
    SlotView,
)
from kvd.server.node_view import NodeView, SessionInfo
from kvd.server.problems import parameter_invalid
from kvd.server.sliced import Work
from kvd.server.survey import MemberSlots, count_slots, state_name
from kvd.server.views import slot_counts
from kvd.server.views_hot import hot_layers, hot_requests
from kvd.server.views_steps import NO_STEPS, saving_steps, step_counts

PAGE_MAX: Final = 500
"""Most items of a page: writing one out takes about 2 ms, in one callback."""

HOLDS_MAX: Final = 1500
"""A page of slots ends once it has so many holds, for the same reason."""

MEMBERS_MAX: Final = 250
"""The same for members on a page of engines."""

STATS_MAX: Final = 64
"""Figures shown of one member."""

BLOCK_STATES: Final[tuple[BlockStateName, ...]] = ("free", "filling", "ready", "poisoned")
"""Names of `BlockState`, by value."""

_STEP: Final = 256
_BYTES_STEP: Final = 1 << 16
_PINS_SHOWN: Final = 4
_ID_CHARS_MAX: Final = 100
_SLOT_CURSOR: Final = re.compile(r"([^/#]+)/([^/#]+)#([0-9a-f]{1,32})/slot([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class SlotQuery:
    """Which slots; `state` '' for all."""

    limit: int = 100
    after: str = ""
    engine: str = ""
    member: str = ""
    state: str = ""


@dataclass(frozen=True, slots=True)
class BlockQuery:
    """Which blocks; `state` used: all that are not free; '' for all."""

    limit: int = 100
    after: str = ""
    engine: str = ""
    state: Literal["free", "filling", "ready", "poisoned", "used", ""] = "used"


@dataclass(frozen=True, slots=True)
class EngineQuery:
    """Which engines."""

    limit: int = 100
    after: str = ""


# Slots -------------------------------------------------------------------------------------------


def slot_page(view: NodeView, query: SlotQuery) -> Work[SlotPage]:
    """A page of slots.

    Raises: AdminError(parameter_invalid): not a cursor.
    """
    items: list[SlotView] = []
    holds = 0
    last = ""
    now = view.now()
    for slot in _slots_after(view.state(), query, _slot_cursor(query.after)):
        if slot is not None:
            if len(items) >= query.limit or holds >= HOLDS_MAX:
                return SlotPage(items=items, next=last)
            layer = _layer_of(view.state(), slot)
            items.append(_slot_view(slot, layer, now))
            holds += len(slot.holds)
            last = f"{slot.ref.member}/slot{slot.ref.slot}"
        yield
    return SlotPage(items=items, next=None)


def _slot_cursor(after: str) -> tuple[MemberRef, int] | None:
    if not after:
        return None
    match = _SLOT_CURSOR.fullmatch(after)
    if match is None:
        fix = "Pass the `next` of the page before."
        raise parameter_invalid("after", f"{after[:_ID_CHARS_MAX]!r} names no slot", fix)
    return MemberRef(match[1], match[2], int(match[3], 16)), int(match[4])


def _slots_after(
    state: State, query: SlotQuery, after: tuple[MemberRef, int] | None
) -> Iterator[Slot | None]:
    """Yield matching slots in order, and None now and then where the loop may go on."""
    for ref in sorted(state.members):
        if (query.engine and ref.engine != query.engine) or (
            query.member and ref.member != query.member
        ):
            continue
        first = 0
        if after is not None:
            if ref < after[0]:
                continue
            first = after[1] + 1 if ref == after[0] else 0
        member = state.members.get(ref)
        for index in range(first, len(member.slots) if member is not None else 0):
            assert member is not None
            slot = member.slots[index]
            if not query.state or state_name(slot) == query.state:
                yield slot
            elif index % _STEP == 0:
                yield None
        yield None


def _layer_of(state: State, slot: Slot) -> int | None:
    member = state.members.get(slot.ref.member)
    tenancy = member.held.get(slot.ref.slot) if member is not None else None
    return tenancy.layer if tenancy is not None and tenancy.layer >= 0 else None


def _slot_view(slot: Slot, layer: int | None, now: int) -> SlotView:
    member = slot.ref.member
    return SlotView(
        engine=member.engine,
        member=member.member,
        incarnation=f"{member.incarnation:x}",
        slot=slot.ref.slot,
        epoch=slot.ref.epoch,
        state=state_name(slot),
        layer=layer,
        saved=slot.saved.value,
        poisoned=slot.poisoned,
        holds=[
            HoldView(
                kind=hold.kind.value,
                owner=str(hold.owner),
                executor=hold.executor,
                phase=hold.phase.value,
                doubt=hold.doubt.name.lower(),
                late_seconds=(now - hold.deadline) / 1e9,
                asked=hold.asked,
            )
            for hold in slot.holds
        ],
    )


# Blocks ------------------------------------------------------------------------------------------


def block_page(view: NodeView, query: BlockQuery) -> Work[BlockPage]:
    """A page of blocks.

    Raises: AdminError(parameter_invalid): not a cursor.
    """
    start = _block_cursor(query.after)
    pool = view.state().pool
    if pool is None:
        return BlockPage(items=[], next=None, total=0)
    table = pool.blocks
    items: list[BlockView] = []
    for seen, block in enumerate(_blocks_from(table, query.state, start)):
        if block is None or (query.engine and not _is_of(table, block, query.engine)):
            if block is None or seen % _STEP == 0:
                yield
            continue
        if len(items) >= query.limit:
            return BlockPage(items=items, next=str(items[-1].block), total=table.total)
        items.append(_block_view(table, block))
        yield
    return BlockPage(items=items, next=None, total=table.total)


def _block_cursor(after: str) -> int:
    if not after:
        return 0
    if not after.isascii() or not after.isdecimal() or len(after) > 9:
        fix = "Pass the `next` of the page before."
        raise parameter_invalid("after", f"{after[:_ID_CHARS_MAX]!r} is not a block number", fix)
    return int(after) + 1


def _blocks_from(table: BlockTable, wanted: str, start: int) -> Iterator[int | None]:
    """Yield blocks in a state from `start` on, and None where the loop may go on.

    The table holds one byte for each block, so that states are searched for at memory speed.
    """
    state = table.state
    while start < len(state):
        if wanted == "used":
            piece = state[start : start + _BYTES_STEP]
            used = piece.lstrip(b"\0")
            start += len(piece) - len(used)
            found = start if used else -1
        elif wanted:
            value = BLOCK_STATES.index(wanted)
            found = state.find(value, start, start + _BYTES_STEP)
            start = found if found >= 0 else start + _BYTES_STEP
        else:
            found = start
        if found >= 0:
            yield found
            start = found + 1
        else:
            yield None


def _is_of(table: BlockTable, block: int, engine: str) -> bool:
    """Whether a request of the engine fills or keeps the block, or a load or step of it does."""
    fill = table.fills.get(block)
    if fill is not None and fill.owner.engine == engine:
        return True
    return any(_engine_of(pin) == engine for pin in table.pins.get(block, ()))


def _engine_of(pin: Pin) -> str:
    if isinstance(pin, RequestKey):
        return pin.engine
    if isinstance(pin, StepId):
        return pin.member.engine
    return pin.ref.member.engine if isinstance(pin, LoadId) else ""


def _block_view(table: BlockTable, block: int) -> BlockView:
    fill = table.fills.get(block)
    spans = table.shape.num_spans
    key, tokens, saved = None, 0, 0
    if table.state[block] == BlockState.READY:
        key, tokens, saved = table.columns.key(block), table.columns.tokens[block], spans
    elif fill is not None:
        key, tokens = fill.key, fill.want
        saved = table.num_saved(block)
    pins: Collection[Pin] = table.pins.get(block, ())
    return BlockView(
        block=block,
        state=BLOCK_STATES[BlockState(table.state[block])],
        tokens=tokens,
        hash=key[1].hex() if key is not None else "",
        namespace=key[0] if key is not None else None,
        owner=str(fill.owner) if fill is not None else "",
        spans=spans,
        spans_saved=saved,
        saves_open=table.saving.get(block, 0),
        saving_steps=saving_steps(table, block, _PINS_SHOWN),
        pins=len(pins),
        pinned_by=heapq.nsmallest(_PINS_SHOWN, map(str, pins)),
    )


# Engines -----------------------------------------------------------------------------------------


def engine_page(view: NodeView, query: EngineQuery) -> Work[EnginePage]:
    """A page of engines with their members."""
    sessions = sessions_of(view)
    items: list[EngineView] = []
    members = 0
    for name in sorted(view.state().engines):
        engine = view.state().engines.get(name)
        if engine is None or name <= query.after:
            continue
        if len(items) >= query.limit or members >= MEMBERS_MAX:
            return EnginePage(items=items, next=items[-1].engine)
        made = yield from _engine_view(view, engine, sessions)
        items.append(made)
        members += len(made.members)
        yield
    return EnginePage(items=items, next=None)


def _engine_view(
    view: NodeView, engine: Engine, sessions: Mapping[str, SessionInfo]
) -> Work[EngineView]:
    total = MemberSlots()
    members: list[MemberView] = []
    steps = step_counts(view.state())
    for name in sorted(engine.members):
        member = engine.members.get(name)
        if member is None:
            continue
        counts = yield from count_slots(member)
        total.add(counts)
        session = sessions.get(str(member.ref))
        members.append(_member_view(view, member, counts, steps.get(member.ref, NO_STEPS), session))
        yield
    regions = view.state().regions.values()
    return EngineView(
        engine=engine.name,
        tp_size=engine.tp_size,
        layout=engine.layout.text if engine.layout is not None else "",
        namespace=engine.namespace if engine.namespace >= 0 else None,
        requests=len(engine.requests),
        regions=sorted(region.name for region in regions if region.engine == engine.name),
        slots=slot_counts(total),
        members=members,
        **engine_words(engine, sessions)._asdict(),
    )


def _member_view(
    view: NodeView,
    member: Member,
    counts: MemberSlots,
    steps: StepCounts,
    session: SessionInfo | None,
) -> MemberView:
    now = view.now()
    state = "silent" if member.silent else "attached"
    told = view.stats().get(str(member.ref), {}).items()
    finite = ((name, value) for name, value in told if math.isfinite(value))
    layers, requests = view.hot_figures().get(str(member.ref), ((), ()))
    return MemberView(
        member=member.ref.member,
        incarnation=f"{member.ref.incarnation:x}",
        state="leaving" if member.leaving else state,
        scheduler=member.is_scheduler,
        rank=member.rank if member.rank >= 0 else None,
        pid=member.pid,
        uid=session.uid if session is not None else None,
        attached_seconds=_since(now, session.attached_at_ns) if session is not None else None,
        silent_seconds=_since(now, session.last_heard_ns) if session is not None else None,
        slots=slot_counts(counts),
        steps=steps,
        stats=dict(islice(finite, STATS_MAX)),
        store=session.store if session is not None else "",
        about=dict(session.about) if session is not None else {},
        hot_layers=hot_layers(layers),
        hot_requests=hot_requests(requests, by_layer=True),
    )


def _since(now: int, then: int) -> float:
    return max(0, now - then) / 1e9
