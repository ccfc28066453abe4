"""Engines and their members: who joins, what they must agree on, and what a death leaves behind."""

from __future__ import annotations

from dataclasses import replace

from kvd.core import adoption, arming, copies, outgoing, slot_ops, steps
from kvd.core import events as ev
from kvd.core import results as res
from kvd.core import slot_events as se
from kvd.core.effects import DropMember, Effect, FormatPool, Reply, StoreGate
from kvd.core.errors import LocalError
from kvd.core.ids import SlotRef, executor_at, member_executor
from kvd.core.incoming import drop_engine_transfers
from kvd.core.pool_ops import drop_blocks, flush
from kvd.core.regions import free_dropped
from kvd.core.slot import Slot, announced
from kvd.core.state import Engine, Member, State, Tenancy


def joined(m: State, e: ev.MemberJoined, now: int, out: list[Effect]) -> None:
    """Register a member, or hear again from one that is registered.

    Raises: LocalError(engine_busy | layout_mismatch | hash_probe_mismatch | limit_reached |
        stale_incarnation): the last for a life that has said goodbye and still has readers.
    """
    known = m.members.get(e.ref)
    if known is not None:
        if known.leaving:
            raise LocalError("stale_incarnation", member=e.ref)
        _same_again(m, known, e, out)
        return
    _check_limits(m, e)
    engine = _agree(m, e)
    _check_pool(m, e, engine, out)
    if engine.name not in m.engines:
        m.engines[engine.name] = engine
    slots = [Slot(SlotRef(e.ref, index, 0)) for index in range(e.num_slots)]
    member = Member(e.ref, e.pid, e.is_scheduler, e.rank, e.shard, e.contributes, slots)
    for said in e.slots:
        _announce(m, member, said, now)
    engine.members[e.ref.member] = member
    m.members[e.ref] = member
    m.roster += 1
    adoption.came_back(m, e.ref)
    m.story.record(now, (e.ref,), e, "joined")
    _publish(member, out)
    adoption.settle(m, now, out)
    out.append(_joined_reply(m, e.reply, member))


def _same_again(m: State, member: Member, e: ev.MemberJoined, out: list[Effect]) -> None:
    """The same life of the same member attached again: kvd's own books are the truth."""
    if len(member.slots) != e.num_slots:
        raise LocalError(
            "slot_unknown", slot=e.num_slots, count=len(member.slots), member=member.ref
        )
    member.silent = False
    m.count("members_reattached")
    _publish(member, out)
    out.append(_joined_reply(m, e.reply, member))


def _joined_reply(m: State, reply: int, member: Member) -> Effect:
    total = m.pool.blocks.total if m.pool is not None else 0
    stride = m.pool.stride if m.pool is not None else 0
    epochs = tuple(slot.ref.epoch for slot in member.slots)
    return Reply(reply, res.Joined(total, stride, epochs, member.next_no))


def _publish(member: Member, out: list[Effect]) -> None:
    """Write every word of the member's page: held slots at their epoch, free ones as free."""
    for slot in member.slots:
        state = copies.GATE_FREE if slot.is_free else copies.GATE_HELD
        if slot.is_quarantined:
            state = copies.GATE_QUARANTINED
        out.append(StoreGate(member.ref, slot.ref.slot, slot.ref.epoch, state))


# What members must agree on -----------------------------------------------------------------------


def _check_limits(m: State, e: ev.MemberJoined) -> None:
    limits = m.settings.limits
    engine = m.engines.get(e.ref.engine)
    if engine is None:
        limits.check("engines", len(m.engines) + 1, "engines")
    else:
        old = engine.members.get(e.ref.member)
        if old is not None and not old.leaving:
            raise LocalError("engine_busy", member=e.ref.member, engine=engine.name, pid=old.pid)
        limits.check("members", len(engine.members) + 1, "members_per_engine")
    limits.check("slots", e.num_slots, "slots_per_member")
    for said in e.slots:
        if not 0 <= said.slot < e.num_slots:
            raise LocalError("slot_unknown", slot=said.slot, count=e.num_slots, member=e.ref)


def _agree(m: State, e: ev.MemberJoined) -> Engine:
    """The engine that this member belongs to, new or known. Changes nothing."""
    engine = m.engines.get(e.ref.engine)
    if engine is None:
        return Engine(e.ref.engine, e.tp_size, e.layout, e.hash_probe)
    ours, theirs = engine.layout, e.layout
    if engine.tp_size != e.tp_size:
        raise _mismatch(e, f"tp_size {e.tp_size}", f"tp_size {engine.tp_size}", "its members")
    if ours is not None and theirs is not None and ours.namespace != theirs.namespace:
        raise _mismatch(e, theirs.text, ours.text, "its members")
    return engine


def _check_pool(m: State, e: ev.MemberJoined, engine: Engine, out: list[Effect]) -> None:
    """Give the engine its namespace, and the pool its layout when it has none that is in use."""
    layout = e.layout
    if layout is None:
        return
    number = m.namespaces.get(layout.namespace)
    if number is not None and e.hash_probe and m.probes.get(number, e.hash_probe) != e.hash_probe:
        raise LocalError("hash_probe_mismatch", engine=engine.name)
    pool = m.pool
    if pool is None or pool.stride != layout.stride or pool.blocks.shape != layout.shape:
        users = [other.name for other in m.engines.values() if other.layout is not None]
        # Members of the last life that have not said hello have maps of the pool as it is.
        if pool is not None and (users or pool.blocks.pins or m.absent):
            raise _mismatch(
                e, f"block stride {layout.stride}", f"block stride {pool.stride}", "the pool"
            )
        if layout.stride > m.settings.pool_bytes:
            raise LocalError("reserve_too_large", want=1, total=0)
        if pool is not None:
            m.count("pool_reformatted")
        made = m.make_pool(layout.shape, layout.stride, layout.namespace)
        spans = layout.shape.num_spans
        out.append(FormatPool(layout.stride, made.blocks.total, layout.namespace, spans))
    if number is None:
        number = m.namespaces[layout.namespace] = len(m.namespaces)
    if e.hash_probe:
        m.probes.setdefault(number, e.hash_probe)
    engine.namespace = number
    engine.layout = layout


def _mismatch(e: ev.MemberJoined, theirs: str, ours: str, where: str) -> LocalError:
    return LocalError(
        "layout_mismatch",
        engine=e.ref.engine,
        theirs=theirs or "another",
        ours=ours or "another",
        where=where,
        detail="blocks of both could not be told apart",
    )


# Announced slots ----------------------------------------------------------------------------------


def _announce(m: State, member: Member, said: ev.SlotAnnounced, now: int) -> None:
    """Take over one slot of a member that ran before this kvd did.

    kvd takes the larger epoch and never restarts at 0. A slot whose last tenancy has fully ended
    is released here: only an epoch greater than the last acquired one opens the gate again.
    """
    acquired = said.acquired
    reads = tuple((spec.read, executor_at(spec.peer)) for spec in said.reads)
    in_use = said.computing or bool(said.savers) or bool(reads)
    if not in_use:
        epoch = max(said.word_epoch, acquired + 1, 0)
        member.slots[said.slot] = Slot(SlotRef(member.ref, said.slot, epoch))
        return
    ref = SlotRef(member.ref, said.slot, max(acquired, 0))
    slot = announced(ref, said.computing, said.savers, reads, now, m.rules)
    member.slots[said.slot] = slot
    member.held[said.slot] = Tenancy()
    m.count("slots_taken_over")
    for spec in said.reads:
        # The blocks that it named belong to the pool of the kvd that is gone.
        arming.arm(m, member, ref, spec.read.layer, replace(spec, pool_blocks=()))


# Death --------------------------------------------------------------------------------------------


def silent(m: State, e: ev.MemberSilent, now: int) -> None:
    """Its socket closed while its process lives: everything it holds stays held."""
    member = m.members.get(e.ref)
    if member is not None and not member.leaving:
        member.silent = True
        m.count("members_silent")
        m.story.record(now, (e.ref,), e, "silent")


def died(m: State, e: ev.MemberDied, now: int, out: list[Effect]) -> None:
    """The member touches nothing any more: fence by proof.

    Its computing, saving and loading have stopped. Reads that nobody claimed are revoked; granted
    ones go on (the rows are final), and the member's memory is kept until they have ended.
    """
    if e.ref in m.absent:
        adoption.absent_died(m, e.ref, now, out)
        return
    member = m.members.get(e.ref)
    if member is None or member.leaving:
        return
    member.leaving = True
    m.roster += 1
    m.count("members_died")
    m.story.record(now, (e.ref,), e, "leaving")
    copies.end_loads_of(m, member)
    executor = member_executor(e.ref)
    for index in list(member.held):
        slot_ops.feed(m, se.ExecutorDied(member.slots[index].ref, executor), now, out)
        slot_ops.feed(m, se.Abandoned(member.slots[index].ref), now, out)
    steps.close_all(m, member)
    outgoing.producer_gone(m, e.ref.engine, now, out)
    _end_requests(m, member, now)
    flush(m, out)
    sweep_leaving(m, out)


def _end_requests(m: State, member: Member, now: int) -> None:
    """The engine's uncommitted blocks are worthless; without its scheduler, so are its pins."""
    engine = m.engines[member.ref.engine]
    if m.pool is not None:
        table = m.pool.blocks
        for block, fill in list(table.fills.items()):
            if fill.owner.engine == engine.name:
                request = engine.requests.get(fill.owner.request)
                if request is not None:
                    request.ended = f"member {member.ref.member} of its engine died"
                table.poison(block)
    if member.is_scheduler:
        for request in list(engine.requests.values()):
            drop_blocks(m, request, list(request.blocks), now, aborted=True)
        engine.requests.clear()


def sweep_leaving(m: State, out: list[Effect]) -> None:
    """Drop members that are gone and whose slots nobody touches; engines without members too."""
    for ref, member in list(m.members.items()):
        if not member.leaving or member.held:
            continue
        del m.members[ref]
        m.roster += 1
        out.append(DropMember(ref))
        engine = m.engines[ref.engine]
        if engine.members.get(ref.member) is member:
            del engine.members[ref.member]
        # Members of an earlier life may still be leaving: their engine stays until then.
        if not any(other.engine == ref.engine for other in m.members):
            _drop_engine(m, engine, out)


def _drop_engine(m: State, engine: Engine, out: list[Effect]) -> None:
    drop_engine_transfers(m, engine.name, out)
    del m.engines[engine.name]
    for region in m.regions.values():
        if region.engine == engine.name:
            region.dropped = True
    free_dropped(m, out)


def executor_lost(m: State, e: ev.ExecutorLost, now: int, out: list[Effect]) -> None:
    """A process is proven dead: lift every hold that it executed, and only those."""
    m.story.record(now, (e.executor,), e, "fenced by death")
    for member in list(m.members.values()):
        for index in list(member.held):
            if any(hold.executor == e.executor for hold in member.slots[index].holds):
                slot_ops.feed(m, se.ExecutorDied(member.slots[index].ref, e.executor), now, out)
    outgoing.executor_lost(m, e.executor, now, out)
    flush(m, out)
    sweep_leaving(m, out)
