"""Prefill on a few rotating layer buffers: load, gate, write, announce, save, compute, release.

When a step begins, kvd is asked to keep the blocks that all its layers load and save
(`step_keeping.py`): a round trip for each step instead of two for each layer. Then, for each layer
in order:

    loader thread    once kvd keeps what the step loads: take the slot (gate word), and begin the
                     copy pool -> slot; the compute thread itself takes slots where a step loads
                     nothing
    compute thread   `before_write`: the slot is ours and what it needs is in it
                     write the new rows
                     `written`: announce; from now on saves and remote reads may start
                     attention over the slot's rows
                     `computed`: the computation lets go
    saver            once kvd keeps what the step saves, and the device has finished writing:
                     copy slot -> pool; begun by the compute thread in `written`

All of it is told to kvd, in batches for which nobody waits. Where kvd keeps no step (ranks share
spans, rows are offered to readers, kvd is away or has refused), a load waits until kvd has pinned
the blocks of its layer, and a save until kvd has acknowledged its layer's announcement. Whichever
thread hears a yes that was waited for begins the copy.

The slot is free again when kvd has heard the end of all of it, remote reads included; the next
layer in the same slot waits for that at its gate, *before* its rows are written. Where no reads
were offered, every end is our own: then the next layer takes the slot as soon as all are told.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from engine_shim.client import KvdRefused, SlotQuarantined
from engine_shim.copy_order import CopyOrder
from engine_shim.device import Device, DeviceError, DeviceMemory
from engine_shim.layer_rows import LayerRows, SlotContents
from engine_shim.loader import Loader
from engine_shim.pipeline_types import PipelineFigures, PipelineOptions
from engine_shim.saver import Saver, SaveTask
from engine_shim.slot_client import SlotClient
from engine_shim.step_keeping import StepKeeper
from engine_shim.steps import Step, StepFailed, StepRequest, as_step_failure
from kvd.plan.layout import BlockLayout
from kvd.plan.ring import RingPlan
from kvd.wire.layout import DeviceLayout

__all__ = ["PipelineFigures", "PipelineOptions", "PrefillPipeline"]

UNHEARD: Final = "deadline_exceeded"
"""Code of a slot event that kvd did not acknowledge in time."""


class PrefillPipeline:
    """One worker's ring. `begin_step` ... `end_step` are called by one compute thread."""

    def __init__(
        self,
        client: SlotClient,
        device: Device,
        ring: RingPlan,
        memory: DeviceMemory,
        layout: DeviceLayout,
        blocks: BlockLayout,
        options: PipelineOptions | None = None,
    ) -> None:
        """Start the copy threads.

        Args:
            client: attached, with `layout` announced and `memory` passed.
            ring: which layer lives in which slot; `layout` was made of it.
            memory: holds the slots.
            blocks: layout of pool blocks; its layers are the ring's.
        """
        self._client = client
        self._device = device
        self._ring = ring
        self._options = options or PipelineOptions()
        self._rows = LayerRows(layout, blocks, self._options.shard, opaque=self._options.opaque)
        self._contents = SlotContents(len(ring.slots))
        self._compute = device.stream("compute")
        self._order = CopyOrder()
        self._loader = Loader(client, device, memory, self._rows, self._contents, self._order)
        alone = not self._options.shares_spans
        self._saver = Saver(client, device, memory, self._rows, self._order, alone=alone)
        self._keeper = StepKeeper(client, self._rows, self._options)
        self._step: Step | None = None
        self._shed_blocks = 0
        self._waited_ns = 0
        self._has_offered = False
        self._rows_gone: set[str] = set()
        self.failed_requests: Mapping[str, StepFailed] = {}
        """Requests of the last step that failed alone, and why."""

    @property
    def ring(self) -> RingPlan:
        """The plan as it is now."""
        return self._ring

    @property
    def is_quiet(self) -> bool:
        """Whether a step that moves nothing need not be begun: nobody touches any slot."""
        return not (self._ring.reuse or self._order.saves_open or self._has_offered)

    def figures(self) -> PipelineFigures:
        """Bytes moved, time waited, spares left."""
        return PipelineFigures(
            self._loader.num_bytes,
            self._saver.num_bytes,
            self._waited_ns / 1e9,
            self._loader.time.busy_ns / 1e9,
            self._saver.time.busy_ns / 1e9,
            len(self._ring.spares),
            self._shed_blocks,
        )

    def begin_step(
        self, requests: Sequence[StepRequest], deadline_s: float, boot_id: bytes | None = None
    ) -> None:
        """Start a step: its loads begin now.

        Args: boot_id: life of kvd that the pool blocks are of, None for the present one.
        Raises: RuntimeError when the last step was neither ended nor aborted.
        """
        if self._step is not None:
            raise RuntimeError("the last step has not ended")
        self._device.bind_thread()
        end = time.monotonic_ns() + int(deadline_s * 1e9)
        step = Step(tuple(requests), self._ring.num_layers, end, boot_id)
        step.is_idle = not self._ring.reuse and all(map(self._is_idle, requests))
        step.is_clear = step.is_idle and self.is_quiet
        self._step = step
        if step.is_idle:
            return
        whole = not self._ring.reuse and all(r.resident >= r.num_computed for r in requests)
        step.is_free = whole and all(request.optional for request in requests)
        for request in requests:
            lost = None if request.optional else self._saver.lost.why(request.request)
            lost = lost or self._loader.lost.why(request.request)
            if lost is not None:
                step.fail_request(request.request, lost)
        try:
            self._keeper.open(step, self._ring)  # the rest is done while kvd looks at it
            for book in (self._saver.lost, self._loader.lost):
                book.expect(request.request for request in requests)
            if self._options.drafts and self._rows_gone:
                step.skips(self._options.drafts, frozenset(self._rows_gone))
            step.takes_slots = not any(map(self._may_load, requests))
            step.unroll()
            self._loader.start(step, self._ring)
            step.is_begun = True
        finally:
            if not step.is_begun:
                self._step = None
                self._keeper.close(step)

    def _may_load(self, request: StepRequest) -> bool:
        """Whether rows of the request may have to be loaded in this step."""
        have = 0 if self._ring.reuse else request.resident
        return have < request.num_computed

    def _is_idle(self, request: StepRequest) -> bool:
        """Whether nothing of the request is loaded, saved or offered in this step."""
        end = request.saved_end(self._rows.block_tokens)
        saves = self._options.contributes and request.saved_start < end
        return not saves and not request.targets and request.resident >= request.num_computed

    def before_write(self, layer: int) -> int:
        """Wait until the layer's slot may be written and holds what it must; returns the slot.

        Raises: StepFailed.
        """
        step = self._running()
        if step.is_idle:
            return self._before_idle_write(step, layer)
        state = step.layers[layer]
        started = time.monotonic_ns()
        if not step.takes_slots:
            step.reach(layer)
        elif not state.acquired.is_set():
            self._loader.take(step, self._ring, layer)
        for event, what in ((state.acquired, "slot"), (state.loaded, "load")):
            is_there = event.is_set() or step.failure is not None
            if not (is_there or event.wait(step.seconds_left())):
                step.fail(StepFailed("deadline_exceeded", f"layer {layer} waited for its {what}"))
        self._waited_ns += time.monotonic_ns() - started
        if step.failure is not None:
            raise step.failure
        if state.tenancy is None:
            return self._before_idle_write(step, layer)
        return state.tenancy.slot

    def _before_idle_write(self, step: Step, layer: int) -> int:
        slot = self._ring.slot_of[layer]
        if not step.is_clear:
            try:
                self._client.slots.await_untouched([slot], step.seconds_left())
            except SlotQuarantined as error:
                failure = StepFailed("slot_quarantined", str(error), error.slot)
                raise self._failed(step, failure) from error
            except KvdRefused as error:
                raise self._failed(step, as_step_failure(error)) from error
        return slot

    def written(self, layer: int) -> None:
        """The layer's new rows are in the slot, in the compute stream's order.

        Raises: StepFailed.
        """
        step = self._running()
        if step.is_idle:
            return
        state = step.layers[layer]
        if state.tenancy is None:
            state.saved.set()
            return
        event = self._device.event()
        self._compute.record(event)
        gives = self._options.contributes
        saved = self._to_save(step, layer) if gives else ()
        saves = step.save_items(saved, self._rows.save_items)
        reads = self._rows.read_items(step.live) if gives else []
        self._has_offered = self._has_offered or bool(reads)
        try:
            armed = self._client.slots.written(
                state.tenancy, layer, saves, reads, step.seconds_left(), kept=step.kept_saves
            )
        except KvdRefused as error:
            if not step.is_free or not saves:
                raise self._failed(step, as_step_failure(error)) from error
            # The blocks are of a kvd that is gone; the rows themselves are right.
            step.is_shed, saves = True, []
            armed = self._client.slots.written(state.tenancy, layer)
        state.is_written = True
        state.armed = armed if saves else None
        if saves:
            self._saver.start(SaveTask(step, layer, saved, event))
        else:
            state.saved.set()

    def computed(self, layer: int) -> None:
        """Attention over the layer's slot has ended.

        Raises: StepFailed.
        """
        step = self._running()
        if step.is_idle:
            return
        state = step.layers[layer]
        if state.tenancy is None:
            state.is_computed = True
            return
        slots = self._client.slots
        try:
            if self._options.shares_spans and state.armed is not None:
                state.armed = slots.confirm(state.tenancy, step.seconds_left())
            slots.computed(state.tenancy, True, rides=step.goes_on(layer))
        except KvdRefused as error:
            raise self._failed(step, as_step_failure(error)) from error
        state.is_computed = True
        self._contents.add(state.tenancy.slot, step.live)

    def end_step(self, *, wait_saves: bool, wait_armed: bool = False) -> tuple[str, ...]:
        """End the step after its last layer.

        Args:
            wait_saves: also wait until every copy has ended. What kvd refuses of a kept step after
                that never becomes readable, and fails the request's next step.
            wait_armed: also wait until kvd is sure to let the blocks of every save stay, even when
                another member ends their request.
        Returns: requests of which rows are left unsaved, because they are optional or have failed
            alone (`failed_requests`) or because layers were not run: their blocks are not to be
            committed. If they are, they never become ready, and are freed once their owner left.
        Raises: StepFailed; the step has ended all the same.
        """
        step = self._running()
        self.failed_requests = step.failed_requests
        if step.is_idle:
            self._step = None
            return ()
        skipped = [layer for layer in step.layers if not layer.is_computed]
        if skipped:
            self._skip(step)
        self._keeper.close(step)  # told to kvd behind the end of the last copy
        if wait_armed or (wait_saves and step.kept_saves is None):  # else their ends say it
            self._await_armed(step)
        for layer, state in enumerate(step.layers if wait_saves else ()):
            if not state.saved.wait(step.seconds_left()):
                step.fail(StepFailed("deadline_exceeded", f"layer {layer} was not saved"))
        self._step = None
        if step.failure is not None:
            raise step.failure
        if skipped:
            return tuple(r.request for r in step.requests)
        shed = [r.request for r in step.requests if r.optional and step.is_shed]
        return (*shed, *self.failed_requests)

    def _await_armed(self, step: Step) -> None:
        """What kvd refuses is the saver's to tell."""
        if step.kept_saves is not None and not step.kept_saves.answer.wait(step.seconds_left()):
            return
        for state in step.layers:
            if step.failure is not None or (step.is_free and not self._client.is_attached):
                return
            if state.armed is not None and state.armed.wait(step.seconds_left()) == UNHEARD:
                step.fail(StepFailed(UNHEARD, "kvd has not heard of a save"))

    def _skip(self, step: Step) -> None:
        """Compute ended without some layers: the slots that were taken for them are let go."""
        self._rows_gone.update(request.request for request in step.requests)
        step.end_layers()
        step.loads_issued.wait(step.seconds_left() + 1.0)
        self._let_go(step)
        for layer in step.layers:
            if not layer.is_written:
                layer.saved.set()

    def abort_step(self, failure: StepFailed | None = None) -> None:
        """Give the running step up: every slot that it took is let go. Idempotent."""
        step = self._step
        if step is None:
            return
        step.fail(failure or StepFailed("aborted", "the engine gave the step up"))
        self._step = None
        self.failed_requests = step.failed_requests
        if step.is_idle:
            return
        # The loader may wait for a slot of this very step: it gets it, and then sees the failure.
        self._let_go(step)
        step.loads_issued.wait(step.seconds_left() + 1.0)
        self._let_go(step)
        self._keeper.close(step)

    def _let_go(self, step: Step) -> None:
        for state in step.layers:
            if state.tenancy is not None and not state.is_computed:
                state.loaded.wait(step.seconds_left() + 1.0)
                tenancy = state.tenancy
                if tenancy is None:
                    continue  # kvd refused its loads meanwhile, and the slot was given back
                self._contents.void(tenancy.slot)
                state.is_computed, state.is_let_go = True, not state.loaded.is_set()
                # A slot that cannot be let go by word is freed by the re-attach, or by our death.
                with suppress(KvdRefused):
                    self._client.slots.computed(tenancy, state.is_written)

    def forget(self, request: str) -> None:
        """The request has ended: what slots hold of it is void."""
        self._contents.forget(request)
        self._saver.lost.forget(request)
        self._loader.lost.forget(request)
        self._rows_gone.discard(request)

    def rebind(self, slot: int) -> bool:
        """Between steps: move the layers of a quarantined slot to a spare; False if there is none:
        then its layers cannot run any more.
        """
        spare = self._ring.spare_for(slot)
        if spare is None:
            return False
        self._ring = self._ring.rebind(slot, spare)
        self._contents.void(spare)
        return True

    def close(self) -> None:
        """Give a running step up, let copies end and stop the threads."""
        self.abort_step()
        seconds = self._options.close_s
        self._loader.close(seconds)
        self._saver.close(seconds)
        with suppress(DeviceError):
            self._compute.close(int(seconds * 1e9))

    def _running(self) -> Step:
        if self._step is None:
            raise RuntimeError("no step is running")
        if self._step.failure is not None:
            raise self._step.failure
        return self._step

    def _to_save(self, step: Step, layer: int) -> tuple[StepRequest, ...]:
        """The requests whose rows of the next layer are saved; what is shed once stays shed: with
        one layer missing a block is of no use.
        """
        live = step.live_in(layer)
        optional = [request for request in live if request.optional]
        if optional and not step.is_shed and self._order.saves_open >= self._options.saves_max:
            step.is_shed = True
            size = self._rows.block_tokens
            for request in optional:
                first, end = request.saved_start // size, request.saved_end(size)
                self._shed_blocks += -(-end // size) - first
        if not step.is_shed:
            return live
        return tuple(request for request in live if not request.optional)

    def _failed(self, step: Step, failure: StepFailed) -> StepFailed:
        step.fail(failure)
        return failure
