"""Why the node is not ready, and what needs an operator although it is.

*Not ready* keeps new work away. *Degraded* says that somebody should look: everything that makes
the node unready while it runs, and what does not hurt yet (a quarantined slot that has a spare,
huge pages that were preferred and not had). Starting and stopping are no fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from kvd.core.ids import MemberRef
from kvd.core.state import State
from kvd.core.units import format_size
from kvd.memory.region import RegionSnapshot
from kvd.server.invariants import Checked
from kvd.server.models import Reason
from kvd.server.node_view import KEEPS_DEVICE, SPARE_LEFT, NodeView, Phase
from kvd.server.survey import Survey

PREFERRED: Final = "prefer:"
"""How the reason of a region begins whose huge pages were preferred (see `kvd.memory`)."""

NOT_READY_CODES: Final = (
    "starting",
    "stopping",
    "failed",
    "invariants_failed",
    "wait_too_long",
    "no_spare",
)
"""Codes of reasons that keep new work away."""

DEGRADED_CODES: Final = (
    "failed",
    "invariants_failed",
    "wait_too_long",
    "no_spare",
    "slot_quarantined",
    "read_quarantined",
    "member_silent",
    "debug_engine",
    "huge_pages",
    "numa_node",
)
"""Codes of reasons why an operator should look."""


class Verdict:
    """What is wrong with the node; made once from a survey, then read."""

    def __init__(self, view: NodeView, survey: Survey, checked: Checked) -> None:
        troubles = list(_troubles(view, survey, checked))
        phase = view.phase()
        not_ready = [reason for reason, blocks in troubles if blocks]
        if phase.name != "ready":
            not_ready.insert(0, _phase_reason(phase))
        self.not_ready = not_ready
        self.degraded = [reason for reason, _ in troubles]

    @property
    def ready(self) -> bool:
        """Whether new work may come."""
        return not self.not_ready


def spares(
    stats: Mapping[str, Mapping[str, float]], members: Mapping[MemberRef, object]
) -> dict[str, float]:
    """For each engine that tells: the least number of spare buffers that a live member has."""
    left: dict[str, float] = {}
    for ref in members:
        told = stats.get(str(ref), {}).get(SPARE_LEFT)
        if told is not None:
            left[ref.engine] = min(told, left.get(ref.engine, told))
    return left


def _phase_reason(phase: Phase) -> Reason:
    if phase.name == "failed":
        what = f"kvd failed: {phase.detail}"
        return Reason(code="failed", what=what, remedy="See the log, then restart kvd.")
    if phase.name == "starting":
        what = f"kvd is starting: {phase.percent}% of its memory is populated."
        remedy = "Wait until /readyz answers 200."
        return Reason(code="starting", what=what, remedy=remedy)
    return Reason(
        code="stopping", what="kvd is stopping.", remedy="Attach again once it has restarted."
    )


def _troubles(view: NodeView, survey: Survey, checked: Checked) -> Iterator[tuple[Reason, bool]]:
    """Yield each trouble, and whether new work must be kept away because of it."""
    state = view.state()
    phase = view.phase()
    if phase.name == "failed":
        yield _phase_reason(phase), False  # the phase keeps work away already
    if not checked.ok:
        what = f"kvd's books contradict themselves: {checked.problems[0]}."
        remedy = "Report it with `kvctl status -o json`, then restart kvd."
        yield Reason(code="invariants_failed", what=what, remedy=remedy), True
    yield from _wait_trouble(view, survey)
    yield from _memory_troubles(view, state)
    yield from _quarantine_troubles(view, state, survey)
    silent = [
        str(ref) for ref, member in state.members.items() if member.silent and not member.leaving
    ]
    if silent:
        what = f"{_some(silent)} closed its socket, but its process lives and keeps its slots."
        remedy = "Stop the process if it hangs; its slots are free once it is gone."
        yield Reason(code="member_silent", what=what, remedy=remedy), False
    debugging = sorted({ref.engine for ref in state.members if _keeps_device(view, ref)})
    if debugging:
        what = f"{_some(debugging)} keeps all KV on its device as well, to compare rows with it."
        remedy = "Turn keep_device_kv_cache off and restart the engine; it is for debugging."
        yield Reason(code="debug_engine", what=what, remedy=remedy), False
    for region in view.regions():
        if lacks_huge_pages(region):
            what = f"Region {region.name} has no huge pages, which are preferred. {region.reason}"
            remedy = 'Reserve them and restart kvd, or set huge_pages = "off".'
            yield Reason(code="huge_pages", what=what, remedy=remedy), False
        if region.stray:
            what = (
                f"Region {region.name} is to be on NUMA node {region.node}, but "
                f"{format_size(region.stray)} of it are elsewhere."
            )
            remedy = "Drop the pool and restart kvd, so that its pages are made anew."
            yield Reason(code="numa_node", what=what, remedy=remedy), False


def _keeps_device(view: NodeView, ref: MemberRef) -> bool:
    return view.stats().get(str(ref), {}).get(KEEPS_DEVICE, 0) > 0


def lacks_huge_pages(region: RegionSnapshot) -> bool:
    """Whether huge pages were preferred for a region and none were had."""
    if not region.reason.startswith(PREFERRED) or region.page_kind == "hugetlb":
        return False
    return region.page_kind == "base" or (region.populated == region.got and region.huge == 0)


def _wait_trouble(view: NodeView, survey: Survey) -> Iterator[tuple[Reason, bool]]:
    wait = survey.oldest
    if wait is None:
        return
    age, limit = view.now() - wait.since, view.oldest_wait_limit()
    if age > limit:
        what = (
            f"{wait.what} {wait.key} has waited {age / 1e9:.1f} s for {wait.who}, "
            f"over the limit of {limit / 1e9:g} s (readiness.oldest_wait_max)."
        )
        remedy = f"See `kvctl story {wait.key}`."
        yield Reason(code="wait_too_long", what=what, remedy=remedy), True


def _quarantine_troubles(
    view: NodeView, state: State, survey: Survey
) -> Iterator[tuple[Reason, bool]]:
    count = survey.slots.quarantined
    if count:
        names = _some(survey.quarantined_slots, count)
        what = f"{names} may still be touched by a party that can be neither asked nor fenced."
        remedy = "See `kvctl slots --state quarantined`; restart the engine to get it back."
        yield Reason(code="slot_quarantined", what=what, remedy=remedy), False
    engines = {ref.engine for ref, slots in survey.members.items() if slots.quarantined}
    left = spares(view.stats(), state.members) if engines else {}
    for engine in sorted(engines):
        if left.get(engine, 1) <= 0:
            what = f"Engine {engine} has a quarantined slot and no spare buffer left."
            remedy = "Restart the engine, or give it more spare_buffers."
            yield Reason(code="no_spare", what=what, remedy=remedy), True
    if survey.quarantined_reads:
        what = f"{survey.quarantined_reads} reads of the pool can be neither asked nor fenced."
        remedy = "Their blocks stay kept; restart the reader, then this kvd."
        yield Reason(code="read_quarantined", what=what, remedy=remedy), False


def _memory_troubles(view: NodeView, state: State) -> Iterator[tuple[Reason, bool]]:
    """Memory that would end with kvd although it is not to, and blocks of the last life."""
    holding = view.holding()
    if holding.wanted != "none" and holding.owner == "none" and view.regions():
        what = f"Nobody keeps the memory while kvd is down: {holding.note or 'no owner'}."
        remedy = "See pool.owner; pool.owner = none says that this is meant."
        yield Reason(code="memory_not_kept", what=what, remedy=remedy), False
    if state.absent and state.inherited_blocks:
        names = sorted(str(ref) for ref in state.absent)
        what = (
            f"{_some(names)} of kvd's last life did not come back, and may still write into "
            f"{len(state.inherited_blocks)} blocks."
        )
        remedy = "Stop the process if it hangs; the blocks are free once it is gone."
        yield Reason(code="members_absent", what=what, remedy=remedy), False


def _some(names: list[str], count: int | None = None) -> str:
    """Name some of many."""
    shown, more = ", ".join(names[:5]), (count or len(names)) - len(names[:5])
    return f"{shown} and {more} more" if more > 0 else shown
