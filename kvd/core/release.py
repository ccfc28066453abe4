"""The one rule: a slot is free exactly when it has no holds.

Theory of operation
-------------------
A slot is a device layer buffer that many layers take turns in. It may be written again only when
the save of its last occupant is done *and* every remote read of it is done. Both conditions, and
the computation itself, are *holds*: named parties that may still touch the memory. Nothing here
counts, and nothing here looks at a clock to free anything.

R1   free <=> no holds; derived (`Slot.is_free`), never stored.
R2   arm before announce: `Written` adds *all* saves and reads of the tenancy in one step, while
     COMPUTE is still there. There is no instant with a hold missing. `Computed` then lifts COMPUTE.
R3   lift by name: a completion removes exactly the hold (kind, owner). A read's owner includes
     its attempt number, so that an end of an earlier attempt names nothing.
R4   every event carries member incarnation, slot and epoch (the caller has compared boot ids);
     a mismatch is ignored with a reason, never acted on.
R5   time never frees memory that somebody may be touching: see `holds.py`. Only the completion,
     a truth that says nothing runs, a fence, or the proven death of the executor lifts a hold.
R5a  a read may touch memory only after its grant. An offered read is revoked at its deadline
     without a fence; once the save is done it is *redirected* to the pool span.
R6   a failed copy lifts its hold and poisons its data.
R7   total: every (state, event) is defined; illegal events change nothing and say why.
R8   deterministic: no clock, randomness, logging, iteration over sets.
R9   effects are requests and may be repeated; receivers are idempotent by (incarnation, slot,
     epoch, name).
R10  bounded: readers per slot are limited when the step is built and again by `max_readers`.
R11  is kept by the machine: it keeps the block end of every copy until the hold here is lifted.

Epochs: kvd raises the epoch at release and at no other time; the owner acquires a slot whose gate
word says free at an epoch greater than the last one it acquired. kvd need not have seen the
acquire: `Written` or `Computed` at the epoch of a free slot implies it.
"""

from __future__ import annotations

from dataclasses import replace

from kvd.core import slot_events as ev
from kvd.core.holds import (
    Ask,
    Doubt,
    Hold,
    HoldKind,
    Phase,
    Truth,
    age,
    doubt_further,
    granted,
    limit_of,
    offered,
    quarantined,
    running,
    still_running,
)
from kvd.core.ids import Owner, ReadId, SlotRef, member_executor
from kvd.core.slot import (
    COMPUTE_OWNER,
    Outcome,
    Rules,
    Saved,
    Slot,
    released,
    settle,
    swap,
    with_holds,
    without,
)


def transition(slot: Slot, event: ev.SlotEvent, now: int, rules: Rules) -> Outcome:
    """Return the slot after the event, and what must be done, in order.

    Args:
        slot: the slot as it is.
        event: what happened; its `ref` is compared with the slot's (R4).
        now: time of the event, ns, never smaller than in earlier calls.
        rules: deadlines and limits.
    """
    if event.ref != slot.ref:
        return slot, (ev.Ignore(event.ref, _stale_reason(event.ref, slot.ref)),)
    match event:
        case ev.SaveEnded():
            return _save_ended(slot, event.saver, event.ok)
        case ev.Written():
            return _written(slot, event, now, rules)
        case ev.Computed(_, ok):
            return _computed(slot, ok, now, rules)
        case ev.Acquired():
            return _acquired(slot, now, rules)
        case ev.ReadClaimed():
            return _claimed(slot, event, now, rules)
        case ev.ReadEnded(_, read, executor, ok):
            return _read_ended(slot, read, executor, ok, now, rules)
        case ev.ReadDeclined(_, read):
            return _declined(slot, read)
        case ev.Ticked():
            return _ticked(slot, now, rules)
        case ev.Answered(_, kind, owner, truth):
            return _answered(slot, kind, owner, truth, now, rules)
        case ev.Fenced(_, kind, owner):
            return _fenced(slot, kind, owner)
        case ev.Unfenceable(_, kind, owner):
            return _unfenceable(slot, kind, owner, now, rules)
        case ev.ExecutorDied(_, executor):
            return _executor_died(slot, executor)
        case ev.Poisoned():
            return _poisoned(slot)
        case ev.Abandoned():
            return _abandoned(slot)
        case ev.LoadEnded():
            return slot, ()


def _stale_reason(got: SlotRef, have: SlotRef) -> str:
    if got.member != have.member:
        return "stale_incarnation"
    return "stale_epoch" if got.epoch < have.epoch else "future_epoch"


# The owner's own events ----------------------------------------------------------------------


def _acquired(slot: Slot, now: int, rules: Rules) -> Outcome:
    if not slot.is_free:
        return slot, (ev.Ignore(slot.ref, "already_acquired"),)
    return _with_compute(slot, now, rules), ()


def _with_compute(slot: Slot, now: int, rules: Rules) -> Slot:
    executor = member_executor(slot.ref.member)
    limit = rules.timing.compute
    return with_holds(slot, (running(HoldKind.COMPUTE, COMPUTE_OWNER, executor, now, limit),))


def _written(slot: Slot, event: ev.Written, now: int, rules: Rules) -> Outcome:
    if slot.armed:
        return slot, (ev.Ignore(slot.ref, "already_armed"),)
    if len(event.reads) > rules.max_readers:
        return slot, (ev.Ignore(slot.ref, "too_many_readers"),)
    names: list[Owner] = [save.saver for save in event.saves]
    names += [spec.read._replace(attempt=0) for spec in event.reads]
    if len(set(names)) != len(names):
        return slot, (ev.Ignore(slot.ref, "name_twice"),)
    if slot.poisoned:
        return slot, (ev.Ignore(slot.ref, "poisoned"),)
    if slot.is_free:
        slot = _with_compute(slot, now, rules)
    executor, timing = member_executor(slot.ref.member), rules.timing
    armed = [running(HoldKind.SAVE, save.saver, executor, now, timing.save) for save in event.saves]
    armed += [offered(spec.read, now, timing) for spec in event.reads]
    saved = Saved.OPEN if event.saves else Saved.NONE
    slot = Slot(slot.ref, slot.holds + tuple(armed), True, saved, slot.poisoned)
    return slot, tuple(ev.OfferRead(slot.ref, spec.read) for spec in event.reads)


def _computed(slot: Slot, ok: bool, now: int, rules: Rules) -> Outcome:
    if slot.is_free:
        slot = _with_compute(slot, now, rules)
    hold = slot.find(HoldKind.COMPUTE, COMPUTE_OWNER)
    if hold is None:
        return slot, (ev.Ignore(slot.ref, "not_computing"),)
    return _end_compute(slot, hold, ok)


def _end_compute(slot: Slot, hold: Hold, ok: bool) -> Outcome:
    effects: list[ev.SlotEffect] = []
    if not ok and not slot.armed:
        # Once the rows are final, a failure of attention does not make them wrong.
        slot = _poison(slot, effects)
    return settle(without(slot, hold), effects)


def _save_ended(slot: Slot, saver: str, ok: bool) -> Outcome:
    hold = slot.find(HoldKind.SAVE, saver)
    if hold is None:
        return slot, (ev.Ignore(slot.ref, "no_such_hold"),)
    return _end_save(slot, hold, ok)


def _end_save(slot: Slot, hold: Hold, ok: bool) -> Outcome:
    saver = hold.owner
    assert isinstance(saver, str)
    settled = ev.SettleSave(slot.ref, saver, ok and not slot.poisoned)
    if len(slot.holds) == 1:
        return released(slot.ref), (settled, ev.Release(slot.ref))
    holds = tuple([other for other in slot.holds if other is not hold])
    saved = slot.saved
    if not ok:
        saved = Saved.FAILED
    elif saved is Saved.OPEN and not _has_save(holds):
        saved = Saved.DONE
    slot = Slot(slot.ref, holds, slot.armed, saved, slot.poisoned)
    effects: list[ev.SlotEffect] = [settled]
    if saved is Saved.DONE and not slot.poisoned:
        slot = _drop_offers(slot, effects, redirect=True)
    return settle(slot, effects)


def _has_save(holds: tuple[Hold, ...]) -> bool:
    return any(hold.kind is HoldKind.SAVE for hold in holds)


def _poisoned(slot: Slot) -> Outcome:
    if slot.is_free:
        return slot, (ev.Ignore(slot.ref, "free"),)
    if slot.poisoned:
        return slot, (ev.Ignore(slot.ref, "already_poisoned"),)
    effects: list[ev.SlotEffect] = []
    return settle(_poison(slot, effects), effects)


def _poison(slot: Slot, effects: list[ev.SlotEffect]) -> Slot:
    """Mark the data bad. Holds of running copies stay: only who may not touch yet is dropped."""
    if not slot.poisoned:
        effects.append(ev.PoisonTenancy(slot.ref))
    return _drop_offers(replace(slot, poisoned=True), effects, why="poisoned")


def _abandoned(slot: Slot) -> Outcome:
    if slot.is_free:
        return slot, (ev.Ignore(slot.ref, "free"),)
    effects: list[ev.SlotEffect] = []
    return settle(_drop_offers(slot, effects, why="producer_gone"), effects)


def _drop_offers(
    slot: Slot, effects: list[ev.SlotEffect], *, redirect: bool = False, why: str = ""
) -> Slot:
    """Lift every read that was never granted, in one step with its redirection or failure."""
    for hold in slot.holds:
        if hold.phase is Phase.OFFERED:
            assert isinstance(hold.owner, ReadId)
            if redirect:
                effects.append(ev.RedirectRead(slot.ref, hold.owner))
            else:
                effects.append(ev.FailRead(slot.ref, hold.owner, why))
    kept = tuple(hold for hold in slot.holds if hold.phase is not Phase.OFFERED)
    return slot if len(kept) == len(slot.holds) else replace(slot, holds=kept)


# Readers -------------------------------------------------------------------------------------


def _claimed(slot: Slot, event: ev.ReadClaimed, now: int, rules: Rules) -> Outcome:
    hold = slot.find(HoldKind.READ, event.read)
    if hold is None:
        return slot, (ev.Ignore(slot.ref, "no_such_hold"),)
    grant = ev.GrantRead(slot.ref, event.read, event.executor, event.claim)
    if hold.phase is Phase.RUNNING:
        if hold.executor != event.executor:
            return slot, (ev.Ignore(slot.ref, "other_reader"),)
        if hold.doubt is not Doubt.NONE:
            # The answer "never started", or the fence, may be on its way: a grant given now would
            # start the read under a hold that is about to be lifted.
            return slot, (ev.Ignore(slot.ref, "in_doubt"),)
        return slot, (grant,)
    slot = swap(slot, hold, granted(hold, event.executor, now, rules.timing))
    return slot, (grant,)


def _declined(slot: Slot, read: ReadId) -> Outcome:
    hold = slot.find(HoldKind.READ, read)
    if hold is None:
        return slot, (ev.Ignore(slot.ref, "no_such_hold"),)
    if hold.phase is Phase.RUNNING:
        return slot, (ev.Ignore(slot.ref, "granted"),)
    return settle(without(slot, hold), [ev.FailRead(slot.ref, read, "declined")])


def _read_ended(
    slot: Slot, read: ReadId, executor: str, ok: bool, now: int, rules: Rules
) -> Outcome:
    hold = slot.find(HoldKind.READ, read)
    if hold is None:
        return slot, (ev.Ignore(slot.ref, "no_such_hold"),)
    if hold.phase is Phase.OFFERED:
        return slot, (ev.Ignore(slot.ref, "not_granted"),)
    if hold.executor != executor:
        return slot, (ev.Ignore(slot.ref, "other_reader"),)
    return _end_read(slot, hold, ok, now, rules)


def _end_read(slot: Slot, hold: Hold, ok: bool, now: int, rules: Rules) -> Outcome:
    """A granted read ended by itself: nobody touches the slot for it any more."""
    read = hold.owner
    assert isinstance(read, ReadId)
    slot = without(slot, hold)
    if slot.poisoned:
        return settle(slot, [ev.FailRead(slot.ref, read, "poisoned")])
    if ok:
        return settle(slot, [ev.FinishRead(slot.ref, read)])
    if read.attempt + 1 >= rules.timing.read_attempts:
        return settle(slot, [ev.FailRead(slot.ref, read, "read_failed")])
    again = read.next_attempt()
    if slot.saved is Saved.DONE:
        return settle(slot, [ev.RedirectRead(slot.ref, again)])
    slot = replace(slot, holds=(*slot.holds, offered(again, now, rules.timing)))
    return slot, (ev.OfferRead(slot.ref, again),)


# Doubt, truth and fences ---------------------------------------------------------------------


def _ticked(slot: Slot, now: int, rules: Rules) -> Outcome:
    effects: list[ev.SlotEffect] = []
    kept: list[Hold] = []
    for hold in slot.holds:
        older, ask = age(hold, now, rules.timing)
        if ask is Ask.REVOKE:
            assert isinstance(hold.owner, ReadId)
            effects.append(ev.FailRead(slot.ref, hold.owner, "not_claimed"))
            continue
        kept.append(older)
        if ask is Ask.OFFER:
            assert isinstance(hold.owner, ReadId)
            effects.append(ev.OfferRead(slot.ref, hold.owner))
        elif ask is Ask.TRUTH:
            effects.append(ev.AskTruth(slot.ref, hold.kind, hold.owner, hold.executor))
        elif ask is Ask.FENCE:
            effects.append(ev.AskFence(slot.ref, hold.kind, hold.owner, hold.executor))
    if not effects:
        return slot, ()
    return settle(replace(slot, holds=tuple(kept)), effects)


def _answered(
    slot: Slot, kind: HoldKind, owner: Owner, truth: Truth, now: int, rules: Rules
) -> Outcome:
    hold = slot.find(kind, owner)
    if hold is None:
        return slot, (ev.Ignore(slot.ref, "no_such_hold"),)
    if hold.doubt is Doubt.NONE:
        return slot, (ev.Ignore(slot.ref, "not_asked"),)
    match truth:
        case Truth.RUNNING:
            believed = still_running(hold, now, limit_of(kind, rules.timing))
            return swap(slot, hold, believed), ()
        case Truth.UNKNOWN:
            if hold.doubt is not Doubt.SUSPECT:
                return slot, (ev.Ignore(slot.ref, "already_fencing"),)
            slot = swap(slot, hold, doubt_further(hold, now, rules.timing))
            return slot, (ev.AskFence(slot.ref, kind, owner, hold.executor),)
        case Truth.ENDED_OK:
            return _lift_by_truth(slot, hold, True, now, rules)
        case Truth.ENDED_FAILED | Truth.NEVER_STARTED:
            return _lift_by_truth(slot, hold, False, now, rules)


def _lift_by_truth(slot: Slot, hold: Hold, ok: bool, now: int, rules: Rules) -> Outcome:
    if hold.kind is HoldKind.SAVE:
        return _end_save(slot, hold, ok)
    if hold.kind is HoldKind.COMPUTE:
        return _end_compute(slot, hold, ok)
    return _end_read(slot, hold, ok, now, rules)


def _fenced(slot: Slot, kind: HoldKind, owner: Owner) -> Outcome:
    hold = slot.find(kind, owner)
    if hold is None:
        return slot, (ev.Ignore(slot.ref, "no_such_hold"),)
    if hold.doubt < Doubt.FENCING:
        # A fence that nobody asked for belongs to an older doubt, and proves nothing about now.
        return slot, (ev.Ignore(slot.ref, "fence_not_asked"),)
    return _lift_stopped(slot, (hold,))


def _unfenceable(slot: Slot, kind: HoldKind, owner: Owner, now: int, rules: Rules) -> Outcome:
    hold = slot.find(kind, owner)
    if hold is None:
        return slot, (ev.Ignore(slot.ref, "no_such_hold"),)
    if hold.doubt is not Doubt.FENCING:
        return slot, (ev.Ignore(slot.ref, "fence_not_asked"),)
    slot = swap(slot, hold, quarantined(hold, now, rules.timing))
    return slot, (ev.ReportQuarantine(slot.ref, kind, owner),)


def _executor_died(slot: Slot, executor: str) -> Outcome:
    stopped = tuple(
        hold for hold in slot.holds if hold.executor == executor and hold.phase is Phase.RUNNING
    )
    if not stopped:
        return slot, (ev.Ignore(slot.ref, "no_such_hold"),)
    return _lift_stopped(slot, stopped)


def _lift_stopped(slot: Slot, stopped: tuple[Hold, ...]) -> Outcome:
    """Lift holds whose parties can touch nothing any more, and that did not finish their work."""
    effects: list[ev.SlotEffect] = []
    for hold in stopped:
        slot = without(slot, hold)
        if hold.kind is HoldKind.SAVE:
            assert isinstance(hold.owner, str)
            effects.append(ev.SettleSave(slot.ref, hold.owner, False))
            slot = replace(slot, saved=Saved.FAILED)
        elif hold.kind is HoldKind.READ:
            assert isinstance(hold.owner, ReadId)
            effects.append(ev.FailRead(slot.ref, hold.owner, "reader_gone"))
        elif not slot.armed:
            slot = _poison(slot, effects)
    return settle(slot, effects)
