"""What the prefill pipeline does for the connector: whole blocks, idle steps, failures alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from engine_shim.client import KeptStep, KvdRefused, Ticket
from engine_shim.load_failures import OF_ONE_REQUEST
from engine_shim.steps import StepFailed, StepRequest, Target
from engine_shim.testing import Hang, Rule
from kvd.core import slot_events as se
from kvd.core.errors import CATALOGUE
from tests.unit.engine_shim.vllm.plans import TOKENS
from tests.unit.engine_shim.vllm.toy_worker import LAYERS, ROW, Engine, row_of, toy_plan

TEXT = "the quick brown fox jumps over the lazy dog"
OTHER = "pack my box with five dozen liquor jugs now"
SHORT_S = 0.3
HUNG_SAVE = Rule(Hang(), stream="save", kind="copy", nth=0)

Make = Callable[..., Engine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Engine] = []

    def build(*args: object, **options: object) -> Engine:
        made.append(Engine(monkeypatch, *args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for engine in made:
        engine.device.resume("save")
        engine.close()


def idle(name: str, start: int, end: int) -> StepRequest:
    """A step of a resident request that moves nothing."""
    blocks = tuple(range(1, 1 - -end // TOKENS))
    return StepRequest(name, blocks, (), start, end, optional=True, resident=start, save_from=end)


def resume(engine: Engine) -> None:
    """Let the hung save go on, as soon as it hangs."""
    end, pause = time.monotonic() + 10.0, threading.Event()
    while not engine.device.resume("save"):
        assert time.monotonic() < end, "no save hangs"
        pause.wait(0.001)


# Opaque blocks --------------------------------------------------------------------------------


def test_opaque_blocks_move_whole(make: Make) -> None:
    """Six tokens are two blocks, both ways; the layer of its own loads nothing again."""
    engine = make((), toy_plan(opaque=True))
    pooled = engine.admit("a", TEXT)
    assert engine.step((engine.request(pooled, 0, 6), TEXT)) is None
    engine.kvd.wait_all_free()
    block = TOKENS * ROW
    assert engine.worker.pipeline.figures().saved_bytes == 2 * block * LAYERS
    assert engine.step((engine.request(pooled, 6, 7), TEXT)) is None
    engine.kvd.wait_all_free()
    figures = engine.worker.pipeline.figures()
    assert figures.loaded_bytes == 2 * block * (LAYERS - 1)
    assert figures.saved_bytes == 3 * block * LAYERS
    assert not engine.wrong


def test_rows_move_alone_where_blocks_are_not_opaque(make: Make) -> None:
    engine = make()
    pooled = engine.admit("a", TEXT)
    engine.step((engine.request(pooled, 0, 6), TEXT))
    engine.kvd.wait_all_free()
    assert engine.worker.pipeline.figures().saved_bytes == 6 * ROW * LAYERS


@pytest.mark.parametrize("token", [0, 5, 7], ids=["full block", "last row", "no row yet"])
def test_a_checksum_of_an_opaque_block_runs_over_all_of_it(make: Make, token: int) -> None:
    """Nobody knows which bytes of the block its rows are."""
    engine = make((), toy_plan(opaque=True), checksums="always")
    pooled = engine.admit("a", TEXT)
    assert engine.step((engine.request(pooled, 0, 6), TEXT)) is None
    engine.kvd.wait_all_free()
    assert engine.step((engine.request(pooled, 6, 7), TEXT)) is None
    engine.kvd.wait_all_free()
    assert engine.kvd.pool is not None
    layer = LAYERS - 1
    block, row = pooled.blocks[token // TOKENS], token % TOKENS
    at = ((block * LAYERS + layer) * TOKENS + row) * ROW
    (byte,) = engine.kvd.pool.read_bytes(at, 1)
    engine.kvd.pool.write_bytes(at, bytes([byte ^ 1]))
    report = engine.step((engine.request(pooled, 7, 8), TEXT))
    assert report is not None
    assert report.failed["a"].code == "checksum_mismatch"


def test_the_last_block_is_in_place_before_its_new_rows_are_written(make: Make) -> None:
    """Its load moves all of the block: one that came after the write would take the new rows."""
    engine = make((), toy_plan(opaque=True))
    pooled = engine.admit("a", TEXT)
    engine.step((engine.request(pooled, 0, 6), TEXT))
    request = engine.request(pooled, 6, 8)

    def look(layer: int) -> None:
        engine.worker.before_layer(layer)
        found = engine.memory.read_bytes(engine.at(layer, request, 5), ROW)
        assert found == row_of(TEXT, layer, 5)

    engine.before_layer = look
    assert engine.step((request, TEXT)) is None
    assert not engine.wrong


# Idle steps -----------------------------------------------------------------------------------


@pytest.fixture
def resident(make: Make) -> Engine:
    return make((HUNG_SAVE,), toy_plan(offload="resident"), deadline_s=SHORT_S)


def test_an_idle_step_says_nothing_to_kvd(
    resident: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[object] = []
    monkeypatch.setattr(resident.kvd, "handle", said.append)
    assert resident.step((idle("a", 0, 3), TEXT), others={"b": (9,)}) is None
    assert said == []
    assert not resident.wrong


def test_an_idle_step_waits_for_saves_in_flight(resident: Engine) -> None:
    pooled = resident.admit("a", TEXT)
    assert resident.step((resident.request(pooled, 0, 4), TEXT)) is None
    report = resident.step((idle("a", 4, 6), TEXT), others={"b": (9,)})
    assert report is not None
    assert {one.code for one in report.failed.values()} == {"deadline_exceeded"}
    assert set(report.failed) == {"a", "b"}
    resume(resident)
    resident.kvd.wait_all_free()
    assert resident.step((idle("a", 4, 6), TEXT)) is None
    assert not resident.wrong


@pytest.mark.parametrize("offers", [False, True])
def test_an_idle_step_asks_for_reads_that_were_offered(
    make: Make, monkeypatch: pytest.MonkeyPatch, offers: bool
) -> None:
    """Only kvd's gate knows whether a peer still reads; without any, nobody is asked."""
    engine = make((), toy_plan(offload="resident"))
    pooled = engine.admit("a", TEXT)
    request = engine.request(pooled, 0, 4)
    targets = (Target("transfer", "peer"),) if offers else ()
    assert engine.step((replace(request, targets=targets), TEXT)) is None
    engine.kvd.wait_all_free()
    asked: list[object] = []
    monkeypatch.setattr(engine.kvd.slots, "await_untouched", lambda slots, _: asked.extend(slots))
    assert engine.step((idle("b", 0, 3), OTHER)) is None
    assert asked == (list(range(LAYERS)) if offers else [])


def test_a_step_that_shares_buffers_is_never_idle(make: Make) -> None:
    """Other layers' rows lie there: the slots are taken, whoever moves something."""
    engine = make()
    seen: list[object] = []
    post = engine.kvd.post
    engine.kvd.post = lambda item: seen.append(item) or post(item)  # type: ignore[method-assign, func-returns-value]
    assert engine.step() is None
    assert sum(isinstance(item, se.Acquired) for item in seen) == LAYERS
    engine.kvd.wait_all_free()


# Failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 3, 9])
def test_a_load_that_is_refused_fails_its_request_alone(make: Make, at: int) -> None:
    engine = make()
    engine.prefill("a", TEXT, 64)
    pooled, other = engine.admit("b", TEXT), engine.admit("c", OTHER)
    shares = (engine.request(pooled, 40, 43), TEXT), (engine.request(other, 0, 6, 12), OTHER)
    pool = engine.kvd.machine.state.pool
    assert pool is not None
    pool.blocks.poison(pooled.blocks[at])
    report = engine.step(*shares)
    assert report is not None
    assert {name: one.code for name, one in report.failed.items()} == {"b": "block_poisoned"}
    assert engine.worker.take_bad_blocks() == set(range(1, 12))
    assert not [line for line in engine.wrong if line.startswith("c")]
    engine.kvd.wait_all_free()
    assert engine.step((engine.request(other, 6, 12, 12), OTHER)) is None
    assert not engine.wrong


def test_a_request_that_kvd_let_go_fails_alone(make: Make) -> None:
    """Its pins are gone: kvd says that the blocks are not its own."""
    engine = make()
    engine.prefill("a", TEXT, 64)
    pooled, other = engine.admit("b", TEXT), engine.admit("c", OTHER)
    shares = (engine.request(pooled, 40, 43), TEXT), (engine.request(other, 0, 6, 12), OTHER)
    engine.kvd.unpin("b")
    report = engine.step(*shares)
    assert report is not None
    assert {name: one.code for name, one in report.failed.items()} == {"b": "block_not_reserved"}
    assert not [line for line in engine.wrong if line.startswith("c")]
    engine.kvd.wait_all_free()


def test_refusals_of_one_request_are_codes_that_kvd_has() -> None:
    assert set(CATALOGUE) >= OF_ONE_REQUEST


def test_of_a_failed_request_nothing_more_is_saved(make: Make) -> None:
    engine = make((), checksums="always")
    engine.prefill("a", TEXT, 64)
    engine.kvd.wait_all_free()
    saved = engine.worker.pipeline.figures().saved_bytes
    pooled, other = engine.admit("b", TEXT), engine.admit("c", OTHER)
    shares = (engine.request(pooled, 40, 43), TEXT), (engine.request(other, 0, 6, 12), OTHER)
    assert engine.kvd.pool is not None
    engine.kvd.pool.write_bytes(pooled.blocks[2] * LAYERS * TOKENS * ROW, b"damaged")
    report = engine.step(*shares)
    engine.kvd.wait_all_free()
    assert report is not None
    assert set(report.failed) == {"b"}
    assert engine.worker.pipeline.figures().saved_bytes - saved == 6 * ROW * LAYERS


class _Unheard(Ticket):
    """An answer for which a step waits in vain, although its save goes on."""

    def then(self, call: Callable[[], None], *, rides: bool = False) -> None:
        call()


def test_a_step_ends_only_when_kvd_has_heard_of_its_saves(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on the end of the request, which comes another way, refuses none of them."""
    engine = make((), deadline_s=SHORT_S)
    written = engine.kvd.slots.written
    monkeypatch.setattr(engine.kvd.slots, "open_step", _busy)

    def unheard(*args: object, **more: object) -> Ticket:
        written(*args, **more)  # type: ignore[arg-type]
        return _Unheard(threading.Lock(), 1)

    monkeypatch.setattr(engine.kvd.slots, "written", unheard)
    pooled = engine.admit("a", TEXT)
    report = engine.step((engine.request(pooled, 0, 6), TEXT))
    assert report is not None
    assert report.failed["a"].code == "deadline_exceeded"


def _busy(*args: object) -> KeptStep:
    raise KvdRefused("busy", what="steps", limit=0)


def test_a_step_whose_blocks_are_kept_waits_for_no_answer(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay whatever kvd has heard of its saves."""
    engine = make((), deadline_s=SHORT_S)
    written = engine.kvd.slots.written

    def unheard(*args: object, **more: object) -> Ticket:
        written(*args, **more)  # type: ignore[arg-type]
        return Ticket(threading.Lock(), 1)

    monkeypatch.setattr(engine.kvd.slots, "written", unheard)
    pooled = engine.admit("a", TEXT)
    assert engine.step((engine.request(pooled, 0, 6), TEXT)) is None
    engine.kvd.wait_all_free()


def test_blocks_of_heard_saves_stay_when_the_request_ends(make: Make) -> None:
    engine = make((Rule(Hang(), stream="save", kind="copy", nth=LAYERS - 1),))
    pooled = engine.admit("a", TEXT)
    assert engine.step((engine.request(pooled, 0, 6), TEXT)) is None
    engine.kvd.abort("a")
    assert not set(engine.kvd.reserve("b", 38)) & set(pooled.blocks)
    resume(engine)
    engine.kvd.wait_all_free()
    assert engine.worker.pipeline._saver.lost.why("a") is None


def test_a_step_that_has_failed_says_so_at_every_call(make: Make) -> None:
    engine = make()
    pipeline = engine.worker.pipeline
    pooled = engine.admit("a", TEXT)
    pipeline.begin_step([engine.request(pooled, 0, 6)], 5.0)
    pipeline.before_write(0)
    step = pipeline._step
    assert step is not None
    step.fail(StepFailed("injected", "by the test"))
    for call in (pipeline.before_write, pipeline.written, pipeline.computed):
        with pytest.raises(StepFailed, match="injected"):
            call(0)
    pipeline.abort_step()
    engine.kvd.wait_all_free()
