"""Figures of hot buffers: by group and by request, and times of some steps."""

from __future__ import annotations

import pytest

from engine_shim.device import DeviceCode, DeviceError
from engine_shim.hot_meter import SAMPLED_EVERY, SAMPLED_STEP, CopyTimer, GroupMeter
from engine_shim.hot_residency import total
from engine_shim.testing import Delay, Rule
from tests.unit.engine_shim.hot_rig import MS, HotRig

STEPS = SAMPLED_STEP + 1
TOKENS = 12


def steps(rig: HotRig, handle: object, count: int) -> None:
    """Steps of one token through the first group, which select old rows."""
    for at in range(count):
        position = TOKENS + at
        rig.begin(handle, 0, position)  # type: ignore[arg-type]
        plan = rig.hot.select(handle, 0, [[at % 6, 7, 7], [7, -1]])  # type: ignore[arg-type]
        for layer in (0, 1):
            rig.hot.ready(handle, layer, plan)  # type: ignore[arg-type]
            if layer:
                rows = rig.rows("a", layer, position, 1)
                rig.hot.append(handle, layer, position, rows)  # type: ignore[arg-type]


def test_times_are_taken_in_one_step_of_many() -> None:
    meter = GroupMeter()
    timed = []
    for step in range(3 * SAMPLED_EVERY):
        meter.begin()
        if meter.copy_timer() is not None:
            timed.append(step)
        with meter.managing(), meter.waiting():
            pass
    assert timed == [SAMPLED_STEP + at * SAMPLED_EVERY for at in range(3)]
    figures = meter.figures(total(()))
    assert (figures.steps, figures.sampled) == (3 * SAMPLED_EVERY, 3)
    assert figures.managed_ns > 0
    assert figures.waited_ns > 0


def test_a_copy_that_fails_has_no_time() -> None:
    meter = GroupMeter()
    timer = CopyTimer(meter)
    timer.behind(None)
    timer.before(None)
    timer.behind(DeviceError(DeviceCode.CANCELLED, "closed"))
    assert meter.copied_ns == 0
    timer.behind(None)
    assert meter.copied_ns > 0


def test_groups_add_up_and_requests_keep_what_they_had() -> None:
    rig = HotRig()
    handle = rig.open("a")
    steps(rig, handle, 3)
    before = rig.hot.rows_of(handle)
    assert before[0].merged > 0
    assert before[1] == total(())
    rig.hot.preempt(handle)
    assert rig.hot.rows_of(handle) == before
    rig.hot.resume(handle)
    figures = rig.hot.statistics()
    assert figures.rows == total(group.rows for group in figures.groups) == before[0]
    rig.hot.close(handle)
    assert rig.hot.statistics().groups[0].rows == before[0]
    with pytest.raises(ValueError, match="closed"):
        rig.hot.rows_of(handle)
    rig.close()


def test_waiting_for_late_loads_is_no_overlap() -> None:
    rig = HotRig((Rule(Delay(5 * MS), stream="hot", kind="copy"),), slots=6)
    handle = rig.open("a")
    steps(rig, handle, STEPS)
    named = rig.hot.statistics().named()
    assert named["hot_0_overlap"] < 0.9
    assert named["hot_overlap"] == named["hot_0_overlap"]
    assert named["hot_1_overlap"] == 1.0, "nothing was copied"
    assert named["hot_0_managed_us"] > 0
    assert named["hot_merged"] == named["hot_0_merged"] > 0
    assert len(named) <= 64, "kvd takes no more of a member"
    rig.close()


def test_what_one_request_waits_is_not_held_against_the_copies_of_another() -> None:
    """Requests take turns in each layer; both are sampled in the same step, or neither is."""
    rig = HotRig((Rule(Delay(5 * MS), stream="hot", kind="copy"),), slots=6)
    handles = [rig.open("a"), rig.open("b", first=5)]
    for at in range(STEPS):
        position = TOKENS + at
        plans = []
        for handle in handles:
            rig.begin(handle, 0, position)
            # The second one selects what it wrote last: nothing is copied for it.
            chosen = [[at % 6, 7]] if handle is handles[0] else [[position - 1, position]]
            plans.append(rig.hot.select(handle, 0, chosen))
        for layer in (0, 1):
            for handle, plan in zip(handles, plans, strict=True):
                rig.hot.ready(handle, layer, plan)
                if layer:
                    rig.append(handle, layer, position)
    first, second = (rig.hot.figures_of(handle)[0] for handle in handles)
    assert (first.steps, first.sampled) == (second.steps, second.sampled) == (STEPS, 1)
    assert first.overlap < 0.9
    assert (second.copied_ns, second.overlap) == (0, 1.0)
    whole = rig.hot.statistics().groups[0]
    assert whole.waited_ns == first.waited_ns + second.waited_ns
    assert whole.rows == first.rows + second.rows
    for handle in handles:
        rig.hot.close(handle)
    assert rig.hot.statistics().groups[0] == whole
    rig.close()


def test_a_buffer_s_next_request_finds_and_counts_nothing_of_the_last_one() -> None:
    rig = HotRig()
    for number in range(6):
        handle = rig.hot.open("a", list(range(5)))
        buffer = rig.hot.buffer_of(handle)
        assert rig.hot.rows_of(handle)[0] == total(())
        assert all(rig.hot.slot_of(handle, 0, at) == -1 for at in range(TOKENS + 2)), number
        for layer in range(3):
            rig.hot.land(handle, layer, 0, rig.rows("a", layer, 0, TOKENS))
        steps(rig, handle, 2)
        first = rig.hot.rows_of(handle)[0]
        rig.hot.close(handle)
        assert buffer == 0
        assert rig.hot.statistics().groups[0].rows.misses == (number + 1) * first.misses
    rig.close()
