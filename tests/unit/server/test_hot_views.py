"""What decode does with hot buffers: layers in metrics, requests in status and tables only."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from kvd.core.state import Limits, Settings
from kvd.server.metrics import HOT_LAYERS_MAX, scrape
from kvd.server.sliced import run_now
from kvd.server.views import Watch
from kvd.server.views_tables import EngineQuery, engine_page
from kvd.wire.hot_figures import LAYERS_MAX, LayerFigures, RequestFigures
from tests.unit.server.fake_node import FakeNode, ref
from tests.unit.server.test_admin_views import look

LABELS = ("engine", "member", "layer", "fate")
LAYERS = [LayerFigures(0, 90, 10, 4, 12.5, 0.75), LayerFigures(4, 7, 1, 0)]
REQUESTS = [
    RequestFigures("long", 30, 60, 9, 4, 25.0, 0.5, LAYERS),
    RequestFigures("short", 3, 37, 2, 0),
]


def hot_metrics(node: FakeNode) -> dict[tuple[str, ...], float]:
    """Samples of hot buffers, by name and label values."""
    return {
        (sample.name, *(sample.labels[name] for name in LABELS if name in sample.labels)): (
            sample.value
        )
        for family in text_string_to_metric_families(scrape(node, Watch()).decode())
        for sample in family.samples
        if sample.name.startswith("kvd_hot_")
    }


def test_layers_are_in_metrics_and_requests_are_not() -> None:
    node = FakeNode()
    node.hot[str(node.join())] = (LAYERS, REQUESTS)
    node.hot["gone/w0#1"] = (LAYERS, REQUESTS)
    found = hot_metrics(node)
    assert found["kvd_hot_rows", "e0", "w0", "0", "hits"] == 90
    assert found["kvd_hot_rows", "e0", "w0", "0", "misses"] == 10
    assert found["kvd_hot_rows", "e0", "w0", "4", "merged"] == 0
    assert math.isclose(found["kvd_hot_managed_seconds", "e0", "w0", "0"], 12.5e-6)
    assert found["kvd_hot_overlap_ratio", "e0", "w0", "0"] == 0.75
    assert len(found) == 2 * (3 + 1) + 1, "no load of the other layer was timed"
    assert not any("long" in label for key in found for label in key)


def test_layers_of_a_scrape_are_limited() -> None:
    node = FakeNode(settings=Settings(pool_bytes=1 << 20, limits=Limits(engines=32)))
    for number in range(12):
        layers = [LayerFigures(at, 1, 1, 1) for at in range(LAYERS_MAX)]
        node.hot[str(node.join(ref(f"e{number}")))] = (layers, [])
    assert len(hot_metrics(node)) == HOT_LAYERS_MAX * 4


def test_what_is_no_duration_and_no_share_is_none() -> None:
    node = FakeNode()
    who = str(node.join())
    nothing, infinite = float("nan"), float("inf")
    odd = [LayerFigures(0, 1, 1, 1, nothing, infinite), LayerFigures(1, 1, 1, 1, -5.0, 7.0)]
    node.hot[who] = (odd, [RequestFigures("r", 1, 1, 1, 1, infinite, nothing, odd)])
    found = hot_metrics(node)
    assert [found["kvd_hot_managed_seconds", "e0", "w0", layer] for layer in "01"] == [0, 0]
    assert ("kvd_hot_overlap_ratio", "e0", "w0", "0") not in found
    assert found["kvd_hot_overlap_ratio", "e0", "w0", "1"] == 1
    (seen,) = look(node).engines[0].hot_requests
    assert (seen.managed_seconds, seen.overlap) == (0, None)


def test_the_status_has_requests_and_the_tables_have_their_layers() -> None:
    node = FakeNode()
    who = node.join()
    node.hot[str(who)] = (LAYERS, REQUESTS)
    shown = look(node).engines[0].hot_requests
    assert [(one.request, one.steps, one.hits, one.misses, one.merged) for one in shown] == [
        ("long", 30, 60, 9, 4),
        ("short", 3, 37, 2, 0),
    ]
    assert (shown[0].managed_seconds, shown[0].overlap, shown[0].layers) == (25e-6, 0.5, [])
    (engine,) = run_now(engine_page(node, EngineQuery())).items
    (member,) = engine.members
    assert [(layer.layer, layer.hits) for layer in member.hot_layers] == [(0, 90), (4, 7)]
    assert [len(one.layers) for one in member.hot_requests] == [2, 0]
    assert member.hot_requests[0].layers[0] == member.hot_layers[0]


def test_the_status_asks_the_first_rank_that_decodes() -> None:
    node = FakeNode()
    node.join(ref("e0", "scheduler"), rank=-1)
    second = node.join(ref("e0", "w1"), rank=1)
    first = node.join(ref("e0", "w0"), rank=0)
    node.hot[str(second)] = ([], REQUESTS[1:])
    assert [one.request for one in look(node).engines[0].hot_requests] == ["short"]
    node.hot[str(first)] = ([], REQUESTS[:1])
    assert [one.request for one in look(node).engines[0].hot_requests] == ["long"]
    node.hot.clear()
    assert look(node).engines[0].hot_requests == []
