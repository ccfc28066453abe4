"""The scheduler's side of the connector: look up, reserve, commit, and say what each step moves.

It lives in the engine core process and decides once for all ranks. Calls of kvd are short and have
deadlines; nothing here touches rows.

In rolling mode the pool is the primary copy: a request keeps its blocks pinned while it runs, the
next chunk's blocks are reserved when it is scheduled, and a request for which there are none waits
(`None`) or, once it runs, ends. In resident mode the device is: full blocks are saved for others,
as far as there is room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from functools import partial
from logging import Logger
from typing import Any, Final, TypeVar

from engine_shim.client import KvdClient, KvdRefused
from engine_shim.client.session import LinkState
from engine_shim.requests import POOL_FULL, RequestPool
from engine_shim.steps import StepRequest
from engine_shim.vllm.engine_plan import EnginePlan
from engine_shim.vllm.messages import Failure, StepOrder, StepReport
from engine_shim.vllm.options import ConnectorOptions
from engine_shim.vllm.parting import Parting, Partings
from engine_shim.vllm.shares import Scheduled, resident_share, rolling_share
from engine_shim.vllm.tracked import BlockKeys, Tracked

PAUSE_S: Final = 0.005
"""A request that was refused is not asked for again before: the engine spins while it waits."""

CLOSE_S: Final = 5.0
"""How long the end waits for kvd to hear the goodbye."""

FAILURES_MAX: Final = 3
"""Steps in a row that may fail one request before it ends, however they failed."""

RETURN_S: Final = 10.0
"""Longest time that a failed step waits for kvd to come back."""


R = TypeVar("R")


class SchedulerSide:
    """All requests of one engine."""

    def __init__(
        self,
        plan: EnginePlan,
        options: ConnectorOptions,
        client: KvdClient,
        logger: Logger,
        *,
        chunk_tokens: int,
        hashes_per_block: int,
        recompute: bool,
    ) -> None:
        """Use an open client.

        Args:
            chunk_tokens: most tokens of one step.
            hashes_per_block: hashes of the engine that make a block.
            recompute: whether failed requests are computed again, or end.
        """
        self._plan = plan
        self._options = options
        self._client = client
        self._log = logger
        self._chunk = chunk_tokens
        self._per_block = hashes_per_block
        self.recompute = recompute
        self._size = plan.ring.block_tokens
        self._pool = RequestPool(client, self._size)
        self._requests: dict[str, Tracked] = {}
        self._names: dict[str, str] = {}
        self._forget: list[str] = []
        self._refused_at: dict[str, float] = {}
        self._ends: dict[str, Failure] = {}
        self._ending: set[str] = set()
        self._failed: dict[str, Failure] = {}
        self._steps_ordered = 0
        self._steps_done = 0
        self._parting = Partings(self._pool, logger)

    @property
    def is_rolling(self) -> bool:
        """Whether layers share buffers."""
        return self._plan.mode == "rolling"

    # Admission --------------------------------------------------------------------------------

    def matched_tokens(self, request: Any, local: int) -> int | None:
        """Tokens that the pool has beyond the engine's own `local`; None: ask again later."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            keys = BlockKeys(request.block_hashes, self._per_block)
            tracked = self._requests[request.request_id] = Tracked(request, keys)
        if tracked.request_id in self._ending or self._is_pausing(tracked):
            return None
        if tracked.blocks:
            self._begin_again(tracked)  # it was preempted: its device blocks are gone
        tracked.local = local
        if self._holds_first_chunk(tracked):
            assert tracked.pooled is not None
            return max(0, tracked.pooled.hit_tokens - local)
        try:
            return self._admit(tracked)
        except KvdRefused as refusal:
            return self._put_off(tracked, refusal)

    def _is_pausing(self, tracked: Tracked) -> bool:
        return time.monotonic() - self._refused_at.get(tracked.request_id, 0.0) < PAUSE_S

    def _holds_first_chunk(self, tracked: Tracked) -> bool:
        """Whether it has been admitted before, and only the device had no room."""
        pooled = tracked.pooled
        if pooled is None or not self.is_rolling:
            return False
        if pooled.generation != self._client.generation:
            self._begin_again(tracked)
            return False
        return True

    def _admit(self, tracked: Tracked) -> int:
        """Look the prefix up, and in rolling mode reserve the first chunk.

        Raises: KvdRefused.
        """
        if self._client.state is not LinkState.ATTACHED:
            self._client.retry()
            raise KvdRefused("unreachable", path="its socket", detail="kvd is away")
        total = tracked.request.num_tokens
        pooled = self._pool.admit(tracked.name, tracked.keys, total)
        tracked.pooled, self._names[tracked.name] = pooled, tracked.request_id
        try:
            if self._plan.draft_layers and pooled.hit_tokens:
                # Draft rows of a block's last token depend on the token behind it.
                self._pool.drop_last(pooled)
            if self.is_rolling:
                self._pool.extend(pooled, min(total, pooled.hit_tokens + self._chunk))
        except KvdRefused:
            # Pins of those who wait must not keep those who run from their next block.
            self._drop(tracked)
            raise
        tracked.waits_since = 0.0
        return max(0, pooled.hit_tokens - tracked.local)

    def _put_off(self, tracked: Tracked, refusal: KvdRefused) -> int | None:
        """A refused admission: later, never, or without the pool."""
        absent = refusal.code != POOL_FULL
        if not self.is_rolling and (not absent or self._options.on_unavailable == "recompute"):
            self._drop(tracked)
            return 0
        self._refused_at[tracked.request_id] = time.monotonic()
        if tracked.waited() > self._options.deadline_s:
            self._end(tracked, Failure(refusal.code, str(refusal)))
        return None

    def allocated(self, request: Any, blocks: list[int], external: int) -> None:
        """The engine has taken device blocks, and will load `external` tokens."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        tracked.blocks = list(blocks)
        tracked.hit = external
        pooled = tracked.pooled
        if pooled is None:
            return
        known = tracked.local + external
        if self.is_rolling and known < pooled.hit_tokens:
            # The engine chose to compute what was found: blocks with a key cannot be rewritten.
            self._begin_again(tracked)
            tracked.blocks, tracked.hit = list(blocks), 0
        elif not self.is_rolling and known > len(pooled.blocks) * self._size:
            # Tokens between are in nobody's pool: nothing behind them is of use.
            self._drop(tracked)
        tracked.saved = len(pooled.blocks) * self._size

    def _begin_again(self, tracked: Tracked) -> None:
        """Drop what the request has in the pool; its next look-up has another name.

        What steps under way will report of the old name is of no interest any more.
        """
        self._drop(tracked)
        self._names.pop(tracked.name, None)
        tracked.attempt += 1
        tracked.blocks, tracked.hit, tracked.saved, tracked.last_step = [], 0, 0, 0

    def _drop(self, tracked: Tracked, done: int = -1) -> None:
        """Part with its blocks; done: tokens that are right and may be found by others."""
        pooled, tracked.pooled = tracked.pooled, None
        self._parting.add(Parting(tracked.name, pooled, tracked.last_step, done))
        self._part()

    # A step -----------------------------------------------------------------------------------

    def order(self, scheduled: Iterable[Scheduled]) -> StepOrder:
        """What a step loads and saves; commits what earlier steps have computed."""
        shares = list(scheduled)
        running = {share.request_id for share in shares}
        requests, others, doomed = [], {}, {}
        self._steps_ordered += 1
        for share in shares:
            tracked = self._requests.get(share.request_id)
            if tracked is None:
                continue
            self._note(tracked, share)
            try:
                request = self._with_room(running, partial(self._share, tracked, share))
            except KvdRefused as refusal:
                failure = Failure(refusal.code, str(refusal), tuple(tracked.blocks))
                doomed[tracked.name] = failure
                if refusal.code == POOL_FULL and not self._parting:
                    self._end(tracked, failure)
            else:
                if request is not None:
                    requests.append(request)
                else:
                    others[tracked.name] = tuple(tracked.blocks)
            tracked.floors.append((self._steps_ordered, tracked.resident))
        forget, self._forget = tuple(self._forget), []
        return StepOrder(tuple(requests), self._client.boot_id, forget, doomed, others)

    def _note(self, tracked: Tracked, share: Scheduled) -> None:
        """What the step says of a request, whatever becomes of it."""
        tracked.last_step = self._steps_ordered
        self._names[tracked.name] = tracked.request_id
        while tracked.floors and tracked.floors[0][0] < self._steps_done:
            tracked.floors.popleft()
        if share.replaces:
            tracked.blocks = list(share.new_blocks)
        else:
            tracked.blocks.extend(share.new_blocks)
        if share.start > tracked.reached:
            tracked.reached, tracked.failures = share.start, 0

    def _with_room(self, running: Container[str], call: Callable[[], R]) -> R:
        """What `call` returns; a full pool is tried once more without the blocks of who waits.

        Raises: KvdRefused.
        """
        try:
            return call()
        except KvdRefused as refusal:
            if refusal.code != POOL_FULL or not self._take_from_waiting(running):
                raise
        return call()

    def _take_from_waiting(self, running: Container[str]) -> bool:
        """Who waits gives its blocks up for who runs; returns whether there were any."""
        waiting = [
            one
            for one in self._requests.values()
            if one.pooled is not None
            and one.request_id not in running
            # Preempted, or not yet on the device.
            and not one.request.num_computed_tokens
        ]
        for one in waiting:
            blocks = one.blocks
            self._begin_again(one)
            one.blocks = blocks
        return bool(waiting)

    def _share(self, tracked: Tracked, share: Scheduled) -> StepRequest | None:
        """One request's share of the step; None when nothing of it is moved.

        Raises: KvdRefused: it cannot go on.
        """
        if self.is_rolling:
            if tracked.pooled is None:
                # It was admitted without a look-up, or lost its blocks: everything is computed.
                if share.start:
                    what = f"the blocks of request {tracked.request_id}"
                    raise KvdRefused("pool_lost", what=what)
                tracked.pooled = self._pool.begin(tracked.name, tracked.keys)
            return rolling_share(self._pool, tracked, share.start, share.start + share.tokens)
        before = tracked.pooled
        is_away = self._client.state is not LinkState.ATTACHED
        request = resident_share(self._pool, tracked, share, is_away=is_away)
        if before is not None and tracked.pooled is None:
            tracked.pooled = before
            self._drop(tracked)
        return request

    # What became of it ------------------------------------------------------------------------

    def reported(self, report: StepReport | None) -> None:
        """The ranks' account of a step; before the engine looks at its outputs."""
        self._steps_done += 1
        self._part()
        self._failed = {}
        for name, failure in (report.failed if report is not None else {}).items():
            request_id = self._names.get(name)
            if request_id is not None:
                self._failed[request_id] = failure
        for name in report.unsaved if report is not None else ():
            tracked = self._requests.get(self._names.get(name, ""))
            if tracked is not None and not self.is_rolling:
                self._drop(tracked)

    def take_ends(self) -> dict[str, Failure]:
        """Requests that end with an error now."""
        ends, self._ends = self._ends, {}
        for request_id, failure in ends.items():
            self._log.error(
                "kvd: request %s ends: %s: %s", request_id, failure.code, failure.detail
            )
        return ends

    def restart_points(self, computed: Mapping[str, int]) -> dict[str, int]:
        """Failed requests, and from which token each is computed again.

        Args: computed: of each running request, the tokens that were there before the step.
        Returns: also requests that end: those are in `take_ends`, or end by the engine's policy.
        """
        points = {}
        for request_id, failure in self._failed.items():
            tracked = self._requests.get(request_id)
            if tracked is None or request_id not in computed:
                continue
            points[request_id] = computed[request_id]
            tracked.failures += 1
            if request_id in self._ending:
                continue
            self._log.warning(
                "kvd: a step failed request %s: %s: %s", request_id, failure.code, failure.detail
            )
            if self.recompute:
                points[request_id] = self._recover(tracked, computed, failure)
        self._failed = {}
        return points

    def _recover(self, tracked: Tracked, running: Mapping[str, int], failure: Failure) -> int:
        """Where to go on; the request ends when it fails again and again."""
        computed = running[tracked.request_id]
        if tracked.failures > FAILURES_MAX:
            self._end(tracked, failure)
            return computed
        blocks = tracked.blocks
        self._begin_again(tracked)
        tracked.blocks = blocks
        if not self.is_rolling:
            return min(computed, dict(tracked.floors).get(self._steps_done, 0))
        try:
            self._client.wait_attached(min(RETURN_S, self._options.deadline_s))
            self._with_room(running, partial(self._admit, tracked))
        except KvdRefused as refusal:
            if refusal.code == POOL_FULL and self._parting:
                return 0  # its own blocks come free with the steps that are under way
            self._end(tracked, Failure(refusal.code, str(refusal)))
            return computed
        assert tracked.pooled is not None
        return min(computed, tracked.pooled.hit_tokens)

    def _end(self, tracked: Tracked, failure: Failure) -> None:
        if tracked.request_id not in self._ending:
            self._ending.add(tracked.request_id)
            self._ends[tracked.request_id] = failure

    def finished(self, request: Any, *, ok: bool) -> None:
        """The request has ended; what it has committed stays for others.

        ok: what its last step computed is right.
        """
        tracked = self._requests.pop(request.request_id, None)
        self._refused_at.pop(request.request_id, None)
        self._ends.pop(request.request_id, None)
        self._ending.discard(request.request_id)
        if tracked is None:
            return
        done = request.num_computed_tokens if ok else -1
        self._drop(tracked, done if self.is_rolling else min(done, tracked.saved))
        self._names.pop(tracked.name, None)

    def _part(self) -> None:
        self._forget.extend(self._parting.settle(self._steps_done))

    def close(self) -> None:
        """Say goodbye: what its requests kept is free then. Idempotent."""
        with suppress(KvdRefused):
            self._client.goodbye(CLOSE_S)
        self._client.close()
