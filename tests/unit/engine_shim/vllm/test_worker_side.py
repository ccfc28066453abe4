"""The worker's side with its hooks called as vLLM calls them: bytes, gates, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from engine_shim.client import KvdRefused
from engine_shim.testing import Delay, Fail, Rule
from engine_shim.vllm.messages import Failure, StepOrder
from tests.unit.engine_shim.vllm.plans import TOKENS
from tests.unit.engine_shim.vllm.rig import FakeClient
from tests.unit.engine_shim.vllm.toy_worker import LAYERS, Engine, toy_plan

MS = 1_000_000
TEXT = "the quick brown fox jumps over the lazy dog"
OTHER = "pack my box with five dozen liquor jugs now"
SAVES = Rule(Delay(3 * MS), stream="save", kind="copy")
LOADS = Rule(Delay(3 * MS), stream="load", kind="copy")
NEWS = Rule(Delay(2 * MS), kind="host")
DELAYS = {"none": (), "saves": (SAVES,), "loads": (LOADS,), "all": (SAVES, LOADS, NEWS)}

Make = Callable[..., Engine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Engine] = []

    def build(*args: object, **options: object) -> Engine:
        made.append(Engine(monkeypatch, *args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for engine in made:
        engine.close()


@pytest.mark.parametrize("opaque", [False, True], ids=["rows", "opaque"])
@pytest.mark.parametrize("rules", DELAYS.values(), ids=DELAYS)
def test_every_row_is_right_however_late_copies_are(
    make: Make, rules: tuple[Rule, ...], opaque: bool
) -> None:
    engine = make(rules, toy_plan(opaque=opaque))
    assert engine.prefill("a", TEXT) == 0
    assert engine.prefill("b", TEXT[:20] + "another end") == 20
    assert engine.prefill("c", TEXT) == 40
    engine.kvd.wait_all_free()


def test_a_gate_asked_in_the_wrong_hook_is_seen(make: Make) -> None:
    """`wait_for_layer_load` comes after the write: rows meant for another layer are overwritten."""
    engine = make((SAVES,))
    engine.gate = "after"
    wrong = []
    pooled = engine.admit("a", TEXT)
    for start in range(0, 24, 6):
        engine.step((engine.request(pooled, start, start + 6), TEXT))
        wrong += engine.wrong
    assert wrong


def test_written_before_its_gate_is_an_error(make: Make) -> None:
    engine = make()
    pooled = engine.admit("a", TEXT)
    engine.worker.begin(StepOrder((engine.request(pooled, 0, 6),)))
    engine.worker.before_layer(0)
    with pytest.raises(AssertionError, match="layer 1 was written before its gate was asked"):
        engine.worker.written(1)


def test_a_gate_may_be_asked_again(make: Make) -> None:
    """Hooks and the layer before may both ask."""
    engine = make()
    pooled = engine.admit("a", TEXT)
    engine.worker.begin(StepOrder((engine.request(pooled, 0, 6),)))
    assert [engine.worker.before_layer(layer) for layer in (0, 0, 1, 0)] == [True] * 4
    engine.worker.end()
    report = engine.worker.take_report()
    assert report is not None
    assert (report.failed, report.unsaved) == ({}, {"a"}), "its layers were not run"
    engine.kvd.wait_all_free()


def test_outside_a_step_every_hook_is_harmless(make: Make) -> None:
    engine = make()
    assert not engine.worker.is_open
    assert engine.worker.before_layer(3)
    engine.worker.written(3)
    engine.worker.computed(3)
    engine.worker.end()
    assert engine.worker.take_report() is None
    assert engine.worker.take_bad_blocks() == set()


@pytest.mark.parametrize("skipped", [(4,), (3, 4)])
def test_skipped_draft_layers_keep_the_gate_right(make: Make, skipped: tuple[int, ...]) -> None:
    """A step without drafts leaves their rows unsaved: its blocks are found by nobody."""
    engine = make((SAVES,), toy_plan(drafts=2))
    engine.skipped = skipped
    pooled = engine.admit("a", TEXT)
    for end in (6, 12):
        report = engine.step((engine.request(pooled, 0, end), TEXT))
        assert report is not None
        assert (report.failed, report.unsaved) == ({}, {"a"})
        assert not engine.wrong
    engine.kvd.wait_all_free()
    engine.kvd.abort("a")
    engine.skipped = ()
    assert engine.prefill("b", TEXT) == 0


def test_a_step_that_drafts_again_waits_for_no_rows_of_the_skipped_one(make: Make) -> None:
    """Rows that were never written are not waited for; base layers are as right as ever."""
    engine = make((), toy_plan(drafts=1))
    pooled = engine.admit("a", TEXT)
    engine.skipped = (LAYERS - 1,)
    engine.step((engine.request(pooled, 0, 6), TEXT))
    engine.skipped = ()
    report = engine.step((engine.request(pooled, 6, 12), TEXT))
    assert report is None or not report.failed
    assert {line.split()[2] for line in engine.wrong} <= {str(LAYERS - 1)}, "a base layer is wrong"
    engine.kvd.abort("a")
    engine.worker.pipeline.forget("a")
    assert engine.prefill("b", TEXT) == 0


# Failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
def test_a_failing_step_reports_exactly_its_blocks(make: Make, layer: int) -> None:
    engine = make((Rule(Fail(), stream="load", kind="copy", nth=layer),))
    engine.prefill("a", TEXT, 64)
    pooled, other = engine.admit("b", TEXT), engine.admit("c", OTHER)
    shares = (engine.request(pooled, 40, 43), TEXT), (engine.request(other, 0, 6, 12), OTHER)
    report = engine.step(*shares)
    assert report is not None
    assert {name: one.blocks for name, one in report.failed.items()} == {
        "b": tuple(range(1, 12)),
        "c": (12, 13),
    }
    assert {one.code for one in report.failed.values()} == {"injected"}
    assert engine.worker.take_bad_blocks() == set(range(1, 14))
    assert engine.worker.take_bad_blocks() == set()
    assert engine.worker.take_report() is None
    engine.kvd.wait_all_free()
    engine.kvd.abort("b")
    engine.kvd.abort("c")
    assert engine.prefill("d", TEXT) == 40


def test_a_failing_step_reports_those_too_of_which_nothing_is_moved(make: Make) -> None:
    engine = make((Rule(Fail(), stream="load", kind="copy", nth=1),))
    engine.prefill("a", TEXT, 64)
    pooled = engine.admit("b", TEXT)
    report = engine.step((engine.request(pooled, 40, 43), TEXT), others={"idle": (14, 15)})
    assert report is not None
    assert report.failed["idle"] == Failure("injected", report.failed["b"].detail, (14, 15))
    assert {14, 15} <= engine.worker.take_bad_blocks()


def test_doomed_requests_are_reported_and_the_others_go_on(make: Make) -> None:
    engine = make()
    pooled = engine.admit("a", TEXT)
    doomed = {"b": Failure("pool_full", "why", (9, 10))}
    report = engine.step((engine.request(pooled, 0, 6), TEXT), doomed=doomed)
    assert report is not None
    assert report.failed == doomed
    assert engine.worker.take_bad_blocks() == {9, 10}
    assert not engine.wrong


def test_a_damaged_block_fails_its_request_alone(make: Make) -> None:
    engine = make((), checksums="always")
    engine.prefill("a", TEXT, 64)
    pooled, other = engine.admit("b", TEXT), engine.admit("c", OTHER)
    shares = (engine.request(pooled, 40, 43), TEXT), (engine.request(other, 0, 6, 12), OTHER)
    assert engine.kvd.pool is not None
    size = LAYERS * TOKENS * 64
    engine.kvd.pool.write_bytes(pooled.blocks[2] * size + TOKENS * 64, b"damaged")
    report = engine.step(*shares)
    assert report is not None
    assert set(report.failed) == {"b"}
    assert report.failed["b"].code == "checksum_mismatch"
    assert engine.worker.take_bad_blocks() == set(range(1, 12))
    assert not [line for line in engine.wrong if line.startswith("c")]


def test_the_layers_of_a_quarantined_slot_move_to_the_spare(make: Make) -> None:
    engine = make()
    engine.prefill("a", TEXT)
    engine.kvd.quarantined.add(1)
    pooled = engine.admit("b", TEXT)
    report = engine.step((engine.request(pooled, 40, 43), TEXT))
    assert report is not None
    assert report.failed["b"].code == "slot_quarantined"
    assert engine.moves == [(1, 3), (3, 3)]
    engine.kvd.abort("b")
    assert engine.prefill("c", TEXT) == 40


def test_without_a_spare_requests_end_and_nothing_moves(make: Make) -> None:
    engine = make((), toy_plan(spare_buffers=0))
    engine.kvd.quarantined.add(1)
    for name in ("a", "b"):
        pooled = engine.admit(name, TEXT)
        report = engine.step((engine.request(pooled, 0, 6), TEXT))
        assert report is not None
        assert report.failed[name].code == "slot_quarantined"
    assert engine.moves == []


def test_a_lost_save_fails_the_next_step_of_its_request(make: Make) -> None:
    engine = make((Rule(Fail(), stream="save", kind="copy", nth=LAYERS - 1),))
    pooled, other = engine.admit("a", TEXT), engine.admit("b", OTHER)
    engine.step((engine.request(pooled, 0, 6), TEXT))
    engine.kvd.wait_all_free()
    shares = (engine.request(pooled, 6, 12), TEXT), (engine.request(other, 0, 6, 9), OTHER)
    report = engine.step(*shares)
    assert report is not None
    assert {name: one.code for name, one in report.failed.items()} == {"a": "injected"}
    assert not [line for line in engine.wrong if line.startswith("b")]
    assert engine.step((engine.request(other, 6, 12, 9), OTHER), forget=("a",)) is None


def test_nothing_is_left_when_kvd_refuses_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def refuse(client: FakeClient) -> FakeClient:
        raise KvdRefused("unreachable", path="its socket", detail="kvd is away")

    monkeypatch.setattr(FakeClient, "open", refuse)
    monkeypatch.setattr(FakeClient, "close", lambda client: closed.append(client))
    with pytest.raises(KvdRefused, match="unreachable"):
        Engine(monkeypatch)
    assert len(closed) == 1
