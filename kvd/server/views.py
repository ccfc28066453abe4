"""From the live node to the documents of the admin API: status and readiness.

Pure: nothing is changed but the ages that surveys remember, and nothing here waits; long loops
yield (`sliced.py`). What must add up (blocks by state) is read in one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

from kvd.core.blocks import BlockState
from kvd.core.evict import NO_FIGURES
from kvd.core.state import State
from kvd.core.story import Entry
from kvd.memory.region import RegionSnapshot
from kvd.server import story_text
from kvd.server.counter_names import REQUESTS, sort_counters
from kvd.server.engine_words import engine_words, sessions_of
from kvd.server.invariants import Checked, InvariantWatch
from kvd.server.models import (
    BlockCounts,
    EngineSummary,
    EvictionView,
    HitRate,
    HoldCount,
    InvariantsView,
    MemoryView,
    PeerView,
    PoolView,
    Readiness,
    RegionView,
    SlotCounts,
    Status,
    StoryView,
    TransferCounts,
    WaitView,
)
from kvd.server.node_view import SAVES_SHED, Holding, LinkInfo, NodeView
from kvd.server.readiness import Verdict, spares
from kvd.server.sliced import Work
from kvd.server.survey import Ages, MemberSlots, Survey, last_event, parties, survey
from kvd.server.views_hot import requests_of

ENGINES_MAX: Final = 64
"""Engines shown in the status; /v1/engines has all of them."""

_TIMES_NS: Final = 1e9
_COUNT_MAX: Final = 2.0**53


class Watch:
    """What is remembered between two looks at the node."""

    def __init__(self, invariants: InvariantWatch | None = None) -> None:
        self.ages = Ages()
        self.invariants = invariants or InvariantWatch()


def readiness(view: NodeView, watch: Watch) -> Work[Readiness]:
    """Whether the node should get new work, and why not."""
    found = yield from survey(view.state(), watch.ages)
    yield
    checked = watch.invariants.result(view.state())
    yield
    verdict = Verdict(view, found, checked)
    phase = view.phase()
    return Readiness(
        ready=verdict.ready,
        phase=phase.name,
        percent=phase.percent,
        detail=phase.detail,
        reasons=verdict.not_ready,
    )


def status(view: NodeView, watch: Watch, wall_now: float) -> Work[Status]:
    """The node at one look.

    Args: wall_now: seconds since 1970.
    """
    found = yield from survey(view.state(), watch.ages)
    wait = yield from _wait_view(view, found)
    yield
    checked = watch.invariants.result(view.state())
    yield
    verdict = Verdict(view, found, checked)
    yield
    phase = view.phase()
    state = view.state()
    regions = view.regions()
    counters = sort_counters(chain(state.counters.items(), view.shell_counters().items()))
    return Status(
        version=view.version,
        boot_id=view.boot_id,
        phase=phase.name,
        percent=phase.percent,
        detail=phase.detail,
        ready=verdict.ready,
        not_ready=verdict.not_ready,
        degraded=verdict.degraded,
        started_at=view.started_at,
        uptime_seconds=max(0.0, wall_now - view.started_at),
        memory=memory_view(regions, view.holding()),
        regions=[_region_view(region) for region in regions],
        pool=pool_view(state),
        eviction=eviction_view(state, view.stats()),
        hits=hit_rate(state.counters),
        slots=slot_counts(found.slots),
        holds=_hold_counts(found),
        oldest_wait=wait,
        engines=_engines(view, found),
        engines_total=len(state.engines),
        transfers=_transfers(state, found),
        peers=[_peer_view(link, view.now()) for link in view.links()],
        refused=_refused(counters.refused),
        ignored=dict(sorted(counters.ignored.items())),
        counters=dict(sorted(counters.rest.items())),
        story=StoryView(
            kept=len(state.story),
            limit=state.settings.limits.story_entries,
            dropped=state.story.dropped,
        ),
        process=dict(view.loop_figures()),
        invariants=_invariants_view(watch.invariants, checked),
    )


# Parts -------------------------------------------------------------------------------------------


def memory_view(regions: Sequence[RegionSnapshot], holding: Holding) -> MemoryView:
    """Who owns the memory; the provider is told from the first region, all have the same."""
    provider = regions[0].provider if regions else ""
    survives = holding.survives if regions else ()
    if not regions:
        note = "there is no memory yet"
    elif "stop" in survives:
        note = f"{provider}: survives engines, kvd, and its stop and start ({holding.owner})"
    elif "daemon" in survives:
        note = f"{provider}: survives engines and kvd ({holding.owner})"
    elif survives:
        note = f"{provider}: survives {'s, '.join(survives)}s, not kvd"
    else:
        note = f"{provider}: survives neither engines nor kvd"
    return MemoryView(
        provider=provider,
        owner=holding.owner,
        survives=list(survives),
        last_life=holding.note,
        note=note,
    )


def _region_view(region: RegionSnapshot) -> RegionView:
    return RegionView(
        name=region.name,
        provider=region.provider,
        survives=list(region.survives),
        asked_bytes=region.asked,
        got_bytes=region.got,
        populated_bytes=region.populated,
        page_kind=region.page_kind,
        page_bytes=region.page_size,
        huge_bytes=region.huge,
        reason=region.reason,
        node=region.node,
        node_bytes={str(node): count for node, count in region.nodes},
        stray_bytes=region.stray,
        locked=region.locked,
    )


def pool_view(state: State) -> PoolView:
    """The pool; everything in it is derived from the block table in this one step."""
    configured = state.settings.pool_bytes
    pool = state.pool
    if pool is None:
        none = BlockCounts(total=0, free=0, filling=0, ready=0, poisoned=0)
        return PoolView(
            formatted=False,
            configured_bytes=configured,
            unused_bytes=configured,
            block_bytes=0,
            block_tokens=0,
            layers=0,
            shards=0,
            blocks=none,
            bytes=none,
            pinned_blocks=0,
            evictable_blocks=0,
            tokens_fit=0,
            checksums=state.settings.checksums,
        )
    table = pool.blocks
    shape = table.shape
    return PoolView(
        formatted=True,
        configured_bytes=configured,
        unused_bytes=max(0, configured - table.total * pool.stride),
        block_bytes=pool.stride,
        block_tokens=shape.block_tokens,
        layers=shape.num_layers,
        shards=shape.num_shards,
        blocks=_block_counts(table.counts, 1),
        bytes=_block_counts(table.counts, pool.stride),
        pinned_blocks=len(table.pins),
        evictable_blocks=len(table.policy),
        tokens_fit=table.total * shape.block_tokens,
        checksums=state.settings.checksums,
    )


def eviction_view(state: State, stats: Mapping[str, Mapping[str, float]]) -> EvictionView:
    """What makes room; `stats` are figures that engines pushed, by member."""
    settings, pool = state.settings, state.pool
    shed = (told.get(SAVES_SHED, 0) for told in stats.values())
    seen = pool.blocks.policy.figures() if pool is not None else NO_FIGURES
    return EvictionView(
        policy=settings.eviction,
        high_water=settings.high_water,
        low_water=settings.low_water,
        admitted=seen.admitted,
        found=seen.found,
        evicted=seen.evicted,
        evicted_ahead=state.counters.get("blocks_evicted_ahead", 0),
        ghost_hits=seen.ghost_hits,
        new_blocks=seen.new,
        used_blocks=seen.used,
        new_room=seen.new_room,
        # An engine may say anything, and what is not a number cannot be counted.
        saves_shed=sum(int(count) for count in shed if 0 <= count < _COUNT_MAX),
    )


def _block_counts(counts: Sequence[int], unit: int) -> BlockCounts:
    return BlockCounts(
        total=sum(counts) * unit,
        free=counts[BlockState.RESET] * unit,
        filling=counts[BlockState.FILLING] * unit,
        ready=counts[BlockState.READY] * unit,
        poisoned=counts[BlockState.POISONED] * unit,
    )


def hit_rate(counters: Mapping[str, int]) -> HitRate:
    """Prefix hits with their denominator."""
    asked = counters.get("lookup_blocks_asked", 0)
    hit = counters.get("lookup_blocks_hit", 0)
    return HitRate(blocks_asked=asked, blocks_hit=hit, rate=hit / asked if asked else None)


def slot_counts(counts: MemberSlots) -> SlotCounts:
    """Slots by state."""
    return SlotCounts(
        total=counts.total,
        free=counts.free,
        held=counts.held,
        suspect=counts.suspect,
        quarantined=counts.quarantined,
    )


def _hold_counts(found: Survey) -> list[HoldCount]:
    return [
        HoldCount(kind=kind, doubt=doubt, count=count)
        for (kind, doubt), count in sorted(found.holds.items())
    ]


def _wait_view(view: NodeView, found: Survey) -> Work[WaitView | None]:
    wait = found.oldest
    if wait is None:
        return None
    last = yield from last_event(view.state(), wait)
    now = view.now()
    return WaitView(
        what=wait.what,
        name=str(wait.key),
        who=wait.who,
        age_seconds=max(0, now - wait.since) / _TIMES_NS,
        limit_seconds=view.oldest_wait_limit() / _TIMES_NS,
        last_event=_transition(last) if last is not None else "",
        last_event_age_seconds=max(0, now - last.at) / _TIMES_NS if last is not None else None,
        waits_for=parties(view.state(), wait),
    )


def _transition(entry: Entry) -> str:
    followed = story_text.outcome(entry.outcome)
    name = story_text.event_name(entry.event)
    return f"{name} -> {followed}" if followed else name


def _engines(view: NodeView, found: Survey) -> list[EngineSummary]:
    state = view.state()
    left = spares(view.stats(), state.members)
    sessions = sessions_of(view)
    counts: dict[str, MemberSlots] = {}
    for ref, slots in found.members.items():
        counts.setdefault(ref.engine, MemberSlots()).add(slots)
    shown = [state.engines[name] for name in sorted(state.engines)[:ENGINES_MAX]]
    return [
        EngineSummary(
            engine=engine.name,
            members=len(engine.members),
            silent_members=sum(m.silent for m in engine.members.values()),
            requests=len(engine.requests),
            slots=slot_counts(counts.get(engine.name, MemberSlots())),
            spare_left=left.get(engine.name),
            hot_requests=requests_of(view, engine),
            **engine_words(engine, sessions)._asdict(),
        )
        for engine in shown
    ]


def _transfers(state: State, found: Survey) -> TransferCounts:
    return TransferCounts(
        outgoing_open=found.outgoing_open,
        outgoing_failed=found.outgoing_failed,
        reads_open=found.reads_open,
        incoming_open=found.incoming_open,
        incoming_failed=found.incoming_failed,
        copies_running=found.copies_running,
        waiters=len(state.waiters),
        failed_since_start=state.counters.get("transfers_failed", 0),
    )


def _peer_view(link: LinkInfo, now: int) -> PeerView:
    heard = link.last_heard_ns
    return PeerView(
        address=link.address,
        role=link.role,
        boot_id=link.boot_id,
        state=link.state,
        silent_seconds=max(0, now - heard) / _TIMES_NS if heard else None,
        error=link.error,
    )


def _refused(refused: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Refusals by code; those before the core saw the request as `frames.<code>` and the like."""
    named = {
        code if what == REQUESTS else f"{what}.{code}": count
        for (what, code), count in refused.items()
    }
    return dict(sorted(named.items()))


def _invariants_view(watch: InvariantWatch, checked: Checked) -> InvariantsView:
    return InvariantsView(
        ok=checked.ok,
        scope=checked.scope,
        problems=list(checked.problems),
        took_ms=checked.took_ns / 1e6,
        age_seconds=watch.age_ns(checked) / _TIMES_NS,
    )
