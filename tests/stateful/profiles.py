"""Settings of the hypothesis machines: the same every time, bounded, deeper on request."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

from tests.exhaustive.depth import depth

ONLY_WHETHER = "KVD_TEST_ONLY_WHETHER"
"""Set to 1 where only whether a machine fails is of interest, not the shortest story."""


def machine_settings(examples: int, steps: int) -> settings:
    """Settings of one machine in a normal run; `KVD_TEST_DEPTH` multiplies the examples.

    A deeper run draws new examples each time; the normal one is derandomised.
    """
    times = depth()
    shrinking = () if os.environ.get(ONLY_WHETHER) == "1" else (Phase.shrink,)
    return settings(
        max_examples=examples * times,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=times == 1,
        report_multiple_bugs=False,
        phases=(Phase.explicit, Phase.generate, *shrinking),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
