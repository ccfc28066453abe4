"""A dumb model of vLLM's scheduler around a `SchedulerSide`.

Requests have a text that is known from the start: `prompt` characters of it are given, each step
that computes all known tokens "samples" the next. As in vLLM, a request's count of computed tokens
rises when a step is scheduled, and steps are reported in their order, `depth` steps later.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from dataclasses import dataclass, field

from engine_shim.vllm.engine_plan import EnginePlan
from engine_shim.vllm.messages import Failure, StepOrder, StepReport
from engine_shim.vllm.options import ConnectorOptions
from engine_shim.vllm.scheduler import SchedulerSide
from engine_shim.vllm.shares import Scheduled
from kvd.core.block_types import Fill
from tests.unit.engine_shim.vllm.rig import FakeClient
from tests.unit.engine_shim.vllm.stub_worker import Fault, Share, StubWorker


@dataclass(eq=False)
class StubRequest:
    """What the connector may use of vLLM's `Request`."""

    request_id: str
    text: str
    num_tokens: int
    hash_tokens: int
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    error: str = ""
    is_done: bool = False

    def grow(self) -> None:
        """Hash what is known now."""
        step = self.hash_tokens
        for at in range(len(self.block_hashes), self.num_tokens // step):
            known = self.text[: (at + 1) * step]
            self.block_hashes.append(hashlib.sha256(known.encode()).digest())


@dataclass(slots=True)
class _Step:
    order: StepOrder
    shares: tuple[Share, ...]
    fault: Fault | None
    stale: set[str] = field(default_factory=set)


class StubEngine:
    """One engine; `step` schedules once and hears of the step before `depth` others."""

    def __init__(
        self,
        plan: EnginePlan,
        kvd: FakeClient,
        *,
        chunk: int = 8,
        recompute: bool = True,
        depth: int = 1,
        per_block: int = 1,
        options: ConnectorOptions | None = None,
        max_running: int = 4,
    ) -> None:
        self.plan, self.kvd, self.chunk, self.depth = plan, kvd, chunk, depth
        self.recompute = recompute
        self.max_running = max_running
        self.size = plan.ring.block_tokens
        self.hash_tokens = self.size // per_block
        log = logging.Logger("stub", logging.CRITICAL)
        self.side = SchedulerSide(
            plan,
            options or ConnectorOptions(),
            kvd,  # type: ignore[arg-type]
            log,
            chunk_tokens=chunk,
            hashes_per_block=per_block,
            recompute=recompute,
        )
        self.worker = StubWorker(kvd, plan)
        self.free = deque(range(1, plan.num_blocks))
        self.waiting: deque[StubRequest] = deque()
        self.running: list[StubRequest] = []
        self.all: dict[str, StubRequest] = {}
        self.queue: deque[_Step] = deque()
        self.orders: list[StepOrder] = []
        self.hits: dict[str, list[int]] = {}
        self.preempted: list[str] = []
        self.restarts: list[tuple[str, int]] = []

    # The user ---------------------------------------------------------------------------------

    def add(self, request_id: str, text: str, outputs: int = 1) -> StubRequest:
        """A request for all but the last `outputs` characters, which it will sample."""
        request = StubRequest(request_id, text, len(text) - outputs, self.hash_tokens)
        request.grow()
        self.waiting.append(request)
        self.all[request_id] = request
        return request

    def abort(self, request_id: str) -> None:
        """The user has gone."""
        self._finish(self.all[request_id], "aborted")

    def step(self, fault: Fault | None = None) -> None:
        """Schedule once, and hear of the oldest step when enough are under way."""
        shares = self._schedule()
        for scheduled in shares:
            assert scheduled.tokens > 0
        order = self.side.order(shares)
        self.orders.append(order)
        self._check(order)
        made = tuple(self._share(one) for one in shares)
        for one in shares:
            self.all[one.request_id].num_computed_tokens += one.tokens
        self.queue.append(_Step(order, made, fault))
        if len(self.queue) >= self.depth:
            self.hear()

    def run(self, steps: int = 200) -> None:
        """Until nothing is left to do."""
        for _ in range(steps):
            if not self.waiting and not self.running and not self.queue:
                return
            self.side._refused_at.clear()  # time passes
            self.step()
            if not self.waiting and not self.running:
                while self.queue:
                    self.hear()
        raise AssertionError(f"still waiting: {[r.request_id for r in self.waiting]}")

    # Scheduling -------------------------------------------------------------------------------

    def _schedule(self) -> list[Scheduled]:
        found: list[Scheduled] = []
        budget, was_preempted = self.chunk, False
        for request in list(self.running):
            if request not in self.running:
                continue
            tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if tokens <= 0:
                continue
            new: list[int] | None
            while (new := self._take(request, request.num_computed_tokens + tokens)) is None:
                victim = self.running[-1]
                if any(one.request_id == victim.request_id for one in found):
                    break
                self.preempt(victim)
                was_preempted = True
                if victim is request:
                    break
            if new is None:
                break
            start = request.num_computed_tokens
            found.append(Scheduled(request.request_id, start, tokens, tuple(new), False))
            budget -= tokens
        return found if was_preempted else found + self._admit(budget)

    def _admit(self, budget: int) -> list[Scheduled]:
        found: list[Scheduled] = []
        for request in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.max_running:
                break
            matched = self.side.matched_tokens(request, 0)
            if matched is None:
                continue
            tokens = min(request.num_tokens - matched, budget)
            assert tokens > 0
            if self._take(request, matched + tokens) is None:
                break
            self.hits.setdefault(request.request_id, []).append(matched)
            self.side.allocated(request, list(request.blocks), matched)
            request.num_computed_tokens = matched
            self.waiting.remove(request)
            self.running.append(request)
            blocks = tuple(request.blocks)
            found.append(Scheduled(request.request_id, matched, tokens, blocks, True))
            budget -= tokens
        return found

    def _take(self, request: StubRequest, tokens: int) -> list[int] | None:
        missing = -(-tokens // self.size) - len(request.blocks)
        if missing > len(self.free):
            return None
        new = [self.free.popleft() for _ in range(max(0, missing))]
        request.blocks.extend(new)
        return new

    def preempt(self, request: StubRequest) -> None:
        """Its device blocks are another's now."""
        self.running.remove(request)
        self.waiting.appendleft(request)
        self._give_back(request)
        request.num_computed_tokens = 0
        self.preempted.append(request.request_id)
        self._make_stale(request.request_id)

    def _give_back(self, request: StubRequest) -> None:
        self.free.extend(request.blocks)
        request.blocks = []

    def _make_stale(self, request_id: str) -> None:
        for step in self.queue:
            step.stale.add(request_id)

    def _share(self, scheduled: Scheduled) -> Share:
        request = self.all[scheduled.request_id]
        tracked = self.side._requests[scheduled.request_id]
        return Share(
            request.request_id,
            tracked.name,
            request.text,
            scheduled.start,
            scheduled.start + scheduled.tokens,
            tuple(request.blocks),
        )

    def _check(self, order: StepOrder) -> None:
        """Lists are long enough, and nobody writes where another does."""
        written: dict[int, str] = {}
        for one in order.requests:
            assert len(one.device_blocks) >= -(-one.end // self.size), one
            if not one.optional:
                assert len(one.pool_blocks) >= -(-one.end // self.size), one
            first, end = one.saved_start // self.size, -(-one.saved_end(self.size) // self.size)
            for block in one.pool_blocks[first:end]:
                assert written.setdefault(block, one.request) == one.request, one
                fill = self._fills().get(block)
                assert fill is None or fill.owner.request == one.request, one

    def _fills(self) -> dict[int, Fill]:
        pool = self.kvd.machine.state.pool
        assert pool is not None
        return pool.blocks.fills

    # What became of it ------------------------------------------------------------------------

    def hear(self) -> None:
        """The ranks run the oldest step and report it."""
        step = self.queue.popleft()
        tainted = frozenset(s.attempt for s in step.shares if s.request_id in step.stale)
        report = self.worker.run(step.order, step.shares, step.fault, tainted)
        self.side.reported(report or None)
        ends = self.side.take_ends()
        scheduled = {share.request_id: share.end - share.start for share in step.shares}
        points: dict[str, int] = {}
        if any(failure.blocks for failure in report.failed.values()):
            computed = {
                r.request_id: r.num_computed_tokens - scheduled.get(r.request_id, 0)
                for r in self.running
            }
            points = self.side.restart_points(computed)
            ends |= self.side.take_ends()
        for request_id, point in points.items():
            self.restarts.append((request_id, point))
            self.all[request_id].num_computed_tokens = point
            self._make_stale(request_id)
            if not self.recompute:
                ends.setdefault(request_id, Failure("failed", "by policy"))
        for share in step.shares:
            if share.request_id not in points and share.request_id not in step.stale:
                self._sample(share, report)
        for request_id, failure in ends.items():
            self._finish(self.all[request_id], failure.code)

    def _sample(self, share: Share, report: StepReport) -> None:
        request = self.all[share.request_id]
        if request.is_done:
            return
        assert share.attempt not in report.failed, "an answer was made of rows that failed"
        if share.end < request.num_tokens:
            return
        request.num_tokens += 1
        request.grow()
        if request.num_tokens == len(request.text):
            self._finish(request, "")

    def _finish(self, request: StubRequest, error: str) -> None:
        if request.is_done:
            return
        request.is_done, request.error = True, error
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.side.finished(request, ok=error in ("", "aborted"))
        self._give_back(request)
