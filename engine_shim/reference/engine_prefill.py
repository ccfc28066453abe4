"""A prefill engine: prompts in, KV out to the pool and, layer by layer, to decode engines.

One process is one rank; rank 0 schedules. With the ring planned for every layer its own buffer it
is a resident engine; with a few shared ones, a prompt of any length runs on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from engine_shim.client import KvdClient, KvdRefused
from engine_shim.pipeline import PrefillPipeline
from engine_shim.reference.block_ids import BlockIds
from engine_shim.reference.cache import BlockTable
from engine_shim.reference.hashing import block_hashes
from engine_shim.reference.model import SparseModel
from engine_shim.reference.rank_group import RankGroup, StepOrder
from engine_shim.reference.ring_cache import RingCache, SlotTensors
from engine_shim.requests import PooledRequest, RequestPool
from engine_shim.steps import CHECKSUM_MISMATCH, StepFailed, StepRequest, Target

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all)."""

RETRY_SECONDS = 0.02
"""Pause before a full pool is asked again."""


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What became of a prompt.

    hit_tokens:  tokens whose KV was found in the pool.
    first_token: what greedy decoding would give after the prompt.
    transfers:   for each target why its rows did not arrive, '' where they did.
    """

    num_tokens: int
    hit_tokens: int
    num_steps: int
    seconds: float
    first_token: int
    transfers: tuple[str, ...] = ()


class PrefillEngine:
    """One rank of a prefill engine; see `serve.py` for its process."""

    def __init__(
        self,
        model: SparseModel,
        client: KvdClient,
        pipeline: PrefillPipeline,
        tensors: SlotTensors,
        group: RankGroup,
        *,
        chunk: int,
        step_deadline_s: float = 60.0,
    ) -> None:
        """chunk: tokens of one step, a multiple of the block size."""
        self._model = model
        self._client = client
        self._pipeline = pipeline
        self._tensors = tensors
        self._group = group
        self._chunk = chunk
        self._deadline_s = step_deadline_s
        self._ids = BlockIds(tensors.num_blocks)
        self._pool = RequestPool(client, tensors.block_tokens)
        self._unsaved: tuple[str, ...] = ()

    @property
    def shed_blocks(self) -> int:
        """Blocks that were left unsaved under pressure: the pool was full, or saves were late."""
        return self._pool.shed_blocks + self._pipeline.figures().shed_blocks

    # Rank 0 -----------------------------------------------------------------------------------

    def prefill(
        self,
        request: str,
        tokens: Sequence[int],
        targets: Sequence[Target] = (),
        progress: Progress | None = None,
    ) -> PrefillResult:
        """Compute a prompt, store it in the pool and offer it to the targets.

        Raises: StepFailed with a code when the request cannot be served; the engine can go on.
        """
        started = time.monotonic()
        size = self._tensors.block_tokens
        if not tokens:
            raise StepFailed("prompt_empty", "the prompt has no tokens")
        blocks = -(-len(tokens) // size)
        if blocks > self._ids.num_free:
            raise StepFailed(
                "prompt_too_long",
                f"{len(tokens)} tokens need {blocks} device blocks, {self._ids.num_free} are free",
            )
        device_blocks = self._ids.take(blocks)
        try:
            pooled, first, steps = self._compute(
                request, tokens, device_blocks, tuple(targets), progress
            )
            outcomes = tuple(self._outcome(target) for target in targets)
            self._pool.end(pooled)
        except StepFailed:
            self._drop_targets(targets)
            raise
        except KvdRefused as error:
            self._drop_targets(targets)
            raise StepFailed(error.code, str(error)) from error
        finally:
            self._forget(request)
            self._ids.give_back(device_blocks)
        seconds = time.monotonic() - started
        return PrefillResult(len(tokens), pooled.hit_tokens, steps, seconds, first, outcomes)

    def _compute(
        self,
        request: str,
        tokens: Sequence[int],
        device_blocks: tuple[int, ...],
        targets: tuple[Target, ...],
        progress: Progress | None,
    ) -> tuple[PooledRequest, int, int]:
        """Admit the request and run its chunks: (blocks, first token after the prompt, steps).

        Damaged blocks of the pool are gone once they were noticed: the prompt is computed again,
        once. With targets it is not, since they have been offered rows of the first attempt.
        """
        for may_retry in (not targets, False):
            pooled = self._admit(request, tokens)
            try:
                return pooled, *self._run(pooled, tokens, device_blocks, targets, progress)
            except (StepFailed, KvdRefused) as failure:
                self._give_up(pooled)
                if not may_retry or failure.code != CHECKSUM_MISMATCH:
                    raise
                self._forget(request)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _forget(self, request: str) -> None:
        """What the slots of all ranks hold of the request is void."""
        self._group.send(StepOrder.forget(request))
        self._pipeline.forget(request)

    def _admit(self, request: str, tokens: Sequence[int]) -> PooledRequest:
        self._client.wait_attached(self._deadline_s)
        hashes = block_hashes(tokens, self._tensors.block_tokens)
        return self._pool.admit(request, hashes, len(tokens))

    def _run(
        self,
        pooled: PooledRequest,
        tokens: Sequence[int],
        device_blocks: tuple[int, ...],
        targets: tuple[Target, ...],
        progress: Progress | None,
    ) -> tuple[int, int]:
        """All chunks; returns (first token after the prompt, number of steps)."""
        start, offered, steps = pooled.hit_tokens, 0, 0
        first = -1
        while start < len(tokens):
            end = min(start + self._chunk, len(tokens))
            last = end == len(tokens)
            # Rows of the last chunk are read again by other requests only, and by targets.
            optional = last and not targets
            self._extend(pooled, end, optional=optional)
            size = self._tensors.block_tokens
            request = StepRequest(
                pooled.request,
                device_blocks[: -(-end // size)],
                tuple(pooled.blocks[: -(-end // size)]),
                start,
                end,
                targets,
                offered,
                optional,
            )
            first = self._step(StepOrder.run(request, list(tokens[start:end]), last))
            if request.request not in self._unsaved:
                self._pool.commit(pooled, end)
            start = offered = end
            steps += 1
            if progress is not None:
                progress(end, len(tokens))
        return first, steps

    def _extend(self, pooled: PooledRequest, end: int, *, optional: bool) -> None:
        """Reserve the next chunk's blocks; a full pool is waited for, until the deadline.

        Blocks that are optional are not waited for: the chunk goes unsaved.
        """
        give_up = time.monotonic() + self._deadline_s
        while True:
            try:
                self._pool.extend(pooled, end, optional=optional)
            except KvdRefused as error:
                if error.code != "pool_full" or time.monotonic() > give_up:
                    raise
                time.sleep(RETRY_SECONDS)
            else:
                return

    def _step(self, order: StepOrder) -> int:
        """One step on all ranks; a quarantined slot is replaced once."""
        self._group.send(order)
        try:
            return self.run_step(order)
        except StepFailed as failure:
            if failure.slot < 0 or not self._pipeline.rebind(failure.slot):
                raise
            again = order.after_rebind(failure.slot)
            self._group.send(again)
            return self.run_step(again)

    def _give_up(self, pooled: PooledRequest) -> None:
        """Drop a failed request's blocks; a kvd that is gone has dropped them already."""
        with suppress(KvdRefused):
            self._pool.abort(pooled)

    def _outcome(self, target: Target) -> str:
        """Wait until a target's rows have been read: '' or why they were not.

        The prompt itself is done and stored: a reader that is gone is the reader's failure.
        """
        try:
            self._client.await_transfer(target.transfer, self._deadline_s)
        except KvdRefused as refusal:
            return f"{refusal.code}: {refusal.context.get('detail', '')}"
        return ""

    def _drop_targets(self, targets: Sequence[Target]) -> None:
        """Let who waits for the prompt's rows know at once that they will not come."""
        for target in targets:
            with suppress(KvdRefused):
                self._client.drop_transfer(target.transfer, peer=target.peer)

    # Every rank -------------------------------------------------------------------------------

    def run_step(self, order: StepOrder) -> int:
        """Run one step; returns the greedy token after its last position.

        Raises: StepFailed; the step's slots have been let go.
        """
        request = order.request
        table = BlockTable(self._tensors.block_tokens, self._tensors.num_blocks)
        table.append(request.device_blocks)
        cache = RingCache(self._pipeline, self._tensors, table)
        self._pipeline.begin_step([request], self._deadline_s)
        try:
            tokens = torch.tensor(order.tokens, dtype=torch.int64)
            logits = self._model.forward(tokens, request.num_computed, cache)
            self._unsaved = self._pipeline.end_step(wait_saves=order.last)
        except StepFailed as failure:
            self._pipeline.abort_step(failure)
            raise
        return int(logits[-1].argmax())

    def follow(self) -> None:
        """Be rank 1 and up: run the steps that rank 0 sends, until it says stop."""
        while (order := self._group.receive()) is not None:
            if order.kind == "forget":
                self._pipeline.forget(order.request.request)
                continue
            if order.rebind >= 0:
                self._pipeline.rebind(order.rebind)
            try:
                self.run_step(order)
            except StepFailed:
                # Rank 0 fails or hears of it by the collective's deadline, and decides.
                continue

    def close(self) -> None:
        """Stop the ranks and let go of everything."""
        self._group.stop()
        self._pipeline.close()
