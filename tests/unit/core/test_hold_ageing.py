"""How doubt about one hold grows with time, to the nanosecond, and what restores trust."""

from __future__ import annotations

import pytest

from kvd.core.holds import (
    Ask,
    Doubt,
    Hold,
    HoldKind,
    Phase,
    Timing,
    age,
    doubt_further,
    granted,
    limit_of,
    offered,
    quarantined,
    running,
    still_running,
)
from kvd.core.ids import ReadId

TIMING = Timing(
    compute=600, save=200, offer=100, read=50, interval=10, query_attempts=2, read_attempts=2
)
READ = ReadId("t", 0, 0, 0)


def _aged(hold: Hold, *times: int) -> tuple[Hold, list[Ask | None]]:
    asks: list[Ask | None] = []
    for now in times:
        hold, ask = age(hold, now, TIMING)
        asks.append(ask)
    return hold, asks


def test_nothing_is_asked_before_the_deadline_and_nothing_changes() -> None:
    hold = running(HoldKind.SAVE, "s", "member", 1000, TIMING.save)
    assert age(hold, 1199, TIMING) == (hold, None)
    assert age(hold, 1000, TIMING)[0] is hold


def test_time_never_drops_a_running_hold() -> None:
    """R5: whatever the clock says, what comes back is a hold and a question, never a revocation."""
    for kind in HoldKind:
        hold = running(kind, "x", "member", 0, limit_of(kind, TIMING))
        for now in (10**3, 10**6, 10**9, 10**12, 10**15, 10**18):
            hold, ask = age(hold, now, TIMING)
            assert ask in (Ask.TRUTH, Ask.FENCE)
            assert hold.phase is Phase.RUNNING


def test_doubt_grows_step_by_step_and_every_question_is_repeated() -> None:
    hold = running(HoldKind.SAVE, "s", "member", 0, TIMING.save)
    hold, asks = _aged(hold, 199, 200, 209, 210, 220, 229, 230, 240)
    assert asks == [
        None,
        Ask.TRUTH,
        None,
        Ask.TRUTH,
        Ask.FENCE,
        None,
        Ask.FENCE,
        Ask.FENCE,
    ]
    assert hold.doubt is Doubt.FENCING
    assert hold.asked == 3


def test_late_tick_asks_once_and_counts_from_then() -> None:
    hold = running(HoldKind.SAVE, "s", "member", 0, TIMING.save)
    hold, asks = _aged(hold, 5000, 5009, 5010)
    assert asks == [Ask.TRUTH, None, Ask.TRUTH]


def test_quarantined_hold_is_fenced_more_slowly_and_stays() -> None:
    hold = running(HoldKind.READ, READ, "kvd#d", 0, TIMING.read)
    hold, _ = _aged(hold, 50, 60, 70)
    hold = quarantined(hold, 100, TIMING)
    hold, asks = _aged(hold, 199, 200, 299, 300)
    assert asks == [None, Ask.FENCE, None, Ask.FENCE]
    assert hold.doubt is Doubt.QUARANTINED


def test_unknown_leads_to_the_fence_at_once_and_never_back_from_quarantine() -> None:
    hold = running(HoldKind.SAVE, "s", "member", 0, TIMING.save)
    hold, _ = _aged(hold, 200)
    hold = doubt_further(hold, 205, TIMING)
    assert (hold.doubt, hold.ask_at) == (Doubt.FENCING, 215)
    hold = doubt_further(quarantined(hold, 300, TIMING), 310, TIMING)
    assert hold.doubt is Doubt.QUARANTINED


def test_word_that_it_runs_restores_trust_for_one_more_limit() -> None:
    hold = running(HoldKind.SAVE, "s", "member", 0, TIMING.save)
    hold, _ = _aged(hold, 200, 210, 220)
    hold = still_running(hold, 225, TIMING.save)
    assert (hold.doubt, hold.asked) == (Doubt.NONE, 0)
    assert _aged(hold, 424, 425)[1] == [None, Ask.TRUTH]


@pytest.mark.parametrize(
    ("now", "ask"),
    [(9, None), (10, Ask.OFFER), (99, Ask.OFFER), (100, Ask.REVOKE), (10**9, Ask.REVOKE)],
)
def test_offer_is_repeated_until_its_deadline_and_then_revoked(now: int, ask: Ask | None) -> None:
    assert age(offered(READ, 0, TIMING), now, TIMING)[1] is ask


def test_offer_never_comes_into_doubt() -> None:
    hold, asks = _aged(offered(READ, 0, TIMING), *range(10, 100, 10))
    assert asks == [Ask.OFFER] * 9
    assert (hold.doubt, hold.executor) == (Doubt.NONE, "")


def test_repeated_offers_do_not_move_the_deadline() -> None:
    hold, _ = _aged(offered(READ, 0, TIMING), 95)
    assert _aged(hold, 104, 105)[1] == [None, Ask.REVOKE]


def test_grant_counts_from_itself_and_names_the_reader() -> None:
    hold = granted(offered(READ, 0, TIMING), "kvd#d", 90, TIMING)
    assert (hold.owner, hold.executor, hold.phase) == (READ, "kvd#d", Phase.RUNNING)
    assert _aged(hold, 139, 140)[1] == [None, Ask.TRUTH]


def test_limits_are_those_of_the_kind() -> None:
    assert [limit_of(kind, TIMING) for kind in HoldKind] == [600, 200, 50]


def test_name_is_kind_and_owner() -> None:
    hold = running(HoldKind.SAVE, "engine", "member", 0, 1)
    assert hold.is_named(HoldKind.SAVE, "engine")
    assert not hold.is_named(HoldKind.COMPUTE, "engine")
    assert not hold.is_named(HoldKind.SAVE, "other")
