"""The vLLM connector's scheduler side under any sequence of requests, preemptions and failures.

The engine is a dumb model of vLLM's scheduler, kvd is the real machine, and a row is the text that
it is made from: attention asserts every row that it reads (`tests.unit.engine_shim.vllm`).
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.stateful.profiles import machine_settings
from tests.unit.engine_shim.vllm.rig import FakeClient
from tests.unit.engine_shim.vllm.stub_engine import StubEngine, StubRequest
from tests.unit.engine_shim.vllm.stub_fixture import MODES, assert_all_let_go, plan_of
from tests.unit.engine_shim.vllm.stub_worker import Fault

BODIES = ("abcdefghijklmnopqrstuvwx", "abcdefghABCDEFGHIJKLMNOP", "zyxwvutsrqponmlkjihgfedc")
REQUESTS_MAX = 24
LAYERS = 4
OTHER_ENGINE = "another engine's"
KINDS = ("step", "save", "alone", "shed")

faults = st.builds(Fault, st.sampled_from(KINDS), st.integers(0, LAYERS), st.integers(0, 2))


class SchedulerMachine(RuleBasedStateMachine):
    """Draws what happens; engine, worker and kvd assert."""

    kvd: FakeClient
    engine: StubEngine

    @initialize(
        mode=st.sampled_from(sorted(MODES)),
        blocks=st.integers(7, 16),
        room=st.integers(0, 8),
        drafts=st.integers(0, 1),
        depth=st.integers(1, 2),
        per_block=st.sampled_from([1, 2]),
        chunk=st.integers(3, 16),
        recompute=st.booleans(),
    )
    def begin(
        self,
        mode: str,
        blocks: int,
        room: int,
        drafts: int,
        depth: int,
        per_block: int,
        chunk: int,
        recompute: bool,
    ) -> None:
        plan = plan_of(mode, blocks, drafts)
        self.kvd = FakeClient(plan, blocks + room)
        self.engine = StubEngine(
            plan,
            self.kvd,
            chunk=chunk,
            depth=depth,
            per_block=per_block,
            recompute=recompute,
            max_running=3,
        )
        # Two requests that part at the end of a block share it, with the draft rows of whoever
        # came first: that costs a guess, and no answer. Examples look at the last block itself.
        self.engine.worker.trusts_drafts = True
        self.is_quiet = True

    @precondition(lambda self: len(self.engine.all) < REQUESTS_MAX)
    @rule(body=st.sampled_from(BODIES), size=st.integers(2, 24), outputs=st.integers(1, 10))
    def add(self, body: str, size: int, outputs: int) -> None:
        name = f"r{len(self.engine.all)}"
        self.engine.add(name, body[:size], min(outputs, size - 1))

    @rule(steps=st.integers(1, 3))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.side._refused_at.clear()  # time passes
            self.engine.step()

    @rule(fault=faults)
    def failing_step(self, fault: Fault) -> None:
        self.is_quiet = False
        self.engine.side._refused_at.clear()
        self.engine.step(fault)

    @rule(which=st.integers(0, REQUESTS_MAX))
    def abort(self, which: int) -> None:
        alive = self.alive()
        if alive:
            self.engine.abort(alive[which % len(alive)].request_id)

    @precondition(lambda self: self.engine.running)
    @rule(which=st.integers(0, 3))
    def preempt(self, which: int) -> None:
        running = self.engine.running
        self.engine.preempt(running[which % len(running)])

    @rule(is_away=st.booleans())
    def kvd_goes_away_or_comes_back(self, is_away: bool) -> None:
        self.kvd.is_away = is_away
        self.is_quiet = self.is_quiet and not is_away

    @precondition(lambda self: not self.kvd.is_away)
    @rule(count=st.integers(1, 8))
    def another_engine_takes_blocks(self, count: int) -> None:
        pool = self.kvd.machine.state.pool
        assert pool is not None
        free = len(pool.blocks.free)
        if free:
            self.is_quiet = False
            self.kvd.reserve(OTHER_ENGINE, min(count, free))

    @precondition(lambda self: not self.kvd.is_away)
    @rule()
    def another_engine_ends(self) -> None:
        self.kvd.unpin(OTHER_ENGINE)

    def alive(self) -> list[StubRequest]:
        return [one for one in self.engine.all.values() if not one.is_done]

    @invariant()
    def nobody_runs_without_the_side_knowing(self) -> None:
        if hasattr(self, "engine"):
            assert set(self.engine.side._requests) <= {one.request_id for one in self.alive()}

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.kvd.is_away = False
        self.kvd.unpin(OTHER_ENGINE)
        self.engine.run()
        self.engine.step()  # what kvd did not hear of is told again
        if self.is_quiet:
            ends = {one.error for one in self.engine.all.values()}
            assert ends <= {"", "aborted"}, "nothing went wrong, so nobody ends with an error"
        assert_all_let_go(self.engine)
        self.kvd.close()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = machine_settings(150, 30)
