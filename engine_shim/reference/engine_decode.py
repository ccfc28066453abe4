"""A decode engine: rows arrive in a host region, hot buffers hold what is selected often.

It names the destination of a prompt first (`expect`), gets its rows layer by layer while the
prefill engine computes, and generates once all have come (`decode`). It computes the last prompt
token itself, which gives the first logits.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from engine_shim.client import KvdClient, KvdRefused
from engine_shim.hot import HotFigures
from engine_shim.reference.block_ids import BlockIds
from engine_shim.reference.drafts import PromptLookup
from engine_shim.reference.generate import Decoded, decode
from engine_shim.reference.hot_cache import HotStore
from engine_shim.reference.model import SparseModel
from engine_shim.reference.rank_group import RankGroup, StepOrder
from engine_shim.steps import StepFailed, StepRequest, Target

BUSY_SECONDS = 0.02
"""Pause before blocks that a read still writes into are asked for again."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a prompt's rows go."""

    request: str
    transfer: str
    blocks: tuple[int, ...]
    num_tokens: int
    num_new: int


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """What was generated, how long its rows were waited for, and what hot buffers did for it."""

    decoded: Decoded
    waited_s: float
    seconds: float
    figures: HotFigures


class DecodeEngine:
    """One rank of a decode engine; see `serve.py` for its process."""

    def __init__(
        self,
        model: SparseModel,
        client: KvdClient,
        make_store: Callable[[], HotStore],
        region: str,
        ids: BlockIds,
        group: RankGroup,
        *,
        peer: str,
        transfer_deadline_s: float,
    ) -> None:
        """Args:
        make_store: maps the region and makes this rank's hot buffers; called again when kvd
            was restarted and the region is gone.
        region: name of the engine's region.
        ids: block ids of the region, rank 0's only.
        peer: address where our kvd listens for producers.
        """
        self._model = model
        self._client = client
        self._make_store = make_store
        self.store = make_store()
        self._generation = client.generation
        self._region = region
        self._ids = ids
        self._group = group
        self._peer = peer
        self._deadline_s = transfer_deadline_s
        self._open: dict[str, Destination] = {}

    # Rank 0 -----------------------------------------------------------------------------------

    def expect(self, request: str, num_tokens: int, num_new: int) -> Target:
        """Make room for a prompt; the answer is what its prefill engine must be given.

        Raises: StepFailed, KvdRefused; nothing is taken then.
        """
        self._renew_if_lost()
        if request in self._open:
            raise StepFailed("request_open", f"request {request} is expected already")
        if num_tokens < 1 or num_new < 0:
            raise StepFailed("prompt_empty", "a prompt needs at least one token")
        size = self.store.region_layout.block_tokens
        count = -(-(num_tokens + num_new) // size)
        if count > self._ids.num_free:
            raise StepFailed(
                "region_full", f"{count} blocks are needed but {self._ids.num_free} are free"
            )
        blocks = self._ids.take(count)
        transfer = uuid.uuid4().hex
        try:
            self._allocate(blocks)
            prompt_blocks = blocks[: -(-num_tokens // size)]
            layers = self._model.config.num_layers
            self._client.expect(
                transfer, self._region, prompt_blocks, num_tokens, layers, self._deadline_s
            )
        except KvdRefused:
            self._ids.give_back(blocks)
            raise
        self._open[request] = Destination(request, transfer, blocks, num_tokens, num_new)
        return Target(transfer, self._peer)

    def _renew_if_lost(self) -> None:
        """A restarted kvd has no region of ours: requests end, and a new one is made.

        Raises: KvdRefused.
        """
        if self._client.wait_attached(self._deadline_s) == self._generation:
            return
        for request in list(self._open):
            self.drop(request)
        self._group.send(StepOrder("renew", StepRequest("", (), (), 0, 0)))
        self._renew()

    def _renew(self) -> None:
        generation = self._client.wait_attached(self._deadline_s)
        self.store.close()
        self.store = self._make_store()
        self._generation = generation

    def _allocate(self, blocks: Sequence[int]) -> None:
        """Announce reuse; blocks that an old read still writes into are waited for.

        Raises: KvdRefused.
        """
        end = time.monotonic() + self._deadline_s
        pairs = [(block, self._ids.generation(block)) for block in blocks]
        while pairs:
            codes = self._client.allocated(self._region, pairs)
            refused = [code for code in codes if code not in ("", "destination_busy")]
            if refused:
                raise KvdRefused(refused[0], region=self._region)
            pairs = [p for p, code in zip(pairs, codes, strict=False) if code]
            if pairs:
                if time.monotonic() > end:
                    raise KvdRefused("destination_busy", region=self._region)
                time.sleep(BUSY_SECONDS)

    def decode(
        self,
        request: str,
        tokens: Sequence[int],
        num_new: int,
        width: int,
        deadline_s: float,
        *,
        overlapped: bool = False,
    ) -> DecodeResult:
        """Wait for the prompt's rows and generate.

        overlapped: see `HotStore.open`.
        Raises: StepFailed, KvdRefused; the request has ended then.
        """
        destination = self._destination(request)
        started = time.monotonic()
        try:
            if len(tokens) != destination.num_tokens or num_new > destination.num_new:
                raise StepFailed("request_other", f"request {request} was expected differently")
            self._client.await_transfer(destination.transfer, deadline_s)
            waited = time.monotonic() - started
            step = StepRequest(request, destination.blocks, (), destination.num_tokens, num_new)
            order = StepOrder("decode", step, list(tokens), width=width, overlapped=overlapped)
            self._group.send(order)
            before = self.store.statistics()
            decoded = self.run(order)
            figures = self.store.statistics() - before
        finally:
            self.drop(request)
        return DecodeResult(decoded, waited, time.monotonic() - started - waited, figures)

    def drop(self, request: str) -> None:
        """The request is over, however it went; its blocks are ours again once nobody writes."""
        destination = self._open.pop(request, None)
        if destination is None:
            return
        with suppress(KvdRefused):
            # Refused while a copy runs: the next `allocated` of these blocks waits for its end.
            self._client.drop_transfer(destination.transfer)
        self._ids.give_back(destination.blocks)

    def _destination(self, request: str) -> Destination:
        destination = self._open.get(request)
        if destination is None:
            raise StepFailed("request_unknown", f"request {request} was never expected")
        return destination

    # Every rank -------------------------------------------------------------------------------

    def run(self, order: StepOrder) -> Decoded:
        """Generate as ordered; the rows of the prompt are in the region."""
        request = order.request
        cache = self.store.open(
            request.request, request.device_blocks, ordered=not order.overlapped
        )
        try:
            cache.landed(request.num_computed)
            drafter = PromptLookup() if order.width > 1 else None
            return decode(self._model, cache, order.tokens, request.end, drafter, width=order.width)
        finally:
            cache.close()

    def follow(self) -> None:
        """Be rank 1 and up: generate what rank 0 generates, until it says stop."""
        while (order := self._group.receive()) is not None:
            if order.kind == "renew":
                self._renew()
            else:
                self.run(order)

    def close(self) -> None:
        """Stop the ranks and give requests up."""
        for request in list(self._open):
            self.drop(request)
        self._group.stop()
        self.store.close()
