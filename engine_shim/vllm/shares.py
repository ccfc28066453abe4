"""A request's share of a step: which rows are loaded and saved, and into which blocks.

In rolling mode the pool is the primary copy: all rows go there, partial blocks included. In
resident mode the device is: full blocks are saved for later requests, as far as there is room.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_shim.client import KvdRefused
from engine_shim.requests import RequestPool
from engine_shim.steps import StepRequest
from engine_shim.vllm.tracked import Tracked


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request's share of a step, as the engine scheduled it.

    new_blocks: device blocks, all of them when `replaces`, else what is added.
    drafts:     of the tokens, guesses that may be taken back.
    """

    request_id: str
    start: int
    tokens: int
    new_blocks: tuple[int, ...]
    replaces: bool
    drafts: int = 0


def rolling_share(pool: RequestPool, tracked: Tracked, start: int, end: int) -> StepRequest:
    """Tokens [0, start) are loaded, [start, end) saved.

    Raises: KvdRefused: there are no blocks for them, or those before are lost.
    """
    pooled = tracked.pooled
    assert pooled is not None
    pool.commit(pooled, start)
    pool.extend(pooled, end)
    count = -(-end // pool.block_tokens)
    return StepRequest(
        tracked.name, tuple(tracked.blocks[:count]), tuple(pooled.blocks[:count]), start, end
    )


def resident_share(
    pool: RequestPool, tracked: Tracked, share: Scheduled, *, is_away: bool
) -> StepRequest | None:
    """What was found is loaded once, full blocks are saved once; None when there is neither.

    A request that cannot be saved any more loses its `pooled`, and goes on without.

    Raises: KvdRefused: what is to be loaded is lost.
    """
    size, start = pool.block_tokens, share.start
    resident, tracked.hit = start - tracked.hit, 0
    tracked.resident = resident
    # Guesses may be taken back: a block is full when it is so without them.
    end = start + share.tokens - share.drafts
    full = end // size * size
    is_saved = tracked.pooled is not None and full > tracked.saved
    if resident == start and not is_saved:
        return None
    if is_saved and tracked.pooled is not None:
        try:
            if is_away:
                raise KvdRefused("unreachable", path="its socket", detail="kvd is away")
            pool.commit(tracked.pooled, start)
            pool.extend(tracked.pooled, full, optional=True)
        except KvdRefused:
            if resident < start:
                raise
            tracked.pooled = None
            return None
    blocks = tuple(tracked.pooled.blocks) if tracked.pooled is not None else ()
    save_from = tracked.saved
    tracked.saved = max(save_from, min(full, len(blocks) * size))
    return StepRequest(
        tracked.name,
        tuple(tracked.blocks[: -(-end // size)]),
        blocks,
        start,
        end,
        optional=True,
        resident=resident,
        save_from=save_from if is_saved else full,
        save_to=full,
    )
