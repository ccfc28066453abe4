"""A worker whose rows are words: it does what an order says, and checks what attention reads.

A row is what it is made from: the layer and the text up to its token (of draft layers, and the
token behind it). There are no threads; kvd is the real machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine_shim.client import KvdRefused, Tenancy
from engine_shim.layer_rows import SAVER, LayerRows
from engine_shim.load_failures import OF_ONE_REQUEST
from engine_shim.steps import StepRequest
from engine_shim.vllm.engine_plan import EnginePlan
from engine_shim.vllm.messages import Failure, StepOrder, StepReport
from kvd.plan.layout import BlockLayout
from tests.unit.engine_shim.vllm.rig import FakeClient

Row = tuple[int, str]
GARBAGE: Row = (-1, "")


@dataclass(frozen=True, slots=True)
class Share:
    """What the engine computes of one request in a step."""

    request_id: str
    attempt: str
    text: str
    start: int
    end: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class Fault:
    """What goes wrong in a step: at `layer`, the step, a save, or one request (`who`) alone.

    kind: step | save | alone | shed.
    """

    kind: str
    layer: int
    who: int = 0


@dataclass(slots=True)
class _Run:
    """A step that runs."""

    order: StepOrder
    shares: tuple[Share, ...]
    fault: Fault | None
    tainted: frozenset[str]
    failed: dict[str, Failure] = field(default_factory=dict)
    is_shed: bool = False
    is_over: bool = False

    def live(self) -> tuple[StepRequest, ...]:
        return tuple(r for r in self.order.requests if r.request not in self.failed)

    def hits(self, kind: str, layer: int) -> bool:
        fault = self.fault
        return fault is not None and fault.kind == kind and fault.layer == layer


class StubWorker:
    """One rank."""

    def __init__(self, kvd: FakeClient, plan: EnginePlan) -> None:
        layout, _ = plan.device()
        self.kvd = kvd
        self.plan = plan
        self.size = plan.ring.block_tokens
        self.rows = LayerRows(layout, BlockLayout(plan.layout), 0, opaque=plan.opaque)
        self.device: dict[tuple[int, int, int], Row] = {}
        self.pool: dict[tuple[int, int, int], Row] = {}
        self.lost: dict[str, Failure] = {}
        self.trusts_drafts = False

    def row(self, text: str, layer: int, token: int) -> Row:
        """What a row must be."""
        more = 2 if layer in self.plan.draft_layers else 1
        return layer, text[: token + more]

    def run(
        self,
        order: StepOrder,
        shares: Iterable[Share],
        fault: Fault | None = None,
        tainted: frozenset[str] = frozenset(),
    ) -> StepReport:
        """Do a step.

        Args: tainted: attempts whose rows may be wrong, as the engine knows.
        """
        run = _Run(order, tuple(shares), fault, tainted)
        for attempt in order.forget:
            self.lost.pop(attempt, None)
        for request in order.requests:
            if request.request in self.lost and not request.optional:
                run.failed[request.request] = self.lost[request.request]
        for layer in range(self.plan.ring.num_layers):
            self._layer(run, layer)
            if run.is_over:
                break
        for attempt, failure in order.doomed.items():
            run.failed[attempt] = failure
        blocks = {r.request: r.device_blocks for r in order.requests} | order.others
        failed = {
            name: Failure(one.code, one.detail, blocks.get(name, one.blocks))
            for name, one in run.failed.items()
        }
        unsaved = {r.request for r in order.requests if r.optional and run.is_shed}
        return StepReport(failed, unsaved - set(failed))

    def _layer(self, run: _Run, layer: int) -> None:
        slot = self.plan.ring.slot_of[layer]
        bound = self.plan.ring.slots[slot].bound
        if run.hits("alone", layer) and len(run.live()) > 1:
            assert run.fault is not None
            victim = run.live()[run.fault.who % len(run.live())]
            run.failed[victim.request] = Failure("checksum_mismatch", "injected")
        if run.hits("step", layer):
            self._fail(run, Failure("injected", f"at layer {layer}"))
            return
        try:
            tenancy = self._acquire(run, layer, slot, bound)
        except KvdRefused as refusal:
            self._fail(run, Failure(refusal.code, str(refusal)))
            return
        for request in run.live():
            for token in range(self._have(request, bound), request.num_computed):
                row = self.pool.get(self._pool_at(request, layer, token), GARBAGE)
                self.device[self._device_at(request, slot, token)] = row
        self.kvd.slots.load_ended(tenancy, True)
        self._compute(run, layer, slot)
        self._save(run, layer, slot, tenancy)

    def _acquire(self, run: _Run, layer: int, slot: int, bound: bool) -> Tenancy:
        def take(requests: Iterable[StepRequest]) -> Tenancy:
            items = [
                self.rows.load_item(r, self._have(r, bound))
                for r in requests
                if self._have(r, bound) < r.num_computed
            ]
            return self.kvd.slots.acquire(slot, layer, items, 0.01, boot_id=run.order.boot_id)

        try:
            return take(run.live())
        except KvdRefused as error:
            if error.code not in OF_ONE_REQUEST or len(run.live()) < 2:
                raise
        for request in run.live():
            try:
                self.kvd.slots.abandon(take([request]))
            except KvdRefused as error:
                run.failed[request.request] = Failure(error.code, str(error))
        return take(run.live())

    def _compute(self, run: _Run, layer: int, slot: int) -> None:
        """Write the new rows, then read all of them, as attention does."""
        for share in run.shares:
            is_right = share.attempt not in run.failed and share.attempt not in run.tainted
            for token in range(share.start, share.end):
                row = self.row(share.text, layer, token) if is_right else GARBAGE
                at = (slot, share.blocks[token // self.size], token % self.size)
                self.device[at] = row
        for share in run.shares:
            doomed = share.attempt in run.order.doomed
            if doomed or share.attempt in run.failed or share.attempt in run.tainted:
                continue
            for token in range(share.end):
                at = (slot, share.blocks[token // self.size], token % self.size)
                found = self.device.get(at, GARBAGE)
                is_right = self._is_right(found, share.text, layer, token)
                assert is_right, f"{share.attempt} layer {layer} token {token}: {found}"

    def _is_right(self, found: Row, text: str, layer: int, token: int) -> bool:
        if self.trusts_drafts and layer in self.plan.draft_layers:
            return (found[0], found[1][: token + 1]) == (layer, text[: token + 1])
        return found == self.row(text, layer, token)

    def _save(self, run: _Run, layer: int, slot: int, tenancy: Tenancy) -> None:
        run.is_shed = run.is_shed or run.hits("shed", layer)
        saved = tuple(r for r in run.live() if not (r.optional and run.is_shed))
        items = self.rows.save_items(saved)
        ticket = self.kvd.slots.written(tenancy, layer, items)
        self.kvd.slots.computed(tenancy, True)
        if ticket.code:
            self._fail(run, Failure(ticket.code, f"save of layer {layer}"))
            return
        is_ok = not run.hits("save", layer)
        for request in saved if is_ok else ():
            for token in range(request.saved_start, request.saved_end(self.size)):
                row = self.device.get(self._device_at(request, slot, token), GARBAGE)
                self.pool[self._pool_at(request, layer, token)] = row
        if items:
            self.kvd.slots.save_ended(tenancy, SAVER, is_ok)
        if not is_ok and items:
            failure = Failure("injected", f"save of layer {layer}")
            self.lost.update({r.request: failure for r in saved})
            self._fail(run, failure)

    def _fail(self, run: _Run, failure: Failure) -> None:
        """The step has failed: all its requests have."""
        run.is_over = True
        for request in run.order.requests:
            run.failed.setdefault(request.request, failure)
        for attempt in run.order.others:
            run.failed.setdefault(attempt, failure)

    def _have(self, request: StepRequest, bound: bool) -> int:
        return min(request.resident, request.num_computed) if bound else 0

    def _device_at(self, request: StepRequest, slot: int, token: int) -> tuple[int, int, int]:
        return slot, request.device_blocks[token // self.size], token % self.size

    def _pool_at(self, request: StepRequest, layer: int, token: int) -> tuple[int, int, int]:
        return layer, request.pool_blocks[token // self.size], token % self.size
