"""Both ends of the copies that a member executes: saves into blocks, loads out of them (R11).

A copy keeps its blocks itself, or is announced by the open step that keeps them (`steps.py`). What
could refuse it is looked at either way; that of a step may have begun by then, which harms nothing.
"""

from __future__ import annotations

from kvd.core import arming, outgoing, steps
from kvd.core import slot_events as se
from kvd.core.block_types import BlockShape
from kvd.core.effects import Effect, StoreGate, WriteSums
from kvd.core.errors import LocalError
from kvd.core.holds import HoldKind
from kvd.core.ids import LoadId, ReadId, RequestKey, SaveId, SlotRef
from kvd.core.pool_ops import poison_block, poison_mismatch, pool_of
from kvd.core.slot import Slot
from kvd.core.state import Member, State, Tenancy

GATE_FREE = 1
GATE_HELD = 2
GATE_QUARANTINED = 3
"""States of a gate word; `kvd.wire.gate_layout` has the same (a test compares them)."""

SUM_BYTES = 4
"""Bytes of one checksum in a `SaveEnded`."""

# Saves -------------------------------------------------------------------------------------------


def check_written(m: State, member: Member, slot: Slot, event: se.Written) -> None:
    """Everything that could refuse a `Written`, before anything is armed."""
    if slot.armed or (not event.saves and not event.reads):
        return
    tenancy = member.held.get(event.ref.slot)
    if tenancy is not None and tenancy.spoiled:
        _check_spoiled(tenancy.spoiled, event)
    if event.layer < 0:
        raise LocalError("layer_unmapped", layer=event.layer)
    if event.saves:
        if not member.contributes:
            raise LocalError("not_contributor", member=member.ref)
        _check_saves(m, member, event)
    if event.reads:
        m.settings.limits.check("readers of a slot", len(event.reads), "readers_per_slot")
        if any(spec.pool_blocks for spec in event.reads):
            _check_shard(pool_of(m).shape, member)
        arming.check_reads(m, member, event)


def _check_saves(m: State, member: Member, event: se.Written) -> None:
    table = pool_of(m)
    _check_shard(table.shape, member)
    if event.layer >= table.shape.num_layers:
        raise LocalError("layer_unmapped", layer=event.layer)
    if event.step:
        span = table.shape.span(event.layer, member.shard)
        targets = table.steps[steps.of_step(member, event.step).id].targets
        if table.has_good(targets, targets) and table.is_untouched(targets, span):
            return
    taken: set[int] = set()
    kept = steps.targets_of(member)
    for save in event.saves:
        names = save.requests or ("",) * len(save.blocks)
        counted = len(set(save.blocks)) == len(save.blocks) == len(save.tokens) == len(names)
        if not counted or taken.intersection(save.blocks):
            raise LocalError("frame_malformed", detail="targets of a save do not add up")
        taken.update(save.blocks)
        engine = member.ref.engine
        table.check_saves(engine, save.blocks, event.layer, member.shard, save.tokens, names, kept)
    steps.check_others(m, member, saved=taken)


def _check_spoiled(spoiled: frozenset[str], event: se.Written) -> None:
    """Rows that were loaded damaged go nowhere, whatever the member says."""
    for save in event.saves:
        if spoiled.intersection(save.requests) or len(save.requests) < len(save.blocks):
            raise LocalError("block_poisoned", block=save.blocks[0], detail="a load was damaged")
    if event.reads:
        raise LocalError("block_poisoned", block="of a read", detail="a load was damaged")


def _check_shard(shape: BlockShape, member: Member) -> None:
    """A member that gave no layout may name a shard that the pool's blocks do not have."""
    if member.shard >= shape.num_shards:
        raise LocalError("frame_malformed", detail=f"shard {member.shard} is not in the layout")


def arm(m: State, member: Member, tenancy: Tenancy, event: se.Written) -> None:
    """Open the spans of every save, and offer every read, of a checked `Written`."""
    tenancy.layer = event.layer
    step = steps.of_step(member, event.step) if event.step else None
    for save in event.saves:
        table = pool_of(m)
        tenancy.saves[save.saver] = save
        lives = map(table.lives.__getitem__, save.blocks)
        tenancy.targets.update(zip(save.blocks, lives, strict=True))
        table.begin_save(
            SaveId(event.ref, save.saver),
            event.layer,
            member.shard,
            save.blocks,
            save.tokens,
            step.id if step is not None else None,
        )
    for spec in event.reads:
        arming.arm(m, member, event.ref, event.layer, spec)


def check_counts(member: Member, event: se.SaveEnded) -> None:
    """Whether counts and checksums of a `SaveEnded` fit the save that was announced."""
    tenancy = member.held.get(event.ref.slot)
    save = tenancy.saves.get(event.saver) if tenancy is not None else None
    if save is None:
        return
    if event.tokens and (
        len(event.tokens) != len(save.tokens)
        or any(not 0 <= got <= said for got, said in zip(event.tokens, save.tokens, strict=True))
    ):
        raise LocalError("frame_malformed", detail="token counts do not fit the announced save")
    if event.sums and len(event.sums) != SUM_BYTES * len(save.blocks):
        raise LocalError("frame_malformed", detail="checksums do not fit the announced save")


def settle_save(m: State, effect: se.SettleSave, event: se.SlotEvent, out: list[Effect]) -> None:
    """A save's hold is lifted: its spans are valid, or their blocks poisoned.

    Checksums go out at once, before any header that the end of this save makes ready. A save
    without any voids those of the saves before it.
    """
    m.counters["saves_ok" if effect.ok else "saves_failed"] += 1
    if m.pool is None:
        return
    table, save = m.pool.blocks, SaveId(effect.ref, effect.saver)
    counts, sums = (event.tokens, event.sums) if isinstance(event, se.SaveEnded) else ((), b"")
    opened = table.save_blocks.get(save)
    if effect.ok and opened is not None and m.settings.checksums != "off":
        out.append(WriteSums(opened.span, opened.blocks, counts or opened.tokens, sums))
    table.end_save(save, effect.ok, counts)


def poison_targets(m: State, tenancy: Tenancy | None, now: int, cause: object) -> None:
    """Whatever was copied out of the tenancy, and is still private, must not become readable."""
    if tenancy is None or m.pool is None:
        return
    for block, life in tenancy.targets.items():
        if m.pool.blocks.lives[block] == life:
            poison_block(m, block, now, cause)


def quarantine(
    m: State,
    member: Member,
    tenancy: Tenancy | None,
    effect: se.ReportQuarantine,
    now: int,
    out: list[Effect],
) -> None:
    """A hold that cannot be fenced: its slot is lost to the ring, its requests end."""
    m.count("quarantines")
    ref = effect.ref
    if not member.leaving:
        out.append(StoreGate(member.ref, ref.slot, ref.epoch, GATE_QUARANTINED))
    if effect.kind is HoldKind.READ:
        assert isinstance(effect.owner, ReadId)
        outgoing.fail_transfer(m, effect.owner.transfer, "reader_quarantined", now, out)
        return
    if tenancy is None or m.pool is None:
        return
    table = m.pool.blocks
    engine = m.engines[member.ref.engine]
    for block, life in tenancy.targets.items():
        if table.lives[block] != life:
            continue
        fill = table.fills.get(block)
        if fill is not None:
            request = engine.requests.get(fill.owner.request)
            if request is not None:
                request.ended = f"slot {ref.slot} is quarantined"
        poison_block(m, block, now, effect)


# Loads -------------------------------------------------------------------------------------------


def check_loads(m: State, member: Member, event: se.Acquired) -> None:
    """Whether every source span of a tenancy's loads can be read now."""
    if not event.loads:
        return
    table = pool_of(m)
    _check_shard(table.shape, member)
    if not 0 <= event.layer < table.shape.num_layers:
        raise LocalError("layer_unmapped", layer=event.layer)
    requests = m.engines[member.ref.engine].requests
    span = table.shape.span(event.layer, member.shard)
    if event.step:
        kept = table.steps[steps.of_step(member, event.step).id]
        ended = any(
            request is not None and request.ended
            for request in map(requests.get, [load.request for load in event.loads])
        )
        if not ended and table.is_loadable(kept.sources, span):
            return
    sources = steps.sources_of(member)
    is_wanted = any(load.request in requests for load in event.loads)
    for load in event.loads:
        request = requests.get(load.request)
        is_left = is_wanted and request is None and sources.issuperset(load.blocks)
        if is_left and not table.is_any_saved(load.blocks, span):
            # Its request is gone and uses no rows any more: those of the others are good.
            continue
        _check_load(m, member, event.layer, load)


def _check_load(m: State, member: Member, layer: int, load: se.LoadSpec) -> None:
    table, engine = pool_of(m), m.engines[member.ref.engine]
    request = engine.requests.get(load.request)
    if request is not None and request.ended:
        raise LocalError("request_ended", request=load.request, detail=request.ended)
    if not 0 < load.tokens <= table.shape.block_tokens * len(load.blocks):
        raise LocalError("frame_malformed", detail="tokens of a load do not fit its blocks")
    owner = RequestKey(engine.name, load.request)
    table.check_loads(owner, load.blocks, layer, member.shard, load.tokens)
    steps.check_others(m, member, loaded=load.blocks)


def begin_loads(m: State, member: Member, tenancy: Tenancy, event: se.Acquired) -> None:
    """Pin the source blocks of a tenancy's loads until these have ended."""
    tenancy.layer = event.layer
    if not event.loads:
        return
    step = steps.of_step(member, event.step) if event.step else None
    if step is None:
        blocks = tuple(block for load in event.loads for block in load.blocks)
    else:
        blocks = step.sources
    tenancy.load_blocks = blocks
    tenancy.loads = tuple((load.request, load.blocks) for load in event.loads)
    step_id = step.id if step is not None else None
    pool_of(m).begin_load(LoadId(event.ref), event.layer, member.shard, blocks, step_id)


def check_loads_ended(member: Member, event: se.Computed) -> None:
    """Refuse to lift COMPUTE while loads into the slot run."""
    tenancy = member.held.get(event.ref.slot)
    if tenancy is not None and tenancy.load_blocks:
        raise LocalError("load_open", slot=event.ref.slot)


def is_loading(m: State, ref: SlotRef) -> bool:
    """Whether loads of this tenancy have not ended."""
    member = m.members.get(ref.member)
    tenancy = member.held.get(ref.slot) if member is not None else None
    if member is None or tenancy is None or member.slots[ref.slot].ref != ref:
        return False
    return bool(tenancy.load_blocks)


def report_bad_sums(m: State, member: Member, event: se.LoadEnded, now: int) -> None:
    """Poison the loaded blocks whose bytes are not those that were saved."""
    tenancy = member.held.get(event.ref.slot)
    if tenancy is None or member.slots[event.ref.slot].ref != event.ref:
        return
    for bad in event.bad:
        if bad.block in tenancy.load_blocks:
            poison_mismatch(m, bad, (tenancy.layer, member.shard), str(member.ref), now)
    damaged = {bad.block for bad in event.bad}
    owners = [request for request, blocks in tenancy.loads if damaged.intersection(blocks)]
    tenancy.spoiled = tenancy.spoiled.union(owners)


def end_load(m: State, tenancy: Tenancy, ref: SlotRef) -> None:
    """The loads of a tenancy have ended, by their own word or because their process died."""
    if m.pool is not None:
        m.pool.blocks.end_load(LoadId(ref))
        tenancy.load_blocks, tenancy.loads = (), ()


def end_load_at(m: State, member: Member, ref: SlotRef) -> None:
    """The same, if this tenancy is not over."""
    tenancy = member.held.get(ref.slot)
    if tenancy is not None and member.slots[ref.slot].ref == ref:
        end_load(m, tenancy, ref)


def end_loads_of(m: State, member: Member) -> None:
    """The member's process is gone: it loads nothing any more."""
    for index, tenancy in member.held.items():
        end_load(m, tenancy, member.slots[index].ref)
