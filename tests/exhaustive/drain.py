"""Liveness: whatever state a slot is in, questions lost once must not keep it shut for ever."""

from __future__ import annotations

from collections import Counter

from kvd.core import slot_events as ev
from kvd.core.holds import HoldKind, Truth
from kvd.core.ids import Owner
from kvd.core.release import transition
from kvd.core.slot import Rules, Slot


def ticks_until_free(slot: Slot, rules: Rules, *, losses: int, ticks_max: int) -> int | None:
    """Let time pass until the slot is free; the first `losses` questions of each sort get lost.

    Every executor has forgotten what it was asked about, so a fence is needed for every hold.

    Returns: how many ticks it took, None when it was still held after `ticks_max`.
    """
    now = 10**18
    asked: Counter[tuple[str, HoldKind, Owner]] = Counter()
    for tick in range(ticks_max):
        if slot.is_free:
            return tick
        now += 100 * rules.timing.offer
        slot, effects = transition(slot, ev.Ticked(slot.ref), now, rules)
        todo = list(effects)
        while todo:
            answer = _answer(todo.pop(0), asked, losses)
            if answer is not None:
                slot, more = transition(slot, answer, now, rules)
                todo += more
    return None


def _answer(
    effect: ev.SlotEffect, asked: Counter[tuple[str, HoldKind, Owner]], losses: int
) -> ev.SlotEvent | None:
    if not isinstance(effect, ev.AskTruth | ev.AskFence):
        return None
    question = (type(effect).__name__, effect.kind, effect.owner)
    asked[question] += 1
    if asked[question] <= losses:
        return None
    if isinstance(effect, ev.AskTruth):
        return ev.Answered(effect.ref, effect.kind, effect.owner, Truth.UNKNOWN)
    return ev.Fenced(effect.ref, effect.kind, effect.owner)
