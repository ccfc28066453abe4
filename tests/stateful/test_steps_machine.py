"""Native decode steps under any sequence of widths, rejections, breaks and failing copies."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.stateful.profiles import machine_settings
from tests.stateful.steps_world import (
    LAYERS,
    MAX_TOKENS,
    REQUESTS,
    SLOT_COUNTS,
    WIDTH_MAX,
    StepsWorld,
)

a_request = st.sampled_from(REQUESTS)
widths = st.integers(1, WIDTH_MAX)
CALLS = LAYERS + 2  # of choose and attend, in a step


class StepsMachine(RuleBasedStateMachine):
    """Draws what happens; the world asserts."""

    def __init__(self) -> None:
        super().__init__()
        self.world = StepsWorld(SLOT_COUNTS[0])

    def is_running(self, name: str) -> bool:
        model = self.world.open.get(name)
        return model is not None and not model.is_preempted

    @initialize(
        slots=st.sampled_from(SLOT_COUNTS),
        writes_region=st.booleans(),
        prompt=st.integers(0, 10),
        seed=st.integers(0, 3),
    )
    def begin(self, slots: int, writes_region: bool, prompt: int, seed: int) -> None:
        self.world.close()
        self.world = StepsWorld(slots, writes_region=writes_region, seed=seed)
        self.world.open_request(REQUESTS[0], prompt)

    @rule(name=a_request, prompt=st.integers(0, 9))
    def open(self, name: str, prompt: int) -> None:
        if name not in self.world.open:
            self.world.open_request(name, prompt)

    @rule(name=a_request, width=widths, again=st.integers(0, 2), ordered=st.booleans())
    def step(self, name: str, width: int, again: int, ordered: bool) -> None:
        if self.is_running(name):
            self.world.step(name, width, again=again, ordered=ordered)

    @rule(name=a_request, width=widths, ordered=st.booleans(), count=st.integers(2, 4))
    def several_steps(self, name: str, width: int, ordered: bool, count: int) -> None:
        for _ in range(count if self.is_running(name) else 0):
            self.world.step(name, width, again=0, ordered=ordered)

    @rule(name=a_request, width=widths, ordered=st.booleans(), stop_at=st.integers(0, CALLS - 1))
    def step_that_breaks_off(self, name: str, width: int, ordered: bool, stop_at: int) -> None:
        if self.is_running(name):
            self.world.step(name, width, again=1, ordered=ordered, stop_at=stop_at)
            self.world.step(name, width, again=0, ordered=ordered)

    @rule(name=a_request, ordered=st.booleans())
    def step_with_a_failing_copy(self, name: str, ordered: bool) -> None:
        if self.is_running(name):
            self.world.fails = True
            self.world.step(name, 1, again=1, ordered=ordered)
            self.world.fails = False
            self.world.step(name, 1, again=0, ordered=ordered)

    @rule(name=a_request, width=widths, keep=st.integers(0, 2), ordered=st.booleans())
    def step_with_rejected_drafts(self, name: str, width: int, keep: int, ordered: bool) -> None:
        if self.is_running(name):
            before = self.world.open[name].num_tokens
            self.world.step(name, width, again=0, ordered=ordered)
            self.world.truncate(name, min(before + keep, self.world.open[name].num_tokens))

    @rule(name=a_request, rejected=st.sampled_from([1, 2, MAX_TOKENS]))
    def truncate(self, name: str, rejected: int) -> None:
        model = self.world.open.get(name)
        if model is not None:
            self.world.truncate(name, max(0, model.num_tokens - rejected))

    @rule(name=a_request)
    def preempt_or_resume(self, name: str) -> None:
        if self.is_running(name):
            self.world.preempt(name)
        elif name in self.world.open:
            self.world.resume(name)

    @rule(name=a_request)
    def end(self, name: str) -> None:
        if name in self.world.open:
            self.world.close_request(name)

    @invariant()
    def books_are_right(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.close()


StepsMachine.TestCase.settings = machine_settings(100, 30)
TestStepsMachine = pytest.mark.slow(StepsMachine.TestCase)
