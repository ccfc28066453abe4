"""Steps of members: the blocks that all its layers copy are kept from the step's begin to its end.

A layer of a step is announced like any other; what a step spares is the answer that each copy
would wait for. So everything that could go wrong with a block while a copy runs that kvd has not
heard of yet is excluded here: nobody else copies these spans meanwhile, or reads them remotely.

Of a step that was refused the layers name its number, too: by then the member may not have heard
the answer. Each of them is decided as if it had said itself what it copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final

from kvd.core import slot_events as se
from kvd.core.block_types import OpenCopy
from kvd.core.blocks import BlockTable
from kvd.core.errors import KvdError, LocalError
from kvd.core.ids import LoadId, RequestKey, SaveId, StepId
from kvd.core.pool_ops import poison_block, pool_of
from kvd.core.state import Member, MemberStep, State

STEPS_MAX: Final = 64
"""Steps of one member that are open, or whose copies have not all ended."""


def apply(m: State, member: Member, event: se.StepOpened | se.StepClosed) -> None:
    """Open or close a step. Raises: LocalError; then nothing is kept."""
    if event.member != member.ref:
        raise LocalError("stale_incarnation", member=event.member)
    if type(event) is se.StepOpened:
        _open_or_remember(m, member, event)
    elif member.steps.pop(event.number, None) is not None:
        pool_of(m).close_step(StepId(member.ref, event.number))
    else:
        member.refused.pop(event.number, None)


def close_all(m: State, member: Member) -> None:
    """The member's process is gone: it copies nothing any more."""
    for number in member.steps:
        pool_of(m).close_step(StepId(member.ref, number))
    member.steps.clear()
    member.refused.clear()


def of_step(member: Member, number: int) -> MemberStep:
    """An open step of the member.

    Raises: LocalError(frame_malformed).
    """
    step = member.steps.get(number)
    if step is None:
        raise LocalError("frame_malformed", detail=f"no step {number} is open")
    return step


def targets_of(member: Member) -> frozenset[int]:
    """Blocks that the member may save into by its open steps."""
    return frozenset().union(*[step.targets for step in member.steps.values()])


def sources_of(member: Member) -> frozenset[int]:
    """Blocks that the member may load by its open steps."""
    return frozenset().union(*[step.sources for step in member.steps.values()])


def refused(m: State, member: Member, event: se.SlotEvent, now: int) -> None:
    """Saves were not armed, but may run for all that: what they write must not become readable.

    A copy that kvd knows nothing of is not waited for by name. Its step keeps the blocks until it
    is closed; which rows are in them then, nobody can tell (R6). That is so whatever was wrong
    with the slot: a step's number is used once, so that nothing stale is acted on (R4).
    """
    if type(event) is not se.Written or not member.steps:
        return
    named = {block for save in event.saves for block in save.blocks}
    step = member.steps.get(event.step) or member.refused.get(event.step)
    if step is not None:
        named.update(block for save in step.saves for block in save.blocks)
    for block in sorted(named & targets_of(member)):
        poison_block(m, block, now, event)


def resolve(member: Member, event: se.SlotEvent) -> se.SlotEvent:
    """The same event with the copies of the step that it names; a step that was refused keeps
    nothing for them.

    Raises: LocalError(frame_malformed).
    """
    if type(event) is se.Written and event.step:
        if event.saves:
            raise LocalError("frame_malformed", detail="saves of a step and others")
        refused = member.refused.get(event.step)
        if refused is not None:
            return replace(event, saves=refused.saves, step=0)
        return replace(event, saves=of_step(member, event.step).saves)
    if type(event) is se.Acquired and event.step:
        if event.loads:
            raise LocalError("frame_malformed", detail="loads of a step and others")
        refused = member.refused.get(event.step)
        if refused is not None:
            return replace(event, loads=refused.loads, step=0)
        return replace(event, loads=of_step(member, event.step).loads)
    return event


def check_others(
    m: State, member: Member, *, saved: Collection[int] = (), loaded: Collection[int] = ()
) -> None:
    """Whether blocks can be copied that other members may copy in their own steps at any time.

    Raises: LocalError(span_busy).
    """
    for step, kept in pool_of(m).steps.items():
        other = m.members.get(step.member)
        if step.member == member.ref or (other is not None and other.shard != member.shard):
            continue
        both = kept.targets.intersection(saved) or kept.targets.intersection(loaded)
        both = both or kept.sources.intersection(saved)
        if both:
            raise LocalError("span_busy", layer="any", block=min(both), doing=f"used by {step}")


def _open_or_remember(m: State, member: Member, event: se.StepOpened) -> None:
    if event.number <= member.last_step:
        detail = f"step {event.number} after step {member.last_step}"
        raise LocalError("frame_malformed", detail=detail)
    member.last_step = event.number
    try:
        _open(m, member, event)
    except KvdError:
        member.refused[event.number] = event
        if len(member.refused) > STEPS_MAX:
            del member.refused[next(iter(member.refused))]
        raise


def _open(m: State, member: Member, event: se.StepOpened) -> None:
    table = pool_of(m)
    if sum(1 for step in table.steps if step.member == member.ref) >= STEPS_MAX:
        raise LocalError("busy", limit=STEPS_MAX, what="open steps of a member")
    if member.shard >= table.shape.num_shards:
        raise LocalError("frame_malformed", detail=f"shard {member.shard} is not in the layout")
    targets = _check_saves(m, table, member, event)
    sources = _check_loads(m, table, member, event)
    check_others(m, member, saved=targets, loaded=sources)
    id_ = StepId(member.ref, event.number)
    ordered = tuple([block for load in event.loads for block in load.blocks])
    member.steps[event.number] = MemberStep(id_, event.saves, event.loads, targets, ordered)
    table.open_step(id_, targets, sources)


def _check_saves(
    m: State, table: BlockTable, member: Member, event: se.StepOpened
) -> frozenset[int]:
    """Whether these blocks can be saved into at any time, in any layer; which they are."""
    if not event.saves:
        return frozenset()
    if not member.contributes:
        raise LocalError("not_contributor", member=member.ref)
    if len(event.saves) > 1:
        raise LocalError("frame_malformed", detail="a step has one save for each layer")
    save = event.saves[0]
    targets = frozenset(save.blocks)
    if not len(targets) == len(save.blocks) == len(save.tokens) == len(save.requests):
        raise LocalError("frame_malformed", detail="targets of a save do not add up")
    m.settings.limits.check("blocks of a step", len(targets), "blocks_per_request")
    table.check_targets(member.ref.engine, save.blocks, save.tokens, save.requests)
    _check_open(table, member, targets, table.save_blocks, "saved")
    _check_open(table, member, targets, table.load_blocks, "loaded")
    read = targets.intersection(block for block, _ in table.span_readers)
    if read:
        raise LocalError("span_busy", layer="any", block=min(read), doing="read remotely")
    return targets


def _check_open(
    table: BlockTable,
    member: Member,
    blocks: frozenset[int],
    copies: dict[SaveId, OpenCopy] | dict[LoadId, OpenCopy],
    doing: str,
) -> None:
    """Whether no other member copies these spans of the same shard now."""
    shape = table.shape
    for copy, opened in copies.items():
        is_ours = copy.ref.member == member.ref
        if is_ours or opened.span % shape.num_shards != member.shard:
            continue
        if not blocks.isdisjoint(opened.blocks):
            block, layer = min(blocks.intersection(opened.blocks)), opened.span // shape.num_shards
            raise LocalError("span_busy", layer=layer, block=block, doing=doing)


def _check_loads(
    m: State, table: BlockTable, member: Member, event: se.StepOpened
) -> frozenset[int]:
    """Whether all layers of these blocks can be loaded from now on; which blocks they are."""
    if not event.loads:
        return frozenset()
    engine, size = m.engines[member.ref.engine], table.shape.block_tokens
    written = _being_written(table, member)
    sources: set[int] = set()
    for load in event.loads:
        request = engine.requests.get(load.request)
        if request is not None and request.ended:
            raise LocalError("request_ended", request=load.request, detail=request.ended)
        if not 0 < load.tokens <= size * len(load.blocks):
            raise LocalError("frame_malformed", detail="tokens of a load do not fit its blocks")
        owner = RequestKey(engine.name, load.request)
        table.check_sources(owner, load.blocks, member.shard, load.tokens, written)
        sources.update(load.blocks)
    m.settings.limits.check("blocks of a step", len(sources), "blocks_per_request")
    return frozenset(sources)


def _being_written(table: BlockTable, member: Member) -> set[int]:
    """Blocks of which a span of the member's shard is being saved, or may be at any time."""
    num_shards = table.shape.num_shards
    taken: list[Iterable[int]] = [
        opened.blocks
        for opened in table.save_blocks.values()
        if opened.span % num_shards == member.shard
    ]
    taken += [
        kept.targets
        for step, kept in table.steps.items()
        if step.member == member.ref and not kept.closed
    ]
    return set().union(*taken)
