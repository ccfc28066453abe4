"""Slots as members announce them to a kvd that does not know them (re-attach)."""

from __future__ import annotations

from kvd.core import slot_events as ev
from kvd.core.holds import Doubt, HoldKind, Timing, Truth
from kvd.core.ids import MemberRef, ReadId, SlotRef
from kvd.core.release import transition
from kvd.core.slot import Rules, Saved, Slot, announced

REF = SlotRef(MemberRef("p", "w0", 1), 2, 40)
READ = ReadId("t", 3, 0, 0)
RULES = Rules(Timing(query_attempts=2, read_attempts=2), max_readers=4)
NOW = 10**9


def test_nothing_held_is_a_free_slot_at_the_announced_epoch() -> None:
    assert announced(REF, False, (), (), NOW, RULES) == Slot(REF)


def test_computing_slot_may_still_be_armed() -> None:
    slot = announced(REF, True, (), (), NOW, RULES)
    written = ev.Written(REF, 3, (ev.SaveSpec("s", (0,), (4,)),), ())
    slot, effects = transition(slot, written, NOW, RULES)
    assert effects == ()
    assert slot.find(HoldKind.SAVE, "s") is not None


def test_armed_slot_is_not_armed_twice() -> None:
    slot = announced(REF, True, ("s",), (), NOW, RULES)
    written = ev.Written(REF, 3, (ev.SaveSpec("s", (0,), (4,)),), ())
    after, effects = transition(slot, written, NOW, RULES)
    assert after == slot
    assert effects == (ev.Ignore(REF, "already_armed"),)


def test_reads_are_suspect_at_once_and_asked_for_at_the_next_tick() -> None:
    slot = announced(REF, False, (), ((READ, "kvd#d"),), NOW, RULES)
    hold = slot.find(HoldKind.READ, READ)
    assert hold is not None
    assert hold.doubt is Doubt.SUSPECT
    slot, effects = transition(slot, ev.Ticked(REF), NOW, RULES)
    assert effects == (ev.AskTruth(REF, HoldKind.READ, READ, "kvd#d"),)


def test_no_grant_before_the_reader_said_what_it_knows() -> None:
    slot = announced(REF, False, (), ((READ, "kvd#d"),), NOW, RULES)
    after, effects = transition(slot, ev.ReadClaimed(REF, READ, "kvd#d", 1), NOW, RULES)
    assert after == slot
    assert effects == (ev.Ignore(REF, "in_doubt"),)


def test_read_that_never_started_is_offered_anew() -> None:
    slot = announced(REF, False, ("s",), ((READ, "kvd#d"),), NOW, RULES)
    answer = ev.Answered(REF, HoldKind.READ, READ, Truth.NEVER_STARTED)
    slot, effects = transition(slot, answer, NOW, RULES)
    assert effects == (ev.OfferRead(REF, READ.next_attempt()),)


def test_save_that_runs_on_may_still_redirect() -> None:
    slot = announced(REF, False, ("s",), ((READ, "kvd#d"),), NOW, RULES)
    assert slot.saved is Saved.OPEN
    answer = ev.Answered(REF, HoldKind.READ, READ, Truth.NEVER_STARTED)
    slot, _ = transition(slot, answer, NOW, RULES)
    slot, effects = transition(slot, ev.SaveEnded(REF, "s", True), NOW, RULES)
    again = READ.next_attempt()
    assert effects == (
        ev.SettleSave(REF, "s", True),
        ev.RedirectRead(REF, again),
        ev.Release(REF),
    )
    assert slot == Slot(REF._replace(epoch=41))
