"""Invariants across structures: what must be true between any two events.

`problems(state)` lists every contradiction; an empty list is the only good answer. The daemon runs
it from its loop, the tests after every event. Nothing here is repaired: kvd stops instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvd.core.adoption import LAST_LIFE
from kvd.core.blocks import BlockState, BlockTable
from kvd.core.holds import HoldKind, Phase
from kvd.core.ids import LoadId, ReadId, RequestKey, SaveId, StepId
from kvd.core.state import Member, State


def problems(m: State) -> list[str]:
    """Every invariant that does not hold, one sentence each."""
    found: list[str] = []
    for member in m.members.values():
        found.extend(_member_problems(m, member))
    if m.pool is not None:
        found.extend(_count_problems(m.pool.blocks))
        found.extend(_block_problems(m, m.pool.blocks))
        found.extend(_copy_problems(m.pool.blocks))
        found.extend(_step_problems(m, m.pool.blocks))
        found.extend(_pin_problems(m, m.pool.blocks))
    found.extend(_read_problems(m))
    return found


def _member_problems(m: State, member: Member) -> Iterator[str]:
    for index, slot in enumerate(member.slots):
        where = str(slot.ref)
        if slot.ref.member != member.ref or slot.ref.slot != index:
            yield f"{where}: filed under {member.ref} slot {index}"
        if slot.is_free != (index not in member.held):
            yield f"{where}: free is {slot.is_free}, but held has it: {index in member.held}"
        names = [(hold.kind, hold.owner) for hold in slot.holds]
        if len(set(names)) != len(names):
            yield f"{where}: a hold twice"
        reads = sum(1 for hold in slot.holds if hold.kind is HoldKind.READ)
        if reads > m.settings.limits.readers_per_slot:
            yield f"{where}: {reads} readers"
        if slot.is_free and (slot.armed or slot.poisoned):
            yield f"{where}: free but armed or poisoned"
        for hold in slot.holds:
            if hold.phase is Phase.OFFERED and hold.executor:
                yield f"{where}: {hold.owner} is offered but has an executor"


def _count_problems(table: BlockTable) -> Iterator[str]:
    seen = [0, 0, 0, 0]
    for state in table.state:
        seen[state] += 1
    if seen != table.counts:
        yield f"block counts {table.counts}, the table has {seen}"
    if seen[BlockState.RESET] != len(table.free):
        yield f"{seen[BlockState.RESET]} blocks are reset, {len(table.free)} are free"
    if sum(seen) != table.total:
        yield f"{sum(seen)} blocks of {table.total}"


def _block_problems(m: State, table: BlockTable) -> Iterator[str]:
    if len(set(table.free)) != len(table.free):
        yield "a block is free twice"
    for block in table.free:
        if block in table.pins or block in table.fills or table.columns.tokens[block]:
            yield f"block {block} is free but in use"
    if table.counts[BlockState.READY] != len(table.index):
        yield f"{table.counts[BlockState.READY]} ready blocks, {len(table.index)} keys in the index"
    for block, tokens in enumerate(table.columns.tokens):
        if bool(tokens) != (table.state[block] == BlockState.READY):
            yield f"block {block} has a key for {tokens} tokens but is not ready, or the reverse"
        elif tokens and table.index.get(*table.columns.key(block)) != block:
            yield f"block {block} is not what the index finds under its key"
    for block, fill in table.fills.items():
        if table.state[block] not in (BlockState.FILLING, BlockState.POISONED):
            yield f"block {block} is filled but {BlockState(table.state[block]).name}"
        if block not in table.owned.get(fill.owner, ()):
            yield f"block {block} of {fill.owner} is not among what it owns"
    if sum(map(len, table.owned.values())) != len(table.fills):
        yield "a request owns a block that it does not fill"
    poisoned = {at for run in table.columns.runs(BlockState.POISONED) for at in range(*run)}
    if table.dead != poisoned:
        yield f"{len(table.dead)} blocks are noted as poisoned, others are"
    for block in table.policy:
        if block in table.pins or table.state[block] != BlockState.READY:
            yield f"block {block} is evictable but pinned or not ready"
    kept = sum(1 for block in table.pins if table.state[block] == BlockState.READY)
    if len(table.policy) != table.counts[BlockState.READY] - kept:
        ready = table.counts[BlockState.READY]
        yield f"{len(table.policy)} blocks are evictable: {ready} are ready, {kept} of them kept"


def _copy_problems(table: BlockTable) -> Iterator[str]:
    """The open copies of each span, and of each block, are those that are open."""
    saves = {(copy.span, save): frozenset(copy.blocks) for save, copy in table.save_blocks.items()}
    loads = {(copy.span, load): frozenset(copy.blocks) for load, copy in table.load_blocks.items()}
    known_saves = {
        (at, save): of for at, all_ in table.span_saves.items() for save, of in all_.items()
    }
    known_loads = {
        (at, load): of for at, all_ in table.span_loads.items() for load, of in all_.items()
    }
    if (saves, loads) != (known_saves, known_loads):
        yield "the open copies of the spans are not those that are open"
    alone = [copy.blocks for copy in table.save_blocks.values() if copy.step is None]
    kept = [step.targets for step in table.steps.values()]
    saving = Counter(block for blocks in (*alone, *kept) for block in blocks)
    if saving != table.saving:
        yield f"blocks are being saved {dict(saving)}, the table has {dict(table.saving)}"
    if not saving.keys() <= table.fills.keys():
        yield f"blocks {sorted(saving.keys() - table.fills.keys())} are saved but not filled"


def _step_problems(m: State, table: BlockTable) -> Iterator[str]:
    """Each step keeps what its copies use, and has a member as long as it is open."""
    saves = [(copy, True) for copy in table.save_blocks.values() if copy.step is not None]
    loads = [(copy, False) for copy in table.load_blocks.values() if copy.step is not None]
    copies = Counter(copy.step for copy, _ in (*saves, *loads))
    for copy, is_save in (*saves, *loads):
        kept = table.steps.get(copy.step) if copy.step is not None else None
        blocks = frozenset() if kept is None else kept.targets if is_save else kept.sources
        if frozenset(copy.blocks) != blocks:
            yield f"a copy of {copy.step} has other blocks than the step"
    for step, kept in table.steps.items():
        member = m.members.get(step.member)
        if kept.copies != copies[step] or (kept.closed and not kept.copies):
            yield f"{step} has {copies[step]} copies open, not {kept.copies}; closed: {kept.closed}"
        if kept.closed == (member is not None and step.number in member.steps):
            yield f"{step} is closed: {kept.closed}, but its member says otherwise"
    for member in m.members.values():
        for number in member.steps:
            if StepId(member.ref, number) not in table.steps:
                yield f"step {number} of {member.ref} keeps nothing"
        for number in member.refused:
            if number in member.steps or number > member.last_step:
                yield f"step {number} of {member.ref} is refused, and is kept or to come"


def _pin_problems(m: State, table: BlockTable) -> Iterator[str]:
    """Both ends of every copy: a pin or open save has a live party, and the other way round."""
    for save in table.save_blocks:
        if not _has_save_hold(m, save):
            yield f"{save} keeps blocks, but its slot has no such hold"
    for block, pins in table.pins.items():
        if not pins:
            yield f"block {block} has an empty set of pins"
        for pin in pins:
            if pin == LAST_LIFE and block in m.inherited_blocks:
                continue
            if isinstance(pin, RequestKey) and not _request_has(m, pin, block):
                yield f"block {block} is pinned by {pin}, which does not have it"
            elif isinstance(pin, StepId):
                if pin not in table.steps or block not in table.steps[pin].sources:
                    yield f"block {block} is pinned by {pin}, which does not load it"
            elif isinstance(pin, LoadId) and not _load_has(m, pin, block):
                yield f"block {block} is pinned by {pin}, which does not load it"
            elif isinstance(pin, ReadId) and not _pool_read_has(m, pin, block):
                yield f"block {block} is pinned by read {pin}, which is not redirected"
    for engine in m.engines.values():
        for request in engine.requests.values():
            for block in request.blocks:
                if request.key not in table.pins.get(block, ()):
                    yield f"{request.key} has block {block} without a pin"


def _has_save_hold(m: State, save: SaveId) -> bool:
    member = m.members.get(save.ref.member)
    if member is None:
        return False
    slot = member.slots[save.ref.slot]
    return slot.ref == save.ref and slot.find(HoldKind.SAVE, save.saver) is not None


def _request_has(m: State, pin: RequestKey, block: int) -> bool:
    engine = m.engines.get(pin.engine)
    request = engine.requests.get(pin.request) if engine is not None else None
    return request is not None and block in request.blocks


def _load_has(m: State, pin: LoadId, block: int) -> bool:
    member = m.members.get(pin.ref.member)
    tenancy = member.held.get(pin.ref.slot) if member is not None else None
    return tenancy is not None and block in tenancy.load_blocks


def _pool_read_has(m: State, pin: ReadId, block: int) -> bool:
    transfer = m.outgoing.get(pin.transfer)
    found = transfer.open.get((pin.layer, pin.start)) if transfer is not None else None
    return (
        found is not None
        and found.read == pin
        and found.hold is not None
        and block in found.spec.pool_blocks
    )


def _read_problems(m: State) -> Iterator[str]:
    """Every open read has exactly one hold: on its slot, or its own after a redirect."""
    for transfer in m.outgoing.values():
        for found in transfer.open.values():
            member = m.members.get(found.ref.member)
            slot = member.slots[found.ref.slot] if member is not None else None
            on_slot = (
                slot is not None
                and slot.ref == found.ref
                and slot.find(HoldKind.READ, found.read) is not None
            )
            if on_slot == (found.hold is not None):
                yield f"read {found.read}: hold on slot {on_slot}, own {found.hold is not None}"
    for member in m.members.values():
        for index in member.held:
            for hold in member.slots[index].holds:
                if hold.kind is HoldKind.READ:
                    read = hold.owner
                    assert isinstance(read, ReadId)
                    owner = m.outgoing.get(read.transfer)
                    if owner is None or (read.layer, read.start) not in owner.open:
                        yield f"{member.slots[index].ref}: read {read} is held but unknown"
