"""Hot buffers under any sequence of steps, truncations, preemptions and failing loads."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_shim.hot_native import NativeBooks
from engine_shim.hot_residency import ClockResidency
from tests.stateful.hot_world import (
    LAYERS,
    MAX_TOKENS,
    REQUESTS,
    SLOT_COUNTS,
    WIDTH_MAX,
    HotWorld,
)
from tests.stateful.profiles import machine_settings

a_request = st.sampled_from(REQUESTS)
a_selection = st.lists(st.integers(-1, MAX_TOKENS - 1), min_size=1, max_size=4)
selections = st.lists(a_selection, min_size=WIDTH_MAX, max_size=WIDTH_MAX)


class HotMachine(RuleBasedStateMachine):
    """Draws what happens; the world asserts."""

    def __init__(self) -> None:
        super().__init__()
        self.world = HotWorld(SLOT_COUNTS[0])

    def is_running(self, name: str) -> bool:
        model = self.world.open.get(name)
        return model is not None and not model.is_preempted

    @initialize(
        slots=st.sampled_from(SLOT_COUNTS),
        prompt=st.integers(0, 12),
        is_native=st.booleans(),
    )
    def begin(self, slots: int, prompt: int, is_native: bool) -> None:
        self.world.close()
        self.world = HotWorld(slots, NativeBooks() if is_native else ClockResidency)
        self.world.open_request(REQUESTS[0])
        if prompt:
            self.world.land(REQUESTS[0], prompt)

    @rule(name=a_request, prompt=st.integers(0, 8))
    def open(self, name: str, prompt: int) -> None:
        if name not in self.world.open:
            self.world.open_request(name)
            if prompt and name in self.world.open:
                self.world.land(name, prompt)

    @rule(name=a_request, width=st.integers(1, WIDTH_MAX), picks=selections)
    def step(self, name: str, width: int, picks: list[list[int]]) -> None:
        if self.is_running(name):
            self.world.step(name, width, picks, LAYERS)

    @rule(picks=st.lists(a_selection, min_size=1, max_size=4))
    def several_steps(self, picks: list[list[int]]) -> None:
        for pick in picks:
            for name in REQUESTS:
                if self.is_running(name):
                    self.world.step(name, 1, [pick], LAYERS)

    @rule(
        name=a_request,
        width=st.integers(1, WIDTH_MAX),
        picks=selections,
        stop_at=st.integers(1, LAYERS - 1),
    )
    def step_given_up(self, name: str, width: int, picks: list[list[int]], stop_at: int) -> None:
        if self.is_running(name):
            self.world.step(name, width, picks, stop_at)

    @rule(name=a_request, width=st.integers(1, WIDTH_MAX), picks=selections, keep=st.integers(0, 3))
    def step_with_rejected_drafts(
        self, name: str, width: int, picks: list[list[int]], keep: int
    ) -> None:
        if self.is_running(name):
            before = self.world.open[name].num_tokens
            self.world.step(name, width, picks, LAYERS)
            self.world.truncate(name, min(before + keep, self.world.open[name].num_tokens))

    @rule(name=a_request, rejected=st.sampled_from([1, 2, 3, MAX_TOKENS]))
    def truncate(self, name: str, rejected: int) -> None:
        model = self.world.open.get(name)
        if model is not None:
            self.world.truncate(name, max(0, model.num_tokens - rejected))

    @rule(name=a_request, count=st.integers(1, 5), again=st.integers(0, 3))
    def land(self, name: str, count: int, again: int) -> None:
        model = self.world.open.get(name)
        if model is not None and model.num_tokens + count <= MAX_TOKENS:
            self.world.land(name, count + min(again, model.num_tokens), again)

    @rule(name=a_request, again=st.integers(1, 2))
    def hot_rows_come_again_from_elsewhere(self, name: str, again: int) -> None:
        model = self.world.open.get(name)
        if not self.is_running(name) or model is None or model.num_tokens < again:
            return
        own = list(range(model.num_tokens - again, model.num_tokens))
        self.world.step(name, 1, [own], LAYERS)
        self.world.truncate(name, min(own[-1] + 1, model.num_tokens))
        self.world.land(name, again, again)
        self.world.step(name, 1, [own], LAYERS)

    @rule(name=a_request)
    def next_request_takes_over_a_buffer(self, name: str) -> None:
        if self.is_running(name):
            self.world.step(name, 1, [[0, 1]], LAYERS)
            self.world.close_request(name)
            self.world.open_request(name)
        if self.is_running(name):
            self.world.land(name, 2)
            self.world.step(name, 1, [[0, 1]], LAYERS)

    @rule(name=a_request)
    def preempt_or_resume(self, name: str) -> None:
        model = self.world.open.get(name)
        if model is not None:
            (self.world.resume if model.is_preempted else self.world.preempt)(name)

    @rule(name=a_request)
    def close(self, name: str) -> None:
        if name in self.world.open:
            self.world.close_request(name)

    @precondition(lambda self: self.world.is_hung)
    @rule(name=a_request)
    def hand_over_while_a_load_hangs(self, name: str) -> None:
        if name in self.world.open:
            self.world.close_request(name)
            self.world.open_request(name)

    @rule(name=a_request, beyond=st.integers(0, 3))
    def read_hole(self, name: str, beyond: int) -> None:
        if self.is_running(name):
            self.world.read_hole(name, beyond)

    @rule(trouble=st.sampled_from(["fail", "hang"]))
    def next_load_goes_wrong(self, trouble: str) -> None:
        self.world.trouble = trouble

    @rule(name=a_request, picks=a_selection)
    def step_again_after_a_failed_load(self, name: str, picks: list[int]) -> None:
        if self.is_running(name):
            self.world.trouble = "fail"
            for _ in range(2):
                self.world.step(name, 1, [picks], LAYERS)

    @precondition(lambda self: self.world.is_hung)
    @rule()
    def resume_stream(self) -> None:
        self.world.resume_stream()

    @invariant()
    def books_agree(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.close()


HotMachine.TestCase.settings = machine_settings(150, 40)
TestHotMachine = pytest.mark.slow(HotMachine.TestCase)
