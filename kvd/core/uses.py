"""Whole tenancies that a member tells in one event, carried out at once.

Most of them are a tenancy from its acquire to its last end, in which everything is plainly as it
should be: then there is no need of holds that nobody could have asked about. What is left over is
taken apart and applied event by event, and so it is decided there what a `Used` means.
"""

from __future__ import annotations

from typing import Final

from kvd.core.copies import GATE_FREE
from kvd.core.effects import Effect, StoreGate
from kvd.core.pool_ops import pool_of
from kvd.core.slot import released
from kvd.core.state import Member, MemberStep, State
from kvd.core.use_events import ACQUIRED, COMPUTED, LOADED, SAVED, WRITTEN, Used, WholeTenancy

_WHOLE: Final = ACQUIRED | WRITTEN | COMPUTED


def at_once(m: State, member: Member, event: Used, now: int, out: list[Effect]) -> bool:
    """Carry out a whole tenancy of which everything is plainly as it should be.

    False, with nothing changed, says nothing: then its parts decide.
    """
    ref, did = event.ref, event.did
    owed = _WHOLE | (LOADED if event.loads else 0) | (SAVED if event.saves else 0)
    if did != owed or ref.member != member.ref or not 0 <= ref.slot < len(member.slots):
        return False
    slot = member.slots[ref.slot]
    if slot.holds or slot.ref != ref:
        return False
    loading = _loading(m, member, event) if event.loads else None
    saving = _saving(m, member, event) if event.saves else None
    if (event.loads and loading is None) or (event.saves and saving is None):
        return False
    if saving is not None:
        _mark_saved(m, member, event.layer, saving)
    member.slots[ref.slot] = released(ref)
    m.counters["releases"] += 1
    out.append(StoreGate(member.ref, ref.slot, ref.epoch + 1, GATE_FREE))
    loads = loading.loads if loading is not None else ()
    saves = saving.saves if saving is not None else ()
    told = WholeTenancy(ref, event.layer, loads, saves, event.loads, event.saves)
    m.story.record(now, (ref,), told, "released")
    return True


def _loading(m: State, member: Member, event: Used) -> MemberStep | None:
    """The step, if its loads of this layer can have been made."""
    step, table = member.steps.get(event.loads), pool_of(m)
    shape = table.shape
    if step is None or not step.loads or not 0 <= event.layer < shape.num_layers:
        return None
    requests = m.engines[member.ref.engine].requests
    for load in step.loads:
        request = requests.get(load.request)
        if request is not None and request.ended:
            return None
    span = shape.span(event.layer, member.shard)
    return step if table.is_loadable(table.steps[step.id].sources, span) else None


def _saving(m: State, member: Member, event: Used) -> MemberStep | None:
    """The step, if its save of this layer can have been made; its checksums are not kept here."""
    step, table = member.steps.get(event.saves), pool_of(m)
    shape = table.shape
    if step is None or not 0 <= event.layer < shape.num_layers or m.settings.checksums != "off":
        return None
    if len(step.saves) != 1 or step.saves[0].saver != event.saver or not member.contributes:
        return None
    targets = table.steps[step.id].targets
    span = shape.span(event.layer, member.shard)
    good = table.has_good(targets, targets) and table.is_untouched(targets, span)
    return step if good else None


def _mark_saved(m: State, member: Member, layer: int, step: MemberStep) -> None:
    table, save = pool_of(m), step.saves[0]
    span = table.shape.span(layer, member.shard)
    table.mark_step(step.id, span, save.blocks, save.tokens)
    m.counters["saves_ok"] += 1
