"""The scheduler's side of the connector with sparse decode offload.

vLLM allocates, frees and shares its blocks as ever, since a block's rows in the region stand at its
id: its prefix cache stays on. This side only says which blocks are given out anew, to kvd with a
generation and to the workers, and which requests have ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
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


class SparseScheduler:
    """All requests of one engine."""

    def __init__(
        self, client: KvdClient, region: str, block_tokens: int, logger: Logger, *, recompute: bool
    ) -> None:
        """Use an open client.

        Args:
            region: name of the engine's decode region.
            recompute: whether failed requests are computed again, or end.
        """
        self._client = client
        self._life = client.generation
        self._region = region
        self._size = block_tokens
        self._log = logger
        self.recompute = recompute
        self._generations = Counter[int]()
        self._forget: list[str] = []
        self._failed: dict[str, Failure] = {}
        self._failures = Counter[str]()
        self._ends: dict[str, Failure] = {}

    def order(self, scheduled: Iterable[Scheduled], preempted: Iterable[str]) -> SparseOrder:
        """What a step computes; tells kvd of the blocks that are given out anew."""
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
        return SparseOrder(tuple(shares), tuple(forget))

    def _allocated(self, blocks: list[int]) -> None:
        """Say that what is in these blocks is void; a kvd that was restarted lost the region."""
        self._generations.update(blocks)
        is_there = self._client.state is LinkState.ATTACHED
        if not blocks or not is_there or self._client.generation != self._life:
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

    def close(self) -> None:
        """Say goodbye. Idempotent."""
        with suppress(KvdRefused):
            self._client.goodbye(CLOSE_S)
        self._client.close()
