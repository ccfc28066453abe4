"""The scheduler's side of the connector with sparse decode offload.

vLLM allocates, frees and shares its blocks as ever, since a block's rows in the region stand at its
id: its prefix cache stays on. This side only says which blocks are given out anew, to kvd with a
generation and to the workers, and which requests have ended.

It also notices that a kvd which came back has lost the region, and begins another life of it: what
was computed is void, prefixes are forgotten, and who is new waits until the region is there again.

    whole ----- kvd is back without the region: life + 1 ----> lost
      ^                                                          |
      +------- kvd has it: a worker, told of the life, made it --+
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from logging import Logger
from typing import Any, Final

from engine_shim.client import KvdClient, KvdRefused
from engine_shim.client.session import LinkState
from engine_shim.vllm.messages import Failure, SparseOrder, SparseShare, StepReport
from engine_shim.vllm.shares import Scheduled

CLOSE_S: Final = 5.0
FAILURES_MAX: Final = 3
"""Steps that may fail one request before it ends."""

LOOK_S: Final = 1.0
"""How long a step waits for kvd to say whether it has the region."""

LOST: Final = "pool_lost"

NULL_BLOCK: Final = 0
"""No request of the engine ever has it: what is said of it is of no consequence."""


class SparseScheduler:
    """All requests of one engine."""

    def __init__(
        self,
        client: KvdClient,
        region: str,
        block_tokens: int,
        logger: Logger,
        *,
        deadline_s: float,
        recompute: bool,
    ) -> None:
        """Use an open client, of a kvd that has or gets the region.

        Args:
            region: name of the engine's decode region.
            deadline_s: how long new requests wait for a region that was lost.
            recompute: whether failed requests are computed again, or end.
        """
        self.forget_prefixes: Callable[[], None] = _nothing
        """Makes the engine find no prefix any more; set by who knows its cache."""
        self._client = client
        self._deadline_s = deadline_s
        self._seen = self._lost_in = client.generation
        self._life = self._whole_life = 0
        self._waits: dict[str, float] = {}
        self._region = region
        self._size = block_tokens
        self._log = logger
        self.recompute = recompute
        self._generations = Counter[int]()
        self._forget: list[str] = []
        self._failed: dict[str, Failure] = {}
        self._failures = Counter[str]()
        self._ends: dict[str, Failure] = {}

    # The region -------------------------------------------------------------------------------

    def matched_tokens(self, request: str) -> int | None:
        """Tokens that kvd has beyond the engine's prefix cache, which are none; None: ask later."""
        self._look()
        if self._life == self._whole_life:
            self._waits.pop(request, None)
            return 0
        now = time.monotonic()
        since = self._waits.setdefault(request, now)
        if now - since > self._deadline_s:
            what = f"decode region {self._region} was lost, and is not there again"
            self._ends.setdefault(request, Failure(LOST, what))
        return None

    def _look(self) -> None:
        """Notice that kvd has lost the region, and that it has it again.

        `_seen` is the life of kvd that is known to have it, `_lost_in` the last that had not.
        """
        client = self._client
        generation = client.generation
        if client.state is not LinkState.ATTACHED or generation == self._seen:
            return
        has_region = self._ask()
        if has_region:
            self._seen, self._whole_life = generation, self._life
        elif has_region is not None and generation != self._lost_in:
            self._lost_in = generation
            self._life += 1
            self.forget_prefixes()
            self._log.warning(
                "kvd: kvd was restarted and has lost %s; it is made anew, and requests that run %s",
                self._region,
                "are computed again" if self.recompute else "end",
            )

    def _ask(self) -> bool | None:
        """Whether kvd has the region; None when it does not say."""
        self._generations[NULL_BLOCK] += 1
        about = [(NULL_BLOCK, self._generations[NULL_BLOCK])]
        try:
            self._client.allocated(self._region, about, LOOK_S)
        except KvdRefused as refusal:
            return False if refusal.code == "region_unknown" else None
        return True

    # A step -----------------------------------------------------------------------------------

    def order(self, scheduled: Iterable[Scheduled], preempted: Iterable[str]) -> SparseOrder:
        """What a step computes; tells kvd of the blocks that are given out anew."""
        self._look()
        shares: list[SparseShare] = []
        fresh: list[int] = []
        for one in scheduled:
            hits = one.start // self._size if one.replaces else 0
            new = one.new_blocks[hits:]
            fresh.extend(new)
            end = one.start + one.tokens
            shares.append(
                SparseShare(one.request_id, one.start, end, one.new_blocks, one.replaces, len(new))
            )
        self._allocated(fresh)
        forget, self._forget = [*self._forget, *preempted], []
        return SparseOrder(tuple(shares), tuple(forget), self._life)

    def _allocated(self, blocks: list[int]) -> None:
        """Say that what is in these blocks is void; of a region made anew, all of it is."""
        self._generations.update(blocks)
        is_there = self._client.state is LinkState.ATTACHED
        if not blocks or not is_there or self._client.generation != self._seen:
            return
        pairs = [(block, self._generations[block]) for block in blocks]
        try:
            codes = {code for code in self._client.allocated(self._region, pairs) if code}
        except KvdRefused as refusal:
            codes = {refusal.code}
        if codes:
            self._log.warning("kvd: blocks of %s: %s", self._region, ", ".join(sorted(codes)))

    def reported(self, report: StepReport | None) -> None:
        """The ranks' account of a step; before the engine looks at its outputs."""
        self._failed = dict(report.failed) if report is not None else {}

    def restart_points(self, computed: Mapping[str, int]) -> dict[str, int]:
        """Failed requests, and from which token each is computed again: its first."""
        points = {}
        for request, failure in self._failed.items():
            if request not in computed:
                continue
            points[request] = 0 if self.recompute else computed[request]
            self._failures[request] += 1
            if self.recompute and self._failures[request] > FAILURES_MAX:
                points[request] = computed[request]
                self._ends[request] = failure
        self._failed = {}
        return points

    def take_ends(self) -> dict[str, Failure]:
        """Requests that end with an error now."""
        ends, self._ends = self._ends, {}
        for request, failure in ends.items():
            self._log.error("kvd: request %s ends: %s: %s", request, failure.code, failure.detail)
        return ends

    def finished(self, request: Any) -> None:
        """The request has ended, in whatever way."""
        self._forget.append(str(request.request_id))
        self._failures.pop(request.request_id, None)
        self._ends.pop(request.request_id, None)
        self._waits.pop(request.request_id, None)

    def close(self) -> None:
        """Say goodbye. Idempotent."""
        with suppress(KvdRefused):
            self._client.goodbye(CLOSE_S)
        self._client.close()


def _nothing() -> None:
    """Of an engine that keeps no prefixes."""
