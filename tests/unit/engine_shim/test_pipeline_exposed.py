"""What compute waits for, in virtual time: max(0, transfer - compute), to the nanosecond.

The model
---------
Layers 0 .. R-1, layer i in slot s(i), p(i) = the last layer before i in that slot. A load takes T,
a save S, writing rows W, attention C; the control plane takes no time. `ahead` is the lookahead.
Loads share one copy engine, saves another; each takes its copies in layer order.

    reach(i)   = done(i-1)                          compute comes to the layer; reach(0) = 0
    free(i)    = max(done(p(i)), saved(p(i)))       its slot may be written; 0 without p(i)
    issue(i)   = max(issue(i-1), reach(max(0, i-ahead)), free(i))
    loaded(i)  = max(issue(i), loaded(i-1)) + T
    start(i)   = max(reach(i), loaded(i))           exposed(i) = start(i) - reach(i)
    written(i) = start(i) + W                       done(i) = written(i) + C
    turn(i)    = max(written(i), sent(i-1))         the saver comes to the layer
    sent(i)    = max(turn(i), loaded(k) of every k with issue(k) <= turn(i))
    saved(i)   = max(sent(i), saved(i-1)) + S

The set in `sent(i)` needs values of later layers. None of those that count depends on saved(i),
which comes after turn(i): so it is evaluated with saved(i), saved(i+1) ... infinite.

Without saves, ahead = 1 and two buffers or more it folds to exposed(0) = T and
exposed(i) = max(0, T - (W + C)); with one buffer nothing is hidden: exposed(i) = T.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine_shim.device_virtual import Link
from engine_shim.pipeline import PipelineOptions, PrefillPipeline
from engine_shim.ring import device_layout
from engine_shim.steps import StepRequest
from kvd.plan.layout import BlockLayout
from kvd.plan.ring import RingPlan, plan_ring
from kvd.wire.layout import BlockLayoutSpec, Part
from tests.unit.engine_shim.fake_kvd import FakeKvd
from tests.unit.engine_shim.virtual_threads import Baton, SharedDevice, virtual_threads

LAYERS = 7
BLOCK = 4
ROW = 64
BYTES_PER_S = 1_000_000
BLOCK_NS = BLOCK * ROW * 1000
"""Time of one block's copy."""


@dataclass(frozen=True)
class Schedule:
    """loads, saves: blocks; write_ns, compute_ns: of each layer; saves of 0 blocks: none at all."""

    buffers: int
    lookahead: int
    loads: int
    saves: int
    write_ns: int
    compute_ns: int

    def slot_of(self) -> list[int]:
        """Round robin."""
        return [layer % min(self.buffers, LAYERS) for layer in range(LAYERS)]


def expected(plan: Schedule) -> list[float]:
    """Exposed delay of each layer, by the model in the header."""
    saved = [math.inf if plan.saves else 0.0] * LAYERS
    sent = [0.0] * LAYERS
    if plan.saves:
        for layer in range(LAYERS):
            issue, loaded, _, written = _times(plan, saved)
            turn = max(written[layer], sent[layer - 1] if layer else 0.0)
            assume(turn not in issue)  # at one instant either may be first
            begun = [end for at, end in zip(issue, loaded, strict=True) if at <= turn]
            sent[layer] = max([turn, *begun])
            before = saved[layer - 1] if layer else 0.0
            saved[layer] = max(sent[layer], before) + plan.saves * BLOCK_NS
    return _times(plan, saved)[2]


def _times(
    plan: Schedule, saved: Sequence[float]
) -> tuple[list[float], list[float], list[float], list[float]]:
    """issue, loaded, exposed and written of each layer, given when saves end."""
    slots = plan.slot_of()
    issue, loaded, exposed, written, reach, done = ([0.0] * LAYERS for _ in range(6))
    for i in range(LAYERS):
        reach[i] = done[i - 1] if i else 0.0
        before = [k for k in range(i) if slots[k] == slots[i]]
        free = max(done[before[-1]], saved[before[-1]]) if before else 0.0
        issue[i] = max(issue[i - 1] if i else 0.0, reach[max(0, i - plan.lookahead)], free)
        loaded[i] = max(issue[i], loaded[i - 1] if i else 0.0) + plan.loads * BLOCK_NS
        start = max(reach[i], loaded[i])
        exposed[i] = start - reach[i] if start < math.inf else math.inf
        written[i] = start + plan.write_ns
        done[i] = written[i] + plan.compute_ns
    return issue, loaded, exposed, written


def ring_of(plan: Schedule, count: int) -> RingPlan:
    """The ring of a schedule, for so many blocks."""
    return plan_ring(
        [(Part("main", ROW),) for _ in range(LAYERS)],
        independent=(),
        num_shared=plan.buffers,
        num_blocks=count,
        block_tokens=BLOCK,
        lookahead=plan.lookahead,
    )


def measured(plan: Schedule, answer_ns: int = 0) -> list[int]:
    """Exposed delay of each layer of a step that loads a prefix and saves what follows.

    answer_ns: how long kvd takes to hear and answer what was said until it began to.
    """
    count = plan.loads + max(1, plan.saves)
    parts = [[Part("main", ROW)] for _ in range(LAYERS)]
    layout = BlockLayoutSpec("times", "uint8", BLOCK, parts)
    ring = ring_of(plan, count)
    assert list(ring.slot_of) == plan.slot_of()
    links = {name: Link(name, BYTES_PER_S) for name in ("load", "save")}
    device = SharedDevice(links, move_bytes=False)
    with virtual_threads(device) as baton:
        device_of_slots, size = device_layout(ring)
        memory = device.alloc(size, "slots")
        kvd = FakeKvd(layout, len(ring.slots), num_blocks=count)
        blocks = tuple(kvd.reserve("r", count))

        def step(first: int, end: int, *, contributes: bool) -> list[int]:
            """Compute tokens [first, end) of all layers, with a pipeline of its own."""
            made = PrefillPipeline(
                kvd,
                device,
                ring,
                memory,
                device_of_slots,
                BlockLayout(layout),
                PipelineOptions(contributes=contributes),
            )
            exposed = []
            made.begin_step([StepRequest("r", tuple(range(count)), blocks, first, end)], 1000.0)
            for layer in range(LAYERS):
                reached = baton.now()
                made.before_write(layer)
                exposed.append(baton.now() - reached)
                baton.spend(plan.write_ns)
                made.written(layer)
                baton.spend(plan.compute_ns)
                made.computed(layer)
            made.end_step(wait_saves=True)
            assert round(made.figures().exposed_s * 1e9) == sum(exposed)
            made.close()
            return exposed

        prefix = plan.loads * BLOCK
        step(0, prefix, contributes=True)
        kvd.wait_all_free()
        ended = threading.Event()
        if answer_ns:
            kvd.hold()
            server = baton.spawn(lambda: answer(kvd, baton, answer_ns, ended))
        found = step(prefix, count * BLOCK, contributes=plan.saves > 0)
        ended.set()
        if answer_ns:
            assert baton.wait(lambda: server.is_over)
            kvd.deliver()
        kvd.close()
        memory.close()
    return found


def answer(kvd: FakeKvd, baton: Baton, answer_ns: int, ended: threading.Event) -> None:
    """Be a kvd that takes so long for each batch."""
    while baton.wait(lambda: kvd.num_held > 0 or ended.is_set()) and not ended.is_set():
        count = kvd.num_held
        baton.spend(answer_ns)
        kvd.deliver(count)


@pytest.mark.parametrize("saves", [0, 1])
def test_a_kept_step_waits_for_one_answer(saves: int) -> None:
    """That to the step; the layers' own are not waited for, however long they take."""
    late_ns = 3 * BLOCK_NS
    plan = Schedule(LAYERS, 1, loads=2, saves=saves, write_ns=3, compute_ns=5 * BLOCK_NS)
    first, *rest = measured(plan, late_ns)
    assert (first, rest) == (late_ns + 2 * BLOCK_NS, [0] * (LAYERS - 1))


def test_without_it_layers_wait_for_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.steps.STEPS_MAX", 0)
    late_ns = 4 * BLOCK_NS
    plan = Schedule(LAYERS, 1, loads=2, saves=0, write_ns=3, compute_ns=5 * BLOCK_NS)
    first, *rest = measured(plan, late_ns)
    assert first >= late_ns + 2 * BLOCK_NS, "the step's and its own, which go together"
    assert max(rest) > 0


@pytest.mark.parametrize("buffers", [2, 3, 4, LAYERS, LAYERS + 2])
@pytest.mark.parametrize("compute_ns", [1, BLOCK_NS, 2 * BLOCK_NS, 2 * BLOCK_NS - 7, 5 * BLOCK_NS])
def test_exposed_is_transfer_less_compute(buffers: int, compute_ns: int) -> None:
    plan = Schedule(buffers, 1, loads=2, saves=0, write_ns=3, compute_ns=compute_ns)
    hidden = max(0, 2 * BLOCK_NS - (compute_ns + 3))
    assert measured(plan) == [2 * BLOCK_NS] + [hidden] * (LAYERS - 1)
    assert expected(plan) == [2 * BLOCK_NS] + [hidden] * (LAYERS - 1)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_one_buffer_hides_nothing(lookahead: int) -> None:
    plan = Schedule(1, lookahead, loads=2, saves=0, write_ns=3, compute_ns=9 * BLOCK_NS)
    assert measured(plan) == [2 * BLOCK_NS] * LAYERS


def test_no_lookahead_hides_nothing() -> None:
    plan = Schedule(4, 0, loads=2, saves=0, write_ns=3, compute_ns=9 * BLOCK_NS)
    assert measured(plan) == [2 * BLOCK_NS] * LAYERS


@settings(max_examples=120, deadline=None)
@given(
    buffers=st.sampled_from([1, 2, 3, 4, LAYERS, LAYERS + 1]),
    lookahead=st.integers(0, LAYERS - 1),
    loads=st.integers(1, 3),
    saves=st.integers(0, 3),
    write_ns=st.integers(1, BLOCK_NS),
    compute_ns=st.one_of(
        st.integers(1, 5 * BLOCK_NS), st.integers(1, 5).map(lambda blocks: blocks * BLOCK_NS)
    ),
)
def test_the_pipeline_waits_as_long_as_its_model(
    buffers: int, lookahead: int, loads: int, saves: int, write_ns: int, compute_ns: int
) -> None:
    plan = Schedule(buffers, lookahead, loads, saves, write_ns, compute_ns)
    assert measured(plan) == expected(plan)
