"""From the live node to what is shown of steps: how many keep blocks, and which keep a block.

A step keeps what it loads by a pin of its own, and what it saves into as an open save does. So
those that load a block are among its pins; those that save into it are found here.
"""

from __future__ import annotations

import heapq

from kvd.core.blocks import BlockTable
from kvd.core.ids import MemberRef
from kvd.core.state import State
from kvd.server.models import StepCounts

NO_STEPS = StepCounts(open=0, closing=0)


def step_counts(state: State) -> dict[MemberRef, StepCounts]:
    """Steps by state, of the members that have any.

    In one go: a member has `kvd.core.steps.STEPS_MAX` of them at most, and seldom more than two.
    """
    counts: dict[MemberRef, list[int]] = {}
    if state.pool is not None:
        for step, kept in state.pool.blocks.steps.items():
            counts.setdefault(step.member, [0, 0])[kept.closed] += 1
    return {ref: StepCounts(open=one[0], closing=one[1]) for ref, one in counts.items()}


def saving_steps(table: BlockTable, block: int, most: int) -> list[str]:
    """Steps that save into a block, at most so many."""
    if block not in table.saving:
        return []
    steps = (step for step, kept in table.steps.items() if block in kept.targets)
    return heapq.nsmallest(most, map(str, steps))
