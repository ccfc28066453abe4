"""The prefill pipeline against the real machine, on a device whose copies are late or fail.

The "model" writes a pattern that names request, layer and token into every row, and reads all rows
of its layer back before it lets go: one wrong byte names where it came from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import pytest

from engine_shim.device import Device
from engine_shim.device_cpu import CpuDevice
from engine_shim.pipeline import PipelineOptions, PrefillPipeline
from engine_shim.requests import PooledRequest, RequestPool
from engine_shim.ring import device_layout, slot_rows
from engine_shim.steps import StepFailed, StepRequest
from engine_shim.testing import Delay, Fail, FaultyDevice, Rule
from kvd.plan.layout import BlockLayout
from kvd.plan.ring import plan_ring
from kvd.wire.layout import BlockLayoutSpec, Part
from tests.unit.engine_shim.fake_kvd import FakeKvd

LAYERS = 6
BLOCK = 4
ROW = 64
MAX_TOKENS = 48
MS = 1_000_000
PARTS = [[Part("main", ROW)] for _ in range(LAYERS)]


class Engine:
    """A pipeline with a model that only writes and checks patterns."""

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        checksums: str = "off",
        /,
        *,
        buffers: int = 2,
        lookahead: int = 1,
        saves_max: int = 256,
        shares_spans: bool = False,
    ) -> None:
        layout = BlockLayoutSpec("pattern", "uint8", BLOCK, PARTS)
        self.ring = plan_ring(
            [tuple(parts) for parts in PARTS],
            num_shared=buffers,
            num_blocks=MAX_TOKENS // BLOCK,
            block_tokens=BLOCK,
            lookahead=lookahead,
        )
        self.device: Device = FaultyDevice(CpuDevice(), rules)
        self.device.bind_thread()
        self.layout, size = device_layout(self.ring)
        self.memory = self.device.alloc(size, "slots")
        self.kvd = FakeKvd(layout, len(self.ring.slots), num_blocks=40, checksums=checksums)
        self.pipeline = PrefillPipeline(
            self.kvd,
            self.device,
            self.ring,
            self.memory,
            self.layout,
            BlockLayout(layout),
            PipelineOptions(close_s=5.0, saves_max=saves_max, shares_spans=shares_spans),
        )
        self.pool = RequestPool(self.kvd, BLOCK)
        self.device_blocks = tuple(range(MAX_TOKENS // BLOCK))
        self.before_write: Callable[[int], None] = lambda layer: None
        self.start = 0
        self.unsaved: tuple[str, ...] = ()

    def admit(self, name: str, text: str) -> PooledRequest:
        """Begin a request for a text; one token for each character."""
        keys = [_key(text[: (at + 1) * BLOCK]) for at in range(len(text) // BLOCK)]
        return self.pool.admit(name, keys, len(text))

    def prefill(self, name: str, text: str, chunk: int = 8, *, optional: bool = False) -> int:
        """All chunks of a request; returns the tokens that were found.

        optional: its last chunk may go unsaved.
        """
        pooled = self.admit(name, text)
        for start in range(pooled.hit_tokens, len(text), chunk):
            end = min(start + chunk, len(text))
            last = end == len(text)
            self.pool.extend(pooled, end, optional=optional and last)
            self.step(pooled, text, start, end, last=last, optional=optional and last)
            if name not in self.unsaved:
                self.pool.commit(pooled, end)
        self.pool.end(pooled)
        self.pipeline.forget(name)
        return pooled.hit_tokens

    def step(
        self,
        pooled: PooledRequest,
        text: str,
        start: int,
        end: int,
        *,
        last: bool,
        s: float = 10.0,
        optional: bool = False,
    ) -> None:
        """One chunk through all layers; every row of the layer is checked."""
        count = -(-end // BLOCK)
        request = StepRequest(
            pooled.request,
            self.device_blocks[:count],
            tuple(pooled.blocks[:count]),
            start,
            end,
            optional=optional,
        )
        self.start = start
        self.pipeline.begin_step([request], s)
        try:
            for layer in range(LAYERS):
                slot = self.pipeline.before_write(layer)
                self.before_write(layer)
                rows = slot_rows(self.layout, slot, "main", self.device_blocks)
                for token in range(start, end):
                    self.memory.write_bytes(rows.locate(token)[0], _row(text, layer, token))
                self.pipeline.written(layer)
                for token in range(end):
                    found = self.memory.read_bytes(rows.locate(token)[0], ROW)
                    assert found == _row(text, layer, token), f"layer {layer} token {token}"
                self.pipeline.computed(layer)
            self.unsaved = self.pipeline.end_step(wait_saves=last)
        except StepFailed:
            self.pipeline.abort_step()
            raise

    def close(self) -> None:
        self.pipeline.close()
        self.memory.close()
        self.kvd.close()


def _key(prefix: str) -> bytes:
    return hashlib.sha256(prefix.encode()).digest()


def _row(text: str, layer: int, token: int) -> bytes:
    """The row depends on the whole prefix, as KV does."""
    seed = hashlib.sha256(f"{text[: token + 1]}/{layer}".encode()).digest()
    return (seed * 2)[:ROW]


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def build(*args: object, **options: int) -> Engine:
        made.append(Engine(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for engine in made:
        engine.close()


TEXT = "the quick brown fox jumps over the lazy"
DELAYS = [
    (),
    (Rule(Delay(3 * MS), stream="save", kind="copy"),),
    (Rule(Delay(3 * MS), stream="load", kind="copy"),),
    (Rule(Delay(2 * MS), stream="save", kind="host"), Rule(Delay(2 * MS), stream="load")),
]


@pytest.mark.parametrize("rules", DELAYS, ids=["none", "saves", "loads", "both"])
@pytest.mark.parametrize("buffers", [1, 2, 5])
def test_every_row_is_right_however_late_copies_are(
    make: Callable[..., Engine], rules: tuple[Rule, ...], buffers: int
) -> None:
    engine = make(rules, buffers=buffers)
    assert engine.prefill("r1", TEXT) == 0
    assert engine.prefill("r2", TEXT[:32] + "another end") == 32
    assert engine.prefill("r3", TEXT) == len(TEXT) // BLOCK * BLOCK
    engine.kvd.wait_all_free()


@pytest.mark.parametrize("lookahead", [0, 1, 3, LAYERS - 1])
def test_loads_may_run_any_number_of_layers_ahead(
    make: Callable[..., Engine], lookahead: int
) -> None:
    engine = make(DELAYS[2], lookahead=lookahead)
    engine.prefill("r1", TEXT)
    assert engine.prefill("r2", TEXT) > 0


def test_the_gate_is_shut_until_the_save_of_the_last_occupant_has_ended(
    make: Callable[..., Engine],
) -> None:
    """With one rotating buffer, a layer is written only when nothing holds its slot but itself."""
    engine = make(DELAYS[1], buffers=1)

    def look(layer: int) -> None:
        slot = engine.pipeline.ring.slot_of[layer]
        assert "save" not in engine.kvd.holds(slot)

    engine.before_write = look
    engine.prefill("r1", TEXT)


def test_a_bound_layer_keeps_its_rows_from_chunk_to_chunk(make: Callable[..., Engine]) -> None:
    """Layer 0 has a buffer of its own: only the others are loaded again for each chunk."""
    engine = make()
    engine.prefill("r1", TEXT[:16])
    loaded = engine.pipeline.figures().loaded_bytes
    assert loaded == (LAYERS - 1) * 8 * ROW
    engine.prefill("r2", TEXT[:16])
    again = engine.pipeline.figures().loaded_bytes - loaded
    assert again == LAYERS * 12 * ROW, "another request's rows must be loaded for every layer"


# Failures ---------------------------------------------------------------------------------------


def test_a_failed_save_ends_the_request_and_nothing_of_it_is_found(
    make: Callable[..., Engine],
) -> None:
    engine = make((Rule(Fail(), stream="save", kind="copy", nth=2),))
    with pytest.raises(StepFailed, match="injected"):
        engine.prefill("r1", TEXT[:8])
    engine.kvd.abort("r1")
    engine.kvd.wait_all_free()
    assert engine.admit("r2", TEXT[:9]).hit_tokens == 0
    engine.kvd.abort("r2")
    assert engine.prefill("r3", TEXT) == 0


def test_a_failed_load_ends_the_request_and_its_slot_is_let_go(
    make: Callable[..., Engine],
) -> None:
    engine = make((Rule(Fail(moved=0.5), stream="load", kind="copy", nth=1),))
    engine.prefill("r1", TEXT[:8])
    with pytest.raises(StepFailed, match="injected"):
        engine.prefill("r2", TEXT[:16])
    engine.kvd.abort("r2")
    engine.kvd.wait_all_free()
    assert engine.prefill("r3", TEXT) == 8


def test_blocks_of_an_earlier_life_of_kvd_are_not_used(make: Callable[..., Engine]) -> None:
    engine = make()
    pooled = engine.admit("r1", TEXT)
    engine.pool.extend(pooled, 8)
    engine.before_write = lambda layer: engine.kvd.lose_pool() if layer == 2 else None
    with pytest.raises(StepFailed, match="pool_lost"):
        engine.step(pooled, TEXT, 0, 8, last=True)
    with pytest.raises(Exception, match="pool_lost"):
        engine.pool.extend(pooled, 16)
    engine.kvd.wait_all_free()


def test_an_aborted_request_is_not_saved_into_blocks_that_are_another_s(
    make: Callable[..., Engine],
) -> None:
    """The abort comes while the step runs: kvd refuses the next save, and the step ends.

    What kvd did not know of when it came may still be copied: the step keeps its blocks until then.
    """
    engine = make()
    pooled = engine.admit("r1", TEXT)
    engine.pool.extend(pooled, 8)

    def abort(layer: int) -> None:
        if layer == 3:
            engine.kvd.abort("r1")
            left = 40 - len(pooled.blocks)
            assert not set(engine.kvd.reserve("r2", left)) & set(pooled.blocks)

    engine.before_write = abort
    with pytest.raises(StepFailed, match="block_poisoned"):
        engine.step(pooled, TEXT, 0, 8, last=True)
    engine.kvd.wait_all_free()
    assert set(engine.kvd.reserve("r3", len(pooled.blocks))) == set(pooled.blocks)


def test_a_step_has_a_deadline(make: Callable[..., Engine]) -> None:
    """A slot that somebody else holds for ever ends the step with a code, in time."""
    engine = make()
    engine.kvd.take(1, 1.0)
    pooled = engine.admit("r1", TEXT)
    engine.pool.extend(pooled, 8)
    with pytest.raises(StepFailed, match="deadline_exceeded"):
        engine.step(pooled, TEXT, 0, 8, last=True, s=0.2)


@pytest.mark.timeout(20)
def test_a_step_that_has_failed_waits_for_no_slot(make: Callable[..., Engine]) -> None:
    """The save of layer 0 fails while compute waits for a slot that somebody else holds."""
    engine = make((Rule(Fail(), stream="save", kind="copy"),))
    engine.kvd.take(1, 1.0)
    pooled = engine.admit("r1", TEXT)
    engine.pool.extend(pooled, 8)
    with pytest.raises(StepFailed, match="injected"):
        engine.step(pooled, TEXT, 0, 8, last=True, s=3600.0)


def test_the_layers_of_a_quarantined_slot_move_to_the_spare(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.prefill("r1", TEXT[:8])
    engine.kvd.quarantined.add(1)
    with pytest.raises(StepFailed) as caught:
        engine.prefill("r2", TEXT[:8])
    assert (caught.value.code, caught.value.slot) == ("slot_quarantined", 1)
    engine.kvd.abort("r2")
    assert engine.pipeline.rebind(1)
    assert not engine.pipeline.rebind(2), "there is one spare"
    assert engine.pipeline.figures().spares_left == 0
    assert engine.prefill("r3", TEXT) == 8


def test_an_engine_that_stops_in_the_middle_lets_every_slot_go(
    make: Callable[..., Engine],
) -> None:
    engine = make(DELAYS[3])
    engine.prefill("r1", TEXT[:8])
    pooled = engine.admit("r2", TEXT)
    engine.pool.extend(pooled, 16)

    def stop(layer: int) -> None:
        if layer == 3:
            raise StepFailed("aborted", "the request was aborted")

    engine.before_write = stop
    with pytest.raises(StepFailed, match="aborted"):
        engine.step(pooled, TEXT, pooled.hit_tokens, 16, last=True)
    engine.kvd.wait_all_free()
    engine.before_write = lambda layer: None
    engine.kvd.abort("r2")
    assert engine.prefill("r3", TEXT) == 8


def test_misuse_is_refused(make: Callable[..., Engine]) -> None:
    engine = make()
    with pytest.raises(RuntimeError, match="no step is running"):
        engine.pipeline.before_write(0)
    pooled = engine.admit("r1", TEXT)
    engine.pool.extend(pooled, 4)
    request = StepRequest("r1", engine.device_blocks[:1], tuple(pooled.blocks), 0, 4)
    engine.pipeline.begin_step([request], 5.0)
    with pytest.raises(RuntimeError, match="has not ended"):
        engine.pipeline.begin_step([request], 5.0)
    engine.pipeline.abort_step()
    engine.pipeline.abort_step()
    engine.kvd.wait_all_free()
