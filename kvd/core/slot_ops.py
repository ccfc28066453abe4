"""Slots inside the machine: the release rule's effects become effects on blocks, gates, peers.

The release rule (`release.py`) knows one slot and only names. Here both ends of every copy are
kept together (R11): the span of a save is opened when its hold is armed and closed when it is
lifted; a load, or its step, pins its blocks until it has ended; a redirect pins the span in the
very transition that lifts the hold.
"""

from __future__ import annotations

from kvd.core import arming, copies, outgoing, steps, uses
from kvd.core import events as ev
from kvd.core import results as res
from kvd.core import slot_events as se
from kvd.core.effects import (
    AskMember,
    Effect,
    FenceMember,
    Reply,
    SendQuery,
    SendRevoke,
    StoreGate,
)
from kvd.core.errors import KvdError, LocalError
from kvd.core.holds import HoldKind, Truth
from kvd.core.ids import ReadId, SlotRef, executor_at
from kvd.core.pool_ops import flush
from kvd.core.release import transition
from kvd.core.slot import Slot
from kvd.core.state import Member, State, Tenancy
from kvd.core.use_events import DID_MAX, Used, parts


def slots_changed(m: State, e: ev.SlotsChanged, now: int, out: list[Effect]) -> None:
    """Apply a member's own slot events, each exactly once and in its order.

    What was seen before is not done again, but answered as it was then: a member that starts its
    copies on the answer must not take a refusal for a yes because the first answer was lost. It
    has at most `batch_items` events that are not acknowledged.

    Raises: LocalError(stale_incarnation | out_of_order | limit_reached).
    """
    member = m.member(e.ref)
    remembered = m.settings.limits.batch_items
    m.settings.limits.check("items in a batch", len(e.items), "batch_items")
    first = member.next_no
    if not first - remembered <= e.first_no <= first:
        raise LocalError("out_of_order", got=e.first_no, want=first)
    if first > e.first_no:
        m.count("events_repeated")
    for item in e.items[first - e.first_no :]:
        if isinstance(item, Used):
            code = apply_used(m, member, item, now, out)
        elif isinstance(item, se.StepOpened | se.StepClosed):
            code = _apply_step(m, member, item, now)
        else:
            code = apply_own(m, member, item, now, out)
        if code:
            member.codes[member.next_no] = code
        member.next_no += 1
    flush(m, out)
    codes: tuple[str, ...] = ()
    if member.codes:
        for number in [n for n in member.codes if n < member.next_no - remembered]:
            del member.codes[number]
        numbers = range(e.first_no, e.first_no + len(e.items))
        codes = tuple(member.codes.get(number, "") for number in numbers)
    out.append(Reply(e.reply, res.SlotsSeen(member.next_no, codes if any(codes) else ())))


def apply_used(m: State, member: Member, event: Used, now: int, out: list[Effect]) -> str:
    """Several events of one tenancy. Returns '' or why one changed nothing."""
    if uses.at_once(m, member, event, now, out):
        return ""
    if not 0 < event.did <= DID_MAX:
        m.count("refused_frame_malformed")
        m.story.record(now, (event.ref,), event, "frame_malformed")
        steps.refused(m, member, se.Written(event.ref, event.layer, step=event.saves), now)
        return "frame_malformed"
    codes = [apply_own(m, member, part, now, out) for part in parts(event)]
    return next(filter(None, codes), "")


def apply_own(m: State, member: Member, event: se.SlotEvent, now: int, out: list[Effect]) -> str:
    """One event of the slot's owner. Returns '' or why nothing was changed."""
    try:
        event = steps.resolve(member, event)
        slot = _slot(member, event.ref)
        if slot.ref == event.ref:
            if type(event) is se.SaveEnded:
                if event.tokens or event.sums:
                    copies.check_counts(member, event)
            elif type(event) is se.Computed:
                copies.check_loads_ended(member, event)
            elif type(event) is se.Written:
                copies.check_written(m, member, slot, event)
            elif type(event) is se.Acquired:
                copies.check_loads(m, member, event)
    except KvdError as error:
        m.count(f"refused_{error.code}")
        m.story.record(now, (event.ref,), event, error.code)
        steps.refused(m, member, event, now)
        return error.code
    if type(event) is se.Written:
        event = arming.without_failed(m, event)
        why = apply(m, member, event, now, out)
        if why and why != "already_armed":
            steps.refused(m, member, event, now)
        return why
    if type(event) is se.LoadEnded:
        if event.bad:
            copies.report_bad_sums(m, member, event, now)
        copies.end_load_at(m, member, event.ref)
        if event.ok:
            return ""
        event = se.Poisoned(event.ref)
    return apply(m, member, event, now, out)


def _apply_step(m: State, member: Member, event: se.StepOpened | se.StepClosed, now: int) -> str:
    """Returns '' or why nothing was changed."""
    code = ""
    try:
        steps.apply(m, member, event)
    except KvdError as error:
        code = error.code
        m.count(f"refused_{code}")
    m.story.record(now, (member.ref,), event, code)
    return code


def member_answered(m: State, e: ev.MemberAnswered, now: int, out: list[Effect]) -> None:
    """A member's truth about its own computing or saving."""
    if e.ref != e.slot.member or e.kind is HoldKind.READ:
        m.count("ignored_other_member")
        return
    ended = e.truth not in (Truth.RUNNING, Truth.UNKNOWN)
    if e.kind is HoldKind.COMPUTE and ended and copies.is_loading(m, e.slot):
        # `computed` follows the end of every load, and so does an answer that says the same.
        m.count("ignored_load_open")
        return
    feed(m, se.Answered(e.slot, e.kind, e.owner, e.truth), now, out)
    flush(m, out)


def fence_ended(m: State, e: ev.FenceEnded, now: int, out: list[Effect]) -> None:
    """A fence worked, or cannot be had."""
    if isinstance(e.owner, ReadId):
        pool = outgoing.pool_fenced if e.stopped else outgoing.pool_unfenceable
        if pool(m, e.ref, e.owner, now, out):
            flush(m, out)
            return
    event = se.Fenced if e.stopped else se.Unfenceable
    feed(m, event(e.ref, e.kind, e.owner), now, out)
    flush(m, out)


def claim_came(m: State, e: ev.ClaimCame, now: int, out: list[Effect]) -> None:
    """A reader asks for its grant: from the pool if it was redirected, else from the slot."""
    event = se.ReadClaimed(e.ref, e.read, e.executor, e.claim)
    if outgoing.pool_claimed(m, event, now, out):
        return
    why = feed(m, event, now, out)
    if why and why != "in_doubt":
        out.append(SendRevoke(e.executor, e.read, "gone"))


def decline_came(m: State, e: ev.DeclineCame, now: int, out: list[Effect]) -> None:
    """A reader will never claim: its hold goes now and not at the offer's deadline."""
    outgoing.decline(m, e.ref, e.read, now, out)
    flush(m, out)


def end_came(m: State, e: ev.EndCame, now: int, out: list[Effect]) -> None:
    """A granted read ended."""
    if e.bad:
        outgoing.report_bad_sums(m, e, now)
    event = se.ReadEnded(e.ref, e.read, e.executor, e.ok)
    if not outgoing.pool_ended(m, event, now, out):
        feed(m, event, now, out)
    flush(m, out)


def read_answered(m: State, e: ev.ReadAnswered, now: int, out: list[Effect]) -> None:
    """The truth about a read, from its executor and from nobody else."""
    names = (e.executor, executor_at(e.address))
    if not outgoing.pool_answered(m, e, names, now, out):
        member = m.members.get(e.ref.member)
        slot = _slot_or_none(member, e.ref)
        hold = slot.find(HoldKind.READ, e.read) if slot is not None else None
        if hold is None or hold.executor not in names:
            m.count("ignored_other_reader")
            return
        if e.fence and e.truth is Truth.UNKNOWN:
            feed(m, se.Fenced(e.ref, HoldKind.READ, e.read), now, out)
        else:
            feed(m, se.Answered(e.ref, HoldKind.READ, e.read, e.truth), now, out)
    flush(m, out)


def _slot_or_none(member: Member | None, ref: SlotRef) -> Slot | None:
    if member is None or not 0 <= ref.slot < len(member.slots):
        return None
    slot = member.slots[ref.slot]
    return slot if slot.ref == ref else None


def feed(m: State, event: se.SlotEvent, now: int, out: list[Effect]) -> str:
    """Apply one event to the slot that it names. Returns '' or why it was ignored."""
    member = m.members.get(event.ref.member)
    if member is None or not 0 <= event.ref.slot < len(member.slots):
        m.count("ignored_unknown_slot")
        return "unknown_slot"
    return apply(m, member, event, now, out)


def apply(m: State, member: Member, event: se.SlotEvent, now: int, out: list[Effect]) -> str:
    """Run the release rule and carry out what it says. Returns '' or why it was ignored."""
    ref = event.ref
    before = member.slots[ref.slot]
    after, effects = transition(before, event, now, m.rules)
    if after is before:
        if not effects:
            return ""
        tenancy = member.held.get(ref.slot)
    else:
        tenancy = _exchange(m, member, before, after, event)
    m.story.record(now, (ref,), event, effects or after.holds)
    why = ""
    for effect in effects:
        if type(effect) is se.Release:
            _released(m, member, effect.ref, out)
        elif type(effect) is se.Ignore:
            m.count(f"ignored_{effect.why}")
            why = effect.why
        elif type(effect) is se.SettleSave:
            copies.settle_save(m, effect, event, out)
        else:
            _perform(m, member, tenancy, effect, now, out)
    return why


def _exchange(
    m: State, member: Member, before: Slot, after: Slot, event: se.SlotEvent
) -> Tenancy | None:
    """Put the changed slot in its place. Returns its tenancy, also the one that just ended."""
    index = before.ref.slot
    member.slots[index] = after
    if not after.holds:
        tenancy = member.held.pop(index, None)
        # A load can be open still when its process died: the fence came before the death.
        if tenancy is not None and tenancy.load_blocks:
            copies.end_load(m, tenancy, before.ref)
        return tenancy
    tenancy = member.held.get(index)
    if tenancy is None:
        tenancy = member.held[index] = Tenancy()
    if type(event) is se.Written:
        if after.armed and not before.armed:
            copies.arm(m, member, tenancy, event)
    elif type(event) is se.Acquired:
        copies.begin_loads(m, member, tenancy, event)
    return tenancy


def _perform(
    m: State,
    member: Member,
    tenancy: Tenancy | None,
    effect: se.SlotEffect,
    now: int,
    out: list[Effect],
) -> None:
    match effect:
        case se.OfferRead(ref, read):
            outgoing.offer(m, read, now, out)
        case se.GrantRead(_, read, executor, claim):
            outgoing.grant(m, read, executor, claim, out)
        case se.RedirectRead(ref, read):
            outgoing.redirect(m, read, now, out)
        case se.FinishRead(_, read):
            outgoing.finished(m, read, out)
        case se.FailRead(_, read, why):
            outgoing.failed(m, read, why, now, out)
        case se.PoisonTenancy():
            copies.poison_targets(m, tenancy, now, effect)
        case se.AskTruth(ref, kind, owner, executor):
            if kind is HoldKind.READ:
                assert isinstance(owner, ReadId)
                out.append(SendQuery(executor, ref, owner, False))
            else:
                out.append(AskMember(member.ref, ref, kind, owner))
        case se.AskFence(ref, kind, owner, executor):
            m.count("fences_asked")
            if kind is HoldKind.READ:
                assert isinstance(owner, ReadId)
                out.append(SendQuery(executor, ref, owner, True))
            else:
                out.append(FenceMember(member.ref, ref, kind, owner))
        case se.ReportQuarantine(ref, kind, owner):
            copies.quarantine(m, member, tenancy, effect, now, out)
        case _:
            raise AssertionError(effect)


def _released(m: State, member: Member, ref: SlotRef, out: list[Effect]) -> None:
    m.counters["releases"] += 1
    if not member.leaving:
        out.append(StoreGate(member.ref, ref.slot, ref.epoch + 1, copies.GATE_FREE))


def _slot(member: Member, ref: SlotRef) -> Slot:
    if ref.member != member.ref:
        raise LocalError("stale_incarnation", member=ref.member)
    if not 0 <= ref.slot < len(member.slots):
        raise LocalError("slot_unknown", slot=ref.slot, count=len(member.slots), member=member.ref)
    return member.slots[ref.slot]
