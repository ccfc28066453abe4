"""Metrics: bounded label sets, no negative gauge, each failure its own counter, a true document."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvd.core import events as ev
from kvd.core import slot_events as se
from kvd.core.ids import ReadId, SlotRef
from kvd.core.state import Limits, Settings
from kvd.server.metric_table import COUNTERS, SPECS
from kvd.server.metrics import STATS_TOTAL_MAX, docs, main, scrape
from kvd.server.node_view import LinkInfo, Phase
from kvd.server.views import Watch
from tests.unit.server.fake_node import SECOND, FakeNode, ref

ROOT = Path(__file__).parents[3]

Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


def figures(node: FakeNode) -> Figures:
    """Every sample by name and labels, read back with the library's own parser."""
    text = scrape(node, Watch()).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(node: FakeNode, name: str, /, **labels: str) -> float:
    return figures(node)[name, frozenset(labels.items())]


def names(found: Figures) -> set[str]:
    return {name for name, _ in found}


# Label sets and signs -----------------------------------------------------------------------------


def test_engines_that_left_leave_no_label_sets() -> None:
    node = FakeNode()
    node.join()
    before = set(figures(node))
    for number in range(100):
        who = node.join(ref(f"guest{number}", "w0", number))
        node.hold(who, 1)
        assert len(figures(node)) > len(before)
        node.handle(ev.MemberDied(who))
    after = set(figures(node))
    # What is new are counters of things that happened, at most one set for each.
    new = {name for name, _ in after - before}
    assert all(name.endswith("_total") for name in new)
    assert len(after - before) <= 8
    assert not any("guest" in text for _, labels in after for _, text in labels)


def test_no_gauge_is_negative_and_parts_sum_to_their_total() -> None:
    node = FakeNode(figures={"rss_bytes": -1.0, "loop_lag_seconds": -0.5})
    who = node.join()
    node.fill(who, "r0", 3)
    node.reserve(who, "r1", 5)
    node.quarantine(who, 2)
    node.time -= 10 * SECOND  # holds that began in the future
    found = figures(node)
    assert all(v >= 0 for v in found.values())
    for metric, total in (("kvd_pool_blocks", 256), ("kvd_pool_bytes", 1 << 20)):
        assert sum(v for (name, _), v in found.items() if name == metric) == total
    assert found["kvd_pool_capacity_blocks", frozenset()] == 256
    slots = {labels: v for (name, labels), v in found.items() if name == "kvd_slots"}
    assert sum(slots.values()) == 4


def test_figures_of_engines_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode(settings=Settings(pool_bytes=1 << 20, limits=Limits(engines=32)))
    for number in range(20):
        who = node.join(ref(f"e{number}"))
        node.the_stats[str(who)] = {f"s{i}": -1.0 for i in range(100)}
    node.the_stats["gone/w0#1"] = {"x": 1.0}
    found = figures(node)
    shown = [v for (name, _), v in found.items() if name == "kvd_engine_stat"]
    assert len(shown) == STATS_TOTAL_MAX
    assert found["kvd_engine_stats_omitted", frozenset()] == 2000 - STATS_TOTAL_MAX


def test_what_is_not_a_number_is_not_shown() -> None:
    node = FakeNode()
    node.the_stats[str(node.join())] = {"bad": float("nan"), "good": 1.0}
    assert value(node, "kvd_engine_stat", engine="e0", member="w0", stat="good") == 1
    assert not any(v != v for v in figures(node).values())


# One counter for each kind of trouble -------------------------------------------------------------


def provoke(node: FakeNode, kind: str) -> None:
    """Make exactly one trouble of this kind happen."""
    who = node.join()
    (block,) = node.fill(who, "first", 1)
    if kind == "lease":
        node.handle(ev.LookedUp(1, who, "r0", block.to_bytes(32)))
        node.pass_time(31)
    elif kind == "save":
        (target,) = node.reserve(who, "r1", 1)
        held = SlotRef(who, 1, 0)
        save = se.SaveSpec("s", (target,), (16,))
        node.slot_events(who, se.Acquired(held, 0), se.Written(held, 0, (save,)))
        node.slot_events(who, se.SaveEnded(held, "s", False))
    elif kind == "poison":
        node.handle(ev.BlocksPoisoned(1, who, node.reserve(who, "r1", 1)))
    elif kind == "read":
        held = node.offer(who, 1, "t1")
        for attempt in range(2):
            read = ReadId("t1", 0, 0, attempt)
            node.handle(ev.ClaimCame("kvd#d", held, read, 1))
            node.handle(ev.EndCame("kvd#d", held, read, False))
    elif kind == "not_claimed":
        node.offer(who, 1, "t1")
        node.pass_time(11)
    elif kind == "refusal":
        node.handle(ev.Renewed(1, who, "nobody"))
    elif kind == "race":
        node.slot_events(who, se.Computed(SlotRef(who, 0, 0)))
    elif kind == "death":
        node.handle(ev.MemberDied(who))


@pytest.mark.parametrize(
    ("kind", "moved"),
    [
        ("lease", {"kvd_leases_expired_total"}),
        ("save", {"kvd_saves_total[failed]"}),
        ("poison", {"kvd_blocks_poisoned_total"}),
        ("read", {"kvd_reads_failed_total[read_failed]", "kvd_transfers_failed_total"}),
        ("not_claimed", {"kvd_reads_failed_total[not_claimed]", "kvd_transfers_failed_total"}),
        ("refusal", {"kvd_refused_total[request_unknown,requests]"}),
        ("race", {"kvd_ignored_total[stale_epoch]"}),
        ("death", {"kvd_members_died_total"}),
        ("nothing", set()),
    ],
)
def test_each_kind_of_trouble_moves_its_own_counters_only(kind: str, moved: set[str]) -> None:
    calm, troubled = FakeNode(), FakeNode()
    provoke(calm, "nothing")
    provoke(troubled, kind)
    before, after = figures(calm), figures(troubled)
    found = {
        name + (f"[{','.join(sorted(v for _, v in labels))}]" if labels else "")
        for (name, labels), count in after.items()
        if name.endswith("_total") and count > before.get((name, labels), 0)
    }
    # What leads up to some of them.
    usual = {"kvd_slot_releases_total", "kvd_lookup_blocks_asked_total"}
    assert found - usual - {"kvd_lookup_blocks_hit_total"} == moved


def test_hits_have_their_denominator() -> None:
    node = FakeNode()
    who = node.join()
    (block,) = node.fill(who, "r0", 1)
    node.handle(ev.LookedUp(1, who, "r1", block.to_bytes(32) + b"x" * 32))
    assert value(node, "kvd_lookup_blocks_asked_total") == 2
    assert value(node, "kvd_lookup_blocks_hit_total") == 1


def test_an_unknown_counter_is_shown_by_name() -> None:
    node = FakeNode(counters={"peer_links_made": 3, "attach_refused_forbidden": 2})
    assert value(node, "kvd_events_total", event="peer_links_made") == 3
    assert value(node, "kvd_refused_total", what="attach", code="forbidden") == 2


# State --------------------------------------------------------------------------------------------


def test_state_of_the_node() -> None:
    node = FakeNode(the_phase=Phase("starting", 40))
    node.the_links = [
        LinkInfo("a", "consumer", "", "up", 0),
        LinkInfo("b", "consumer", "", "up", 0),
    ]
    assert value(node, "kvd_ready") == 0
    assert value(node, "kvd_populated_percent") == 40
    assert value(node, "kvd_phase", phase="starting") == 1
    assert value(node, "kvd_phase", phase="ready") == 0
    assert value(node, "kvd_not_ready", reason="starting") == 1
    assert value(node, "kvd_degraded", reason="no_spare") == 0
    assert value(node, "kvd_peers", role="consumer", state="up") == 2
    assert value(node, "kvd_rss_bytes") == 2.0**20
    assert value(node, "kvd_info", version="0.1.0", boot_id="b0" * 16) == 1
    assert value(node, "kvd_region_populated_bytes", region="pool") == 1 << 20
    assert value(node, "kvd_region_page_bytes", region="pool") == 4096
    assert value(node, "kvd_region_node_bytes", region="pool", node="0") == 1 << 20
    assert value(node, "kvd_region_stray_bytes", region="pool") == 0


def test_holds_and_waits() -> None:
    node = FakeNode()
    node.hold(node.join(), 1)
    node.time += 5 * SECOND
    assert value(node, "kvd_holds", kind="compute", doubt="none") == 1
    assert value(node, "kvd_holds", kind="pool_read", doubt="quarantined") == 0
    assert value(node, "kvd_slots", engine="e0", state="held") == 1
    assert value(node, "kvd_oldest_wait_seconds") == 5
    assert value(node, "kvd_oldest_wait_limit_seconds") == 120


def test_steps_by_state() -> None:
    node = FakeNode()
    who, other = node.join(), node.join(ref("e1"))
    assert value(node, "kvd_steps", engine="e0", state="open") == 0
    saving = node.save_in_step(who, 1, *node.reserve(who, "r", 2))
    node.slot_events(other, se.StepOpened(other, 1), se.StepOpened(other, 2))
    assert value(node, "kvd_steps", engine="e0", state="open") == 1
    assert value(node, "kvd_steps", engine="e1", state="open") == 2
    node.slot_events(who, se.StepClosed(who, 1))
    assert value(node, "kvd_steps", engine="e0", state="open") == 0
    assert value(node, "kvd_steps", engine="e0", state="closing") == 1
    node.slot_events(who, se.SaveEnded(saving, "s", True))
    assert value(node, "kvd_steps", engine="e0", state="closing") == 0


def test_names_of_clients_are_escaped() -> None:
    node = FakeNode()
    node.the_stats[str(node.join())] = {'evil"\n} 1': 1.0}
    assert value(node, "kvd_engine_stat", engine="e0", member="w0", stat='evil"\n} 1') == 1


# Documentation ------------------------------------------------------------------------------------


def test_docs_metrics_is_what_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert (ROOT / "docs/metrics.md").read_text() == docs(), (
        "run: python -m kvd.server.metrics --docs > docs/metrics.md"
    )
    assert main(["--docs"]) == 0
    assert capsys.readouterr().out == docs()


def test_every_metric_that_is_shown_is_documented() -> None:
    node = FakeNode()
    node.quarantine(node.join(), 0)
    documented = set(re.findall(r"^\| `(kvd_[a-z_]+)`", docs(), flags=re.MULTILINE))
    assert names(figures(node)) <= documented == {spec.name for spec in SPECS}
    assert {name for name, _ in COUNTERS.values()} <= documented


def test_names_follow_the_conventions() -> None:
    for spec in SPECS:
        assert re.fullmatch(r"kvd_[a-z_]+", spec.name)
        assert spec.name.endswith("_total") == (spec.kind == "counter")
        assert spec.help.endswith(".")
