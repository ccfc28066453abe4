"""Whose failure a load is: of its own request where that leaves others to go on with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine_shim.steps import Step, checksum_failure
from kvd.plan.sums import BadSpan

OF_ONE_REQUEST: Final = frozenset(
    {
        "block_not_reserved",
        "block_poisoned",
        "request_ended",
        "span_busy",
        "span_unwritten",
    }
)
"""Refusals of a load that say something of its blocks, not of the slot or of kvd."""

NOT_OF_ROWS: Final = frozenset({"pool_lost", "request_ended"})
"""Refusals, heard when a load has ended well, that say nothing of the rows: kvd died after that, or
one of the requests is not wanted any more."""


def fail_owners(step: Step, layer: int, bad: Sequence[BadSpan]) -> None:
    """Damaged blocks were loaded: their requests fail, or the step when nothing else is left."""
    damaged = {one.block for one in bad}
    hit = [r for r in step.live if damaged.intersection(r.pool_blocks)]
    for request in hit:
        own = [one for one in bad if one.block in request.pool_blocks]
        step.fail_request(request.request, checksum_failure(layer, own))
    if len(hit) == 0 or not step.live:
        step.fail(checksum_failure(layer, bad))
