"""The life after a death: what a new kvd takes over from the last one, and when it is free again.

Ready blocks are hits at once. A block that was being filled may still be written by its saver,
which does not know yet that kvd died. So all of them are held, under a name of their own, until
every member of the last life has said hello or is proven dead, and the saves that the returned
members announced have ended. A member that lives and stays away keeps them: never assumed free.

Loads of the last life need no such care. Whoever copies out of the pool trusts the copy only if
kvd still lived when it ended.
"""

from __future__ import annotations

from kvd.core.adopted import AdoptedPool, NodeAdopted
from kvd.core.effects import ClearHeaders, Effect
from kvd.core.holds import HoldKind
from kvd.core.ids import MemberRef, RequestKey, SlotRef
from kvd.core.pool_ops import flush
from kvd.core.regions import free_dropped
from kvd.core.state import Region, State

LAST_LIFE = RequestKey("", "last life of kvd")
"""Owner of blocks that were being filled when kvd died; no engine has an empty name."""


def adopted(m: State, e: NodeAdopted, now: int, out: list[Effect]) -> None:
    """Take everything over; the machine has seen no other event yet."""
    assert m.pool is None
    assert not m.members
    m.absent.update(e.absent)
    if e.pool is not None:
        _adopt_pool(m, e.pool, out)
    for name, engine, spec in e.regions:
        m.regions[name] = Region(name, engine, spec, ready=True)
        if not any(ref.engine == engine for ref in m.absent):
            m.regions[name].dropped = True
    m.roster += 1
    m.story.record(now, ("kvd",), "the last life of kvd", f"taken over: {summary(m, e)}")
    free_dropped(m, out)
    settle(m, now, out)


def summary(m: State, e: NodeAdopted) -> str:
    """What was taken over, for people."""
    ready = len(m.pool.blocks.index) if m.pool is not None else 0
    return (
        f"{ready} ready blocks, {len(m.inherited_blocks)} that were being filled, "
        f"{len(e.absent)} members, {len(e.regions)} regions"
    )


def _adopt_pool(m: State, pool: AdoptedPool, out: list[Effect]) -> None:
    made = m.make_pool(pool.shape, pool.stride, pool.digest, pool.blocks.columns)
    table = made.blocks
    for number, (digest, probe) in enumerate(pool.namespaces):
        m.namespaces[digest] = number
        if probe:
            m.probes[number] = probe
    held, twice = table.adopt(LAST_LIFE)
    m.inherited_blocks.extend(held)
    odd = sorted((*pool.blocks.odd, *twice))
    m.counters["blocks_adopted"] += len(table.index)
    m.counters["blocks_torn"] += len(pool.blocks.torn)
    if odd:
        m.counters["blocks_not_adopted"] += len(odd)
        out.append(ClearHeaders(tuple(odd)))


def came_back(m: State, ref: MemberRef) -> None:
    """A member of the last life said hello; the saves that it announced are waited for."""
    if ref not in m.absent:
        return
    m.absent.discard(ref)
    m.roster += 1
    member = m.members[ref]
    for index in member.held:
        slot = member.slots[index]
        if any(hold.kind is HoldKind.SAVE for hold in slot.holds):
            m.inherited_saves.add(slot.ref)


def absent_died(m: State, ref: MemberRef, now: int, out: list[Effect]) -> None:
    """A member of the last life is proven dead before it said a word to this one."""
    m.absent.discard(ref)
    m.roster += 1
    m.count("members_died")
    m.story.record(now, (ref,), "died while kvd was down", "gone")
    is_gone = ref.engine not in m.engines and not any(r.engine == ref.engine for r in m.absent)
    if is_gone:
        for region in m.regions.values():
            if region.engine == ref.engine:
                region.dropped = True
        free_dropped(m, out)
    settle(m, now, out)


def settle(m: State, now: int, out: list[Effect]) -> None:
    """Free the blocks of the last life once nobody can be writing into them."""
    if not m.inherited_blocks or m.absent:
        return
    m.inherited_saves = {ref for ref in m.inherited_saves if _is_saving(m, ref)}
    if m.inherited_saves or m.pool is None:
        return
    table = m.pool.blocks
    for block in m.inherited_blocks:
        table.poison(block)
        table.unpin(block, LAST_LIFE)
    m.story.record(
        now, ("kvd",), "writers of the last life are gone", f"{m.inherited_blocks}"[:200]
    )
    m.inherited_blocks.clear()
    flush(m, out)


def _is_saving(m: State, ref: SlotRef) -> bool:
    member = m.members.get(ref.member)
    if member is None:
        return False
    slot = member.slots[ref.slot]
    return slot.ref == ref and any(hold.kind is HoldKind.SAVE for hold in slot.holds)
