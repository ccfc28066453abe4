"""The worker's side of the connector: one rank's buffers, and the gate around each layer.

Order of one layer, and which hook of the engine says it:

    before_layer   the buffer may be written, and holds what it must: *before* the engine writes
                   the new rows, since `wait_for_layer_load` comes after that
    written        first hook after the write (`wait_for_layer_load`): saves and reads may start
    computed       attention over the buffer has ended (`save_kv_layer`)

A draft layer is run once or more often, behind the others: it is announced the first time, and the
computation lets go of its buffer at the end of the step, or when another draft layer needs it.

A failure never raises into the engine's forward pass: the step goes on without touching a buffer
(its writes are turned off), and its requests are reported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from logging import Logger
from typing import Final

from engine_shim.client import KvdClient, KvdRefused, MemberIdentity
from engine_shim.device import Device, DeviceMemory
from engine_shim.pipeline import PipelineOptions, PrefillPipeline
from engine_shim.steps import StepFailed
from engine_shim.vllm.engine_plan import EnginePlan
from engine_shim.vllm.messages import Failure, StepOrder, StepReport
from engine_shim.vllm.options import ConnectorOptions, client_options
from kvd.plan.layout import BlockLayout

CLOSE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Rank:
    """A worker's place in its engine.

    engine: its name in kvd.
    shard, contributes: see `PipelineOptions`.
    """

    engine: str
    rank: int
    tp_size: int
    dp_rank: int
    shard: int
    contributes: bool


Moved = Callable[[int, int], None]
"""Called with (layer, slot) when a layer has moved to another buffer between two steps."""


class WorkerSide:
    """One rank."""

    def __init__(
        self,
        plan: EnginePlan,
        options: ConnectorOptions,
        rank: Rank,
        device: Device,
        memory: DeviceMemory,
        logger: Logger,
        *,
        moved: Moved,
    ) -> None:
        """Attach to kvd and start the pipeline.

        Args:
            memory: that holds the buffers; closed by the caller, after `close`.
            moved: rebinds the engine's tensors.
        Raises: KvdRefused; nothing is left then.
        """
        self.plan = plan
        self._options = options
        self._log = logger
        self._moved = moved
        layout, num_bytes = plan.device()
        identity = MemberIdentity(
            engine=rank.engine,
            member=f"worker{rank.rank}",
            rank=rank.rank,
            tp_size=rank.tp_size,
            dp_rank=rank.dp_rank,
            shard=rank.shard,
            contributes=rank.contributes,
            layout=plan.layout,
            store=options.backend,
            num_slots=len(plan.ring.slots),
            device=layout,
            memory_fd=memory.fd if memory.fd is not None else -1,
            memory_bytes=num_bytes,
        )
        with ExitStack() as undo:
            self.client = KvdClient(identity, options.runtime_dir, client_options(options))
            undo.callback(self.client.close)
            self.client.open()
            self._pipeline = PrefillPipeline(
                self.client,
                device,
                plan.ring,
                memory,
                layout,
                BlockLayout(plan.layout),
                PipelineOptions(
                    shard=rank.shard,
                    opaque=plan.opaque,
                    contributes=rank.contributes,
                    shares_spans=rank.tp_size > plan.layout.num_shards,
                    drafts=frozenset(plan.draft_layers),
                    close_s=CLOSE_S,
                ),
            )
            undo.pop_all()
        self._order: StepOrder | None = None
        self._failure: StepFailed | None = None
        self._gated = -1
        self._drafts = frozenset(plan.draft_layers)
        self._drafting: set[int] = set()
        self._is_open = False
        self._report = StepReport()
        self._bad_blocks: set[int] = set()

    @property
    def pipeline(self) -> PrefillPipeline:
        """The pipeline, for its figures."""
        return self._pipeline

    # A step -----------------------------------------------------------------------------------

    def begin(self, order: StepOrder) -> None:
        """The forward pass of a step begins; it stays closed when nothing moves and all is free."""
        for attempt in order.forget:
            self._pipeline.forget(attempt)
        self._order, self._failure, self._gated = order, None, -1
        self._drafting.clear()
        self._report, self._bad_blocks = StepReport(), set()
        for attempt, failure in order.doomed.items():
            self._blame(attempt, failure)
        if not order.requests and self._pipeline.is_quiet:
            return
        self._pipeline.begin_step(
            order.requests, self._options.deadline_s, order.boot_id if order.requests else None
        )
        self._is_open = True

    @property
    def is_open(self) -> bool:
        """Whether a forward pass runs that has to keep to the gate."""
        return self._is_open

    def before_layer(self, layer: int) -> bool:
        """Wait until the layer's rows may be written; False: they must not be."""
        if not self._is_open or self._failure is not None:
            return self._failure is None
        if layer <= self._gated:
            return self._may_run_again(layer)
        self._make_way(layer)
        try:
            self._pipeline.before_write(layer)
        except StepFailed as failure:
            self._fail(failure)
            return False
        self._gated = layer
        return True

    def _may_run_again(self, layer: int) -> bool:
        """A gate may be asked again; but a draft layer's buffer may be another's by now."""
        if layer in self._drafts and self._was_let_go(layer):
            self._fail(StepFailed("layer_twice", f"draft layer {layer} shares its buffer"))
        return self._failure is None

    def _was_let_go(self, layer: int) -> bool:
        slots = self._pipeline.ring.slot_of
        later = (other for other in self._drafting if slots[other] == slots[layer])
        return max(later, default=layer) > layer

    def _make_way(self, layer: int) -> None:
        """Let go of the buffer that another draft layer of this step has had until now."""
        slots = self._pipeline.ring.slot_of
        for other in self._drafting:
            if slots[other] == slots[layer] and not self._was_let_go(other):
                self._step(self._pipeline.computed, other)

    def written(self, layer: int) -> None:
        """The engine has written the layer's new rows."""
        if self._is_open and self._failure is None:
            if layer > self._gated:
                raise AssertionError(f"layer {layer} was written before its gate was asked")
            if layer in self._drafting:
                return  # rows of guesses upon guesses: the next step writes them anew
            if layer in self._drafts:
                self._drafting.add(layer)
            self._step(self._pipeline.written, layer)

    def computed(self, layer: int) -> None:
        """The engine's attention over the layer has ended."""
        if self._is_open and self._failure is None and layer not in self._drafts:
            self._step(self._pipeline.computed, layer)

    def _step(self, call: Callable[[int], None], layer: int) -> None:
        try:
            call(layer)
        except StepFailed as failure:
            self._fail(failure)

    def end(self) -> None:
        """The forward pass has ended, in whatever way."""
        if not self._is_open:
            return
        for layer in sorted(self._drafting):
            if self._failure is None and not self._was_let_go(layer):
                self._step(self._pipeline.computed, layer)
        self._is_open = False
        if self._failure is None:
            try:
                # The scheduler may end a request as soon as it hears of this step.
                unsaved = self._pipeline.end_step(wait_saves=False, wait_armed=True)
            except StepFailed as failure:
                self._fail(failure)
            else:
                self._report.unsaved.update(unsaved)
        if self._failure is not None:
            self._pipeline.abort_step(self._failure)
        self._settle()

    def _settle(self) -> None:
        """Who is to be told of what failed."""
        assert self._order is not None
        alone = self._pipeline.failed_requests
        for request in self._order.requests:
            failure = alone.get(request.request) or self._failure
            if failure is not None:
                said = Failure(failure.code, failure.detail, request.device_blocks)
                self._blame(request.request, said)
        if self._failure is not None:
            # What moves nothing was written and read in the same buffers.
            for attempt, blocks in self._order.others.items():
                self._blame(attempt, Failure(self._failure.code, self._failure.detail, blocks))
            if self._failure.slot >= 0:
                self._rebind(self._failure.slot)

    def _rebind(self, slot: int) -> None:
        layers = self._layers_in(slot)
        if not self._pipeline.rebind(slot):
            self._log.error(
                "kvd: slot %d is quarantined and no spare buffer is left: its layers cannot run; "
                "see `kvctl slots`, then restart the engine",
                slot,
            )
            return
        for layer in layers:
            self._moved(layer, self._pipeline.ring.slot_of[layer])
        self._log.warning("kvd: the layers of quarantined slot %d moved to a spare buffer", slot)

    def _layers_in(self, slot: int) -> list[int]:
        return [at for at, where in enumerate(self._pipeline.ring.slot_of) if where == slot]

    def _fail(self, failure: StepFailed) -> None:
        self._failure = failure
        self._log.warning("kvd: a step failed: %s", failure)

    def _blame(self, attempt: str, failure: Failure) -> None:
        self._report.failed[attempt] = failure
        self._bad_blocks.update(failure.blocks)

    def take_report(self) -> StepReport | None:
        """What became of the last step, None when there is nothing to say.

        An engine that guesses tokens asks before it runs its draft layers, and carries the answer
        when the step has ended: until then it is filled in.
        """
        if self._is_open:
            return self._report
        report, self._report = self._report, StepReport()
        return report if report else None

    def take_bad_blocks(self) -> set[int]:
        """Device blocks of the last step's failed requests; filled in as the report is."""
        if self._is_open:
            return self._bad_blocks
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def close(self) -> None:
        """End copies, say goodbye, detach. Idempotent."""
        self._is_open = False
        self._pipeline.close()
        with suppress(KvdRefused):
            self.client.goodbye(CLOSE_S)
        self.client.close()
