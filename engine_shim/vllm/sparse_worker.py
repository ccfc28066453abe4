"""The worker's side of the connector with sparse decode offload: region, hot buffers, steps.

The region is kvd's, made when the caches are; the hot buffers are of this process. A request gets
a hot buffer with its first decode step and loses it when it ends or is preempted; identity is an
epoch that is given out once, whatever the engine calls its requests.

While kvd is away the mapped region serves on. When kvd is back without it, the scheduler's side
begins another *life* of the region: all rows are void with that order, on every rank, and a rank
that has not got the new region yet fails every request of its steps.

A failure never raises into the engine's forward pass: its request computes nothing of use from then
on and is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from logging import Logger
from typing import Any, Final

import torch

from engine_shim.client import KvdClient, KvdRefused, MemberIdentity
from engine_shim.client.options import end_after, left_s
from engine_shim.client.session import LinkState
from engine_shim.device import Device, DeviceError
from engine_shim.hot import HotFigures, HotHandle, HotOptions
from engine_shim.vllm.cpu_sparse import PagedRows, SparseImpl, SparseMetadata
from engine_shim.vllm.messages import Failure, SparseOrder, SparseShare, StepReport
from engine_shim.vllm.options import ConnectorOptions, client_options
from engine_shim.vllm.sparse_figures import after, figures_of, layers_of, requests_of
from engine_shim.vllm.sparse_memory import SparseMemory
from engine_shim.vllm.sparse_plan import SparsePlan
from engine_shim.vllm.sparse_rows import DraftRows, LayerRows, Share, SparseStore, attempt
from engine_shim.vllm.worker import CLOSE_S, Rank

FIGURES_EVERY_NS: Final = 1_000_000_000
FIGURES_SHARE: Final = 256
"""Telling kvd of all requests and layers takes no more than one part of so many of the time."""
FIGURES_DEADLINE_S: Final = 0.25
RETRY_S: Final = 0.25
"""Time that a step waits for a lost region at least, when its deadline has passed."""


@dataclass(slots=True)
class _Known:
    """A request of the engine: its blocks, the same as a tensor, and its hot buffer.

    life: of the region, that its rows began in.
    """

    blocks: list[int] = field(default_factory=list)
    table: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    handle: HotHandle | None = None
    life: int = 0


class SparseWorker:
    """One rank."""

    def __init__(
        self,
        plan: SparsePlan,
        options: ConnectorOptions,
        rank: Rank,
        device: Device,
        dtype: torch.dtype,
        logger: Logger,
        *,
        batch_of: Callable[[Any], SparseMetadata | None],
        meet: Callable[[], None] | None,
    ) -> None:
        """Attach to kvd, get the region, make the hot buffers.

        Args:   dtype: of a row's elements.
                batch_of: what a forward pass of the engine is made of, None when there is none.
                meet: see `SparseStore`.
        Raises: KvdRefused, DeviceError; nothing is left then.
        """
        self.plan = plan
        self._log = logger
        self._batch_of = batch_of
        self._deadline_s = options.deadline_s
        identity = MemberIdentity(
            engine=rank.engine,
            member=f"worker{rank.rank}",
            rank=rank.rank,
            tp_size=rank.tp_size,
            dp_rank=rank.dp_rank,
            store=options.backend,
        )
        with ExitStack() as undo:
            self.client = KvdClient(identity, options.runtime_dir, client_options(options))
            undo.callback(self.client.close)
            self.client.open()
            self._memory = SparseMemory(
                self.client,
                region_name(rank.engine),
                plan,
                device,
                HotOptions(
                    slots=plan.hot.slots,
                    scratch_rows=plan.hot.scratch_rows,
                    num_buffers=plan.hot.num_buffers,
                    timeout_ns=round(options.deadline_s * 1e9),
                    writes_region=rank.rank == 0,
                ),
            )
            undo.callback(self._memory.close)
            hot, region = self._memory.open(options.deadline_s)
            self.store = SparseStore(
                plan, hot, region, dtype, writes_region=rank.rank == 0, meet=meet
            )
            undo.pop_all()
        self._life = 0
        self._is_whole = True
        self._renew_end = 0
        self._past: HotFigures | None = None
        self._known: dict[str, _Known] = {}
        self._impls: list[SparseImpl] = []
        self._report = StepReport()
        self._bad_blocks: set[int] = set()
        self._tell_at_ns = 0

    def serve(self, impls: dict[str, SparseImpl]) -> None:
        """Be where the attention of these layers finds its rows. Args: impls: by name."""
        layer_of = self.plan.layer_of()
        for name, impl in impls.items():
            layer, selected = layer_of[name], impl.topk_indices_buffer
            if layer in self.plan.drafts:
                impl.rows = DraftRows(self.store, layer, selected, name)
            else:
                impl.rows = LayerRows(self.store, layer, selected)
            self._impls.append(impl)
        self.tell()

    # A step -----------------------------------------------------------------------------------

    def begin(self, order: SparseOrder, forward_context: Any) -> None:
        """A step begins. Args: forward_context: the engine's."""
        for request in order.forget:
            self._forget(request)
        lost = self._follow(order.region)
        for share in order.shares:
            self._note(share)
        self.store.shares = ()
        batch = self._batch_of(forward_context)
        if batch is None:
            return
        by_last_block = {
            self._known[share.request].blocks[(share.end - 1) // batch.block_size]: share
            for share in order.shares
        }
        self.store.shares = tuple(
            self._share(by_last_block, batch, number, lost) for number in range(batch.num_reqs)
        )

    def _follow(self, life: int) -> KvdRefused | DeviceError | None:
        """Be in this life of the region; returns why its rows cannot be had.

        The first attempt has the whole deadline, those of later steps what is left of it.
        """
        if life != self._life:
            self._life, self._is_whole = life, False
            self._renew_end = end_after(self._deadline_s)
            for known in self._known.values():
                known.handle = None
            self.store.close()
        if self._is_whole:
            return None
        try:
            self._memory.lose()
            hot, region = self._memory.open(max(left_s(self._renew_end), RETRY_S))
        except (KvdRefused, DeviceError) as failure:
            self._log.warning("kvd: the decode region cannot be made anew yet: %s", failure)
            return failure
        self._past = after(self._past, self.store.hot.statistics())
        self.store.open(hot, region)
        self._is_whole = True
        self._log.warning("kvd: the decode region was made anew; what was computed is void")
        return None

    def _note(self, share: SparseShare) -> None:
        """Keep what the step says of a request's blocks."""
        if share.replaces:
            self._forget(share.request)
        known = self._known.setdefault(share.request, _Known())
        if share.replaces or not share.start:
            known.life = self._life
        known.blocks.extend(share.blocks)
        if share.replaces or share.blocks:
            known.table = torch.tensor(known.blocks, dtype=torch.int64)
            self.store.written.clear(share.blocks[len(share.blocks) - share.fresh :])
        if known.handle is not None and share.blocks:
            self.store.hot.extend(known.handle, share.blocks)

    def _share(
        self,
        by_last_block: dict[int, SparseShare],
        batch: SparseMetadata,
        number: int,
        lost: KvdRefused | DeviceError | None,
    ) -> Share:
        """The request of the batch: the block that its last token is in is nobody else's."""
        end, begin = batch.seq_lens[number], batch.starts[number]
        last = int(batch.block_table[number][(end - 1) // batch.block_size])
        told = by_last_block[last]
        count = batch.starts[number + 1] - begin
        if (told.start, told.end) != (end - count, end):
            raise AssertionError(f"{told} is in the batch with tokens [{end - count}, {end})")
        known = self._known[told.request]
        share = Share(told.request, known.blocks, known.table, told.start, told.end, begin)
        if lost is None and known.life != self._life:
            lost = KvdRefused("pool_lost", what=f"what request {told.request} has computed")
        if lost is not None:
            code = lost.code.value if isinstance(lost, DeviceError) else lost.code
            share.failure = Failure(code, str(lost), tuple(known.blocks))
        attempt(share, partial(self._lend, known, share))
        return share

    def _lend(self, known: _Known, share: Share) -> None:
        """Give a decoding request its hot buffer, and take it from one that is prefilled."""
        hot = self.store.hot
        if share.end - share.start > self.plan.shape.width:
            self._take(known)
            return
        if known.handle is None:
            layers = range(self.plan.region.num_layers) if share.start else ()
            for layer in layers:
                if layer in self.plan.drafts:
                    self.store.fill_gap(layer, share)
                else:
                    self.store.written.require(share.request, layer, share.table, share.start)
            known.handle = hot.open(share.request, known.blocks)
            for layer in layers:
                hot.landed(known.handle, layer, 0, share.start)
        elif hot.num_rows(known.handle, self.plan.region.num_layers - 1) > share.start:
            hot.truncate(known.handle, share.start)  # what was beyond were drafts, refused since
        share.handle = known.handle

    def _take(self, known: _Known) -> None:
        handle, known.handle = known.handle, None
        if handle is not None:
            self.store.hot.close(handle)

    def _forget(self, request: str) -> None:
        known = self._known.pop(request, None)
        if known is not None:
            self._take(known)

    def end(self) -> None:
        """The step has ended, in whatever way."""
        self._settle()
        self.store.shares = ()
        now = time.monotonic_ns()
        if now >= self._tell_at_ns:
            self.tell()
            spent = time.monotonic_ns() - now
            self._tell_at_ns = now + max(FIGURES_EVERY_NS, FIGURES_SHARE * spent)

    def _settle(self) -> None:
        """Note who has failed; with draft layers vLLM asks before the step has ended."""
        for share in self.store.shares:
            if share.failure is not None and share.request not in self._report.failed:
                self._fail(share.request, share.failure)

    def _fail(self, request: str, failure: Failure) -> None:
        self._log.warning("kvd: request %s: %s: %s", request, failure.code, failure.detail)
        self._report.failed[request] = failure
        self._bad_blocks.update(failure.blocks)
        self._take(self._known[request])

    def tell(self) -> None:
        """Push the figures to kvd; nobody waits for one that is away."""
        if self.client.state is not LinkState.ATTACHED:
            return
        plan, store = self.plan, self.store
        hot = after(self._past, store.hot.statistics())
        lent = ((name, it.handle) for name, it in self._known.items() if it.handle is not None)
        requests = requests_of(plan, ((name, store.hot.figures_of(it)) for name, it in lent))
        with suppress(KvdRefused):
            self.client.stats(
                figures_of(plan, hot, 1 + self._life),
                FIGURES_DEADLINE_S,
                layers=layers_of(plan, hot.groups),
                requests=requests,
            )

    def take_report(self) -> StepReport | None:
        """What became of the last step, None when there is nothing to say."""
        report, self._report = self._report, StepReport()
        return report if report else None

    def take_bad_blocks(self) -> set[int]:
        """Blocks of the last step's failed requests; asked before the report."""
        self._settle()
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def close(self) -> None:
        """Give everything back, say goodbye, detach. Idempotent."""
        for impl in self._impls:
            impl.rows = PagedRows()
        self._impls, closed = [], not self._impls
        if closed:
            return
        self.tell()
        self._known.clear()
        self.store.close()
        self._memory.close()
        with suppress(KvdRefused):
            self.client.goodbye(CLOSE_S)
        self.client.close()


def region_name(engine: str) -> str:
    """Name of an engine's decode region."""
    return f"{engine}-kv"
