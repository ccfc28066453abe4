"""Residency under any sequence of steps, rejected drafts, preemptions and new requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvd_kernels.residency import residency_kernels
from tests.stateful.profiles import machine_settings
from tests.stateful.residency_world import (
    QUERIES,
    SLOT_COUNTS,
    TOKENS_MAX,
    DefinedTable,
    NativeTable,
    ResidencyWorld,
)

DEFINED = "defined"

a_width = st.integers(1, QUERIES)
some_scores = st.lists(st.integers(0, 9), min_size=QUERIES * 9, max_size=QUERIES * 9)
some_picks = st.lists(
    st.lists(st.integers(-1, TOKENS_MAX - 1), min_size=1, max_size=6),
    min_size=QUERIES,
    max_size=QUERIES,
)


class ResidencyMachine(RuleBasedStateMachine):
    """Draws what happens; the world asserts."""

    world: ResidencyWorld

    @initialize(
        slots=st.sampled_from(SLOT_COUNTS),
        kind=st.sampled_from([DEFINED, DEFINED, *residency_kernels()]),
        layout=st.sampled_from(["map", "index"]),
        prompt=st.integers(0, 30),
    )
    def begin(self, slots: int, kind: str, layout: str, prompt: int) -> None:
        books = DefinedTable(slots) if kind == DEFINED else NativeTable(slots, kind, layout)
        self.world = ResidencyWorld(slots, books)
        self.world.land(prompt)

    @rule(width=a_width, drawn=some_scores)
    def search(self, width: int, drawn: list[int]) -> None:
        scores = np.resize(np.array(drawn, np.float32), (QUERIES, TOKENS_MAX))
        self.world.step_by_scores(width, scores)

    @rule(width=a_width, picks=some_picks)
    def select(self, width: int, picks: list[list[int]]) -> None:
        self.world.step_by_positions(width, picks)

    @rule(picks=some_picks, rejected=st.integers(1, QUERIES))
    def select_and_reject_drafts(self, picks: list[list[int]], rejected: int) -> None:
        self.world.step_by_positions(QUERIES, picks)
        self.world.truncate(max(0, self.world.num_tokens - rejected))
        self.world.step_by_positions(1, picks)

    @rule(num_tokens=st.integers(0, TOKENS_MAX))
    def truncate(self, num_tokens: int) -> None:
        self.world.truncate(min(num_tokens, self.world.num_tokens))

    @rule(count=st.integers(1, 9))
    def land(self, count: int) -> None:
        self.world.land(count)

    @rule()
    def preempt(self) -> None:
        self.world.preempt()

    @rule(prompt=st.integers(1, 30), picks=some_picks)
    def next_request_takes_the_buffer_over(self, prompt: int, picks: list[list[int]]) -> None:
        self.world.new_request()
        self.world.land(prompt)
        self.world.step_by_positions(1, picks)

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


ResidencyMachine.TestCase.settings = machine_settings(150, 30)
TestResidencyMachine = pytest.mark.slow(ResidencyMachine.TestCase)
