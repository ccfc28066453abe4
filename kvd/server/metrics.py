"""Figures for Prometheus: gathered from the node at the scrape, never kept between two.

Gauges are read from the books themselves, so that they cannot drift from them, go below zero or
outlive what they describe. The client library is used for the text format alone: a collector on a
registry of its own, one metric at a time, so that a large scrape can be done in slices.

    python -m kvd.server.metrics --docs > docs/metrics.md
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvd.core.holds import Doubt, HoldKind
from kvd.core.state import State
from kvd.server.counter_names import sort_counters
from kvd.server.metric_table import COUNTERS, READS_FAILED, SECTIONS, SPECS, MetricSpec
from kvd.server.models import BlockCounts
from kvd.server.node_view import NodeView
from kvd.server.readiness import DEGRADED_CODES, NOT_READY_CODES, Verdict
from kvd.server.sliced import Work, run_now
from kvd.server.survey import MemberSlots, Survey, survey
from kvd.server.views import Watch, eviction_view, pool_view
from kvd.server.views_hot import seconds, share
from kvd.server.views_steps import NO_STEPS, step_counts
from kvd.server.views_tables import STATS_MAX

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

STATS_TOTAL_MAX: Final = 1024
"""Figures of engines in one scrape."""

HOT_LAYERS_MAX: Final = 512
"""Indexer layers of engines in one scrape."""

_PHASES: Final = ("starting", "ready", "stopping", "failed")
_HOLD_KINDS: Final = (*(kind.value for kind in HoldKind), "pool_read")


class Samples:
    """What a scrape found: for each metric its label values and figure."""

    def __init__(self) -> None:
        self.found: dict[str, dict[tuple[str, ...], float]] = {spec.name: {} for spec in SPECS}

    def put(self, name: str, value: float, *labels: str) -> None:
        """Set one figure; a name that is not in the table is a bug and raises KeyError."""
        self.found[f"kvd_{name}"][labels] = value

    def add(self, full_name: str, value: float, labels: tuple[str, ...]) -> None:
        """Add to one figure."""
        metric = self.found[full_name]
        metric[labels] = metric.get(labels, 0.0) + value


def gather(view: NodeView, watch: Watch) -> Work[Samples]:
    """Look at the node once."""
    found = yield from survey(view.state(), watch.ages)
    yield
    samples = Samples()
    _node(view, found, watch, samples)
    yield
    _memory(view, samples)
    _pool(view.state(), samples)
    _eviction(view, samples)
    yield
    _slots(view, found, samples)
    _engines(view, samples)
    yield
    _stats(view, samples)
    _hot_layers(view, samples)
    yield
    _transfers(view, found, samples)
    _counters(view, samples)
    return samples


def expose(samples: Samples) -> Work[bytes]:
    """Write what was gathered in the text format."""
    parts: list[bytes] = []
    for spec in SPECS:
        parts.append(generate_latest(_registry(spec, samples.found[spec.name])))
        yield
    return b"".join(parts)


def scrape(view: NodeView, watch: Watch) -> bytes:
    """Do both at once, without a pause."""
    return run_now(expose(run_now(gather(view, watch))))


class _OneMetric(Collector):
    """A collector that has one metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        yield self._metric


def _registry(spec: MetricSpec, figures: dict[tuple[str, ...], float]) -> CollectorRegistry:
    family = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    metric = family(spec.name.removesuffix("_total"), spec.help, labels=spec.labels)
    for labels, value in figures.items():
        metric.add_metric(labels, value)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_OneMetric(metric))
    return registry


# What is looked at -------------------------------------------------------------------------------


def _node(view: NodeView, found: Survey, watch: Watch, samples: Samples) -> None:
    checked = watch.invariants.result(view.state())
    verdict = Verdict(view, found, checked)
    phase = view.phase()
    samples.put("info", 1, view.version, view.boot_id)
    samples.put("start_time_seconds", view.started_at)
    for name in _PHASES:
        samples.put("phase", name == phase.name, name)
    samples.put("populated_percent", phase.percent)
    samples.put("ready", verdict.ready)
    not_ready = {reason.code for reason in verdict.not_ready}
    for code in NOT_READY_CODES:
        samples.put("not_ready", code in not_ready, code)
    degraded = {reason.code for reason in verdict.degraded}
    for code in DEGRADED_CODES:
        samples.put("degraded", code in degraded, code)
    samples.put("invariants_ok", checked.ok)
    samples.put("invariants_check_seconds", checked.took_ns / 1e9)
    figures = dict(view.loop_figures())
    samples.put("rss_bytes", max(0.0, figures.pop("rss_bytes", 0.0)))
    for name, value in figures.items():
        samples.put("process_figure", max(0.0, value), name)


def _memory(view: NodeView, samples: Samples) -> None:
    for region in view.regions():
        samples.put("region_asked_bytes", region.asked, region.name)
        samples.put("region_bytes", region.got, region.name)
        samples.put("region_populated_bytes", region.populated, region.name)
        samples.put("region_huge_bytes", region.huge, region.name)
        samples.put("region_page_bytes", region.page_size, region.name)
        for node, count in region.nodes:
            samples.put("region_node_bytes", count, region.name, str(node))
        samples.put("region_stray_bytes", region.stray, region.name)


def _pool(state: State, samples: Samples) -> None:
    pool = pool_view(state)
    samples.put("pool_configured_bytes", pool.configured_bytes)
    samples.put("pool_unused_bytes", pool.unused_bytes)
    samples.put("pool_capacity_blocks", pool.blocks.total)
    samples.put("pool_capacity_tokens", pool.tokens_fit)
    samples.put("pool_block_bytes", pool.block_bytes)
    samples.put("pool_block_tokens", pool.block_tokens)
    _by_state("pool_blocks", pool.blocks, samples)
    _by_state("pool_bytes", pool.bytes, samples)
    samples.put("pool_pinned_blocks", pool.pinned_blocks)
    samples.put("pool_evictable_blocks", pool.evictable_blocks)
    samples.put("story_entries", len(state.story))
    samples.put("story_dropped_total", state.story.dropped)


def _eviction(view: NodeView, samples: Samples) -> None:
    seen = eviction_view(view.state(), view.stats())
    samples.put("pool_new_blocks", seen.new_blocks)
    samples.put("pool_used_blocks", seen.used_blocks)
    samples.put("pool_new_room_blocks", seen.new_room)
    samples.put("pool_high_water", seen.high_water)
    samples.put("pool_low_water", seen.low_water)
    samples.put("saves_shed_blocks", seen.saves_shed)
    samples.put("ghost_hits_total", seen.ghost_hits)


def _by_state(name: str, counts: BlockCounts, samples: Samples) -> None:
    samples.put(name, counts.free, "free")
    samples.put(name, counts.filling, "filling")
    samples.put(name, counts.ready, "ready")
    samples.put(name, counts.poisoned, "poisoned")


def _slots(view: NodeView, found: Survey, samples: Samples) -> None:
    engines: dict[str, MemberSlots] = {}
    for ref, slots in found.members.items():
        engines.setdefault(ref.engine, MemberSlots()).add(slots)
    for engine, slots in engines.items():
        samples.put("slots", slots.free, engine, "free")
        samples.put("slots", slots.held, engine, "held")
        samples.put("slots", slots.suspect, engine, "suspect")
        samples.put("slots", slots.quarantined, engine, "quarantined")
    for kind in _HOLD_KINDS:
        for doubt in Doubt:
            name = doubt.name.lower()
            samples.put("holds", found.holds.get((kind, name), 0), kind, name)
    oldest = found.oldest
    age = max(0, view.now() - oldest.since) if oldest is not None else 0
    samples.put("oldest_wait_seconds", age / 1e9)
    samples.put("oldest_wait_limit_seconds", view.oldest_wait_limit() / 1e9)


def _engines(view: NodeView, samples: Samples) -> None:
    state = view.state()
    samples.put("engines", len(state.engines))
    members = list(state.members.values())
    leaving = sum(member.leaving for member in members)
    silent = sum(member.silent and not member.leaving for member in members)
    samples.put("members", len(members) - leaving - silent, "attached")
    samples.put("members", silent, "silent")
    samples.put("members", leaving, "leaving")
    for engine in state.engines.values():
        samples.put("engine_requests", len(engine.requests), engine.name)
    _steps(state, samples)
    kinds = [session.kind for session in view.sessions()]
    for kind in ("member", "reader"):
        samples.put("sessions", kinds.count(kind), kind)


def _steps(state: State, samples: Samples) -> None:
    counts = step_counts(state)
    for ref in state.members:
        steps = counts.get(ref, NO_STEPS)
        samples.add("kvd_steps", steps.open, (ref.engine, "open"))
        samples.add("kvd_steps", steps.closing, (ref.engine, "closing"))


def _stats(view: NodeView, samples: Samples) -> None:
    """Figures of live members only, so many of each and so many in all."""
    stats = view.stats()
    shown = omitted = 0
    for ref in view.state().members:
        told = [(k, v) for k, v in stats.get(str(ref), {}).items() if math.isfinite(v)]
        room = min(STATS_MAX, STATS_TOTAL_MAX - shown)
        for name, value in told[:room]:
            samples.put("engine_stat", value, ref.engine, ref.member, name)
        shown += min(len(told), room)
        omitted += max(0, len(told) - room)
    samples.put("engine_stats_omitted", omitted)


def _hot_layers(view: NodeView, samples: Samples) -> None:
    """Indexer layers of live members, so many in all; requests are in the status only."""
    told = view.hot_figures()
    members = [ref for ref in view.state().members if str(ref) in told]
    layers = ((ref, one) for ref in members for one in told[str(ref)][0])
    for ref, one in islice(layers, HOT_LAYERS_MAX):
        labels = (ref.engine, ref.member, str(one.layer))
        for fate in ("hits", "misses", "merged"):
            samples.put("hot_rows", getattr(one, fate), *labels, fate)
        samples.put("hot_managed_seconds", seconds(one.managed_us), *labels)
        if (hidden := share(one.overlap)) is not None:
            samples.put("hot_overlap_ratio", hidden, *labels)


def _transfers(view: NodeView, found: Survey, samples: Samples) -> None:
    samples.put("transfers_open", found.outgoing_open, "outgoing")
    samples.put("transfers_open", found.incoming_open, "incoming")
    samples.put("reads_open", found.reads_open)
    samples.put("copies_running", found.copies_running)
    samples.put("waiters", len(view.state().waiters))
    for link in view.links():
        samples.add("kvd_peers", 1, (link.role, link.state))


def _counters(view: NodeView, samples: Samples) -> None:
    for full_name, labels in COUNTERS.values():
        samples.add(full_name, 0, labels)
    both = chain(view.state().counters.items(), view.shell_counters().items())
    counters = sort_counters(both)
    for (what, code), count in counters.refused.items():
        samples.put("refused_total", count, what, code)
    for reason, count in counters.ignored.items():
        samples.put("ignored_total", count, reason)
    for name, count in counters.rest.items():
        if name in COUNTERS:
            samples.add(COUNTERS[name][0], count, COUNTERS[name][1])
        elif name.startswith(READS_FAILED):
            samples.put("reads_failed_total", count, name.removeprefix(READS_FAILED))
        else:
            samples.put("events_total", count, name)


# Documentation -----------------------------------------------------------------------------------

_HEADER: Final = """\
# Metrics

Made by `python -m kvd.server.metrics --docs` from the table in `kvd/server/metric_table.py`; change
it there.

`GET /metrics` on the admin socket answers in the Prometheus text format, for example
`curl --unix-socket /run/kvd/admin.sock http://kvd/metrics`. Gauges are read from kvd's books at the
scrape: parts sum to their totals, and label sets go when what they name has gone. Counters only
grow while kvd runs. Rates have their denominator beside them: the prefix hit rate is
`rate(kvd_lookup_blocks_hit_total[5m]) / rate(kvd_lookup_blocks_asked_total[5m])`.
"""


def docs() -> str:
    """Return the text of `docs/metrics.md`."""
    parts = [_HEADER]
    for title, specs in SECTIONS:
        parts.append(f"\n## {title}\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n")
        for spec in specs:
            labels = ", ".join(f"`{label}`" for label in spec.labels)
            parts.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |\n")
    return "".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the documentation to standard output."""
    parser = argparse.ArgumentParser(
        prog="python -m kvd.server.metrics", description="Write docs/metrics.md."
    )
    parser.add_argument("--docs", action="store_true", required=True, help="write docs/metrics.md")
    parser.parse_args(arguments)
    sys.stdout.write(docs())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
