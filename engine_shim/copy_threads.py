"""The threads that move layers between slots and the pool, beside the compute thread.

*Loader*: acquires each layer's slot in order, `lookahead` layers ahead of compute, and loads it.
*Saver*: gets a layer's save once kvd has acknowledged its announcement: only kvd knows whether
the target blocks are still this request's. The ends of copies are told to kvd by host functions of
the streams, in their order: that only posts slot events, and waits for nobody.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from engine_shim.client import KvdRefused, SlotQuarantined, Tenancy
from engine_shim.copy_order import CopyOrder
from engine_shim.copy_plan import CopyPlan
from engine_shim.device import Device, DeviceError, DeviceMemory, Event
from engine_shim.layer_rows import SAVER, LayerRows, SlotContents
from engine_shim.load_failures import OF_ONE_REQUEST, Missing, fail_owners
from engine_shim.slot_client import SlotClient, pool_of
from engine_shim.steps import (
    LayerState,
    Step,
    StepFailed,
    StepRequest,
    as_step_failure,
)
from kvd.plan.ring import RingPlan
from kvd.plan.sums import BadSpan
from kvd.wire.slot_items import BadSumItem


class WorkThread:
    """A thread that does what it is handed, in order, until it is closed."""

    def __init__(self, name: str, device: Device) -> None:
        """Start it; the device is bound to it first."""
        self._device = device
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Hand over one piece of work; bounded by the layers of the running steps."""
        self._queue.put(work)

    def close(self, seconds: float) -> bool:
        """End after what was handed over; returns whether it ended in time."""
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._device.bind_thread()
        while (work := self._queue.get()) is not None:
            work()


class BusyTime:
    """How long a stream of copies was busy: overlapping waits in its queue count once.

    Used by one thread that submits and one that hears the ends, in the same order.
    """

    def __init__(self) -> None:
        """Nothing was copied."""
        self._last_end = 0
        self.busy_ns = 0

    def ended(self, submitted: int) -> None:
        """A copy that was submitted at this time (monotonic, ns) has ended now."""
        now = time.monotonic_ns()
        self.busy_ns += now - max(submitted, self._last_end)
        self._last_end = now


AWAY_S: Final = 0.25
"""How often a step that could do without kvd looks whether it is still there."""


class Loader:
    """Acquires and loads the layers of one step after another."""

    def __init__(
        self,
        client: SlotClient,
        device: Device,
        memory: DeviceMemory,
        rows: LayerRows,
        contents: SlotContents,
        order: CopyOrder,
    ) -> None:
        """Start the thread."""
        self._order = order
        self._client = client
        self._device = device
        self._memory = memory
        self._rows = rows
        self._contents = contents
        self._stream = device.stream("load")
        self._thread = WorkThread("kvd-load", device)
        self.time = BusyTime()
        self.num_bytes = 0
        self.num_mismatches = 0

    def start(self, step: Step, ring: RingPlan) -> None:
        """Load all layers of a step."""
        self._thread.put(partial(self._run, step, ring))

    def close(self, seconds: float) -> None:
        """Let running loads end."""
        self._thread.close(seconds)
        with suppress(DeviceError):
            self._stream.close(int(seconds * 1e9))

    def _run(self, step: Step, ring: RingPlan) -> None:
        for layer in range(ring.num_layers):
            ahead = max(0, layer - ring.lookahead[layer])
            if not step.wait_reached(ahead):
                break
            try:
                slot = ring.slot_of[layer]
                if step.is_free and not self._is_there(step, slot):
                    step.go_without()
                    break
                self._load(step, layer, slot, ring.slots[slot].bound)
            except SlotQuarantined as error:
                step.fail(StepFailed("slot_quarantined", str(error), error.slot))
                break
            except (KvdRefused, DeviceError) as error:
                step.fail(as_step_failure(error))
                break
        step.loads_issued.set()

    def _load(self, step: Step, layer: int, slot: int, is_bound: bool) -> None:
        state = step.layers[layer]
        missing = self._missing(step, layer, slot, is_bound)
        state.tenancy, missing = self._acquire(step, layer, slot, missing)
        self._contents.occupy(slot, layer)
        if not missing:
            state.loaded.set()
            state.acquired.set()
            return
        self._order.load_begins()
        try:
            pool = pool_of(self._client, state.tenancy)
            if pool is None:
                raise KvdRefused("pool_lost", what=f"blocks of layer {layer}")
            plan = self._plan(layer, slot, missing)
            started = time.monotonic_ns()
            plan.submit(self._stream, self._memory, pool)
            state.load_event = self._device.event()
            self._stream.record(state.load_event)
            ended = partial(self._ended, step, layer, plan, started)
            self._stream.launch_host(ended)
        except (KvdRefused, DeviceError):
            self._tell(state, ok=False)
            raise
        self.num_bytes += plan.num_bytes
        state.acquired.set()

    def _is_there(self, step: Step, slot: int) -> bool:
        """Wait for the slot as long as kvd is there; whether it is."""
        slots = self._client.slots
        while self._client.is_attached and step.seconds_left() > 0:
            try:
                slots.await_free(slot, min(AWAY_S, step.seconds_left()))
            except SlotQuarantined:
                return True  # the acquire will say it
            except KvdRefused:
                continue
            return True
        return self._client.is_attached

    def _missing(self, step: Step, layer: int, slot: int, is_bound: bool) -> Missing:
        """Requests whose rows the slot lacks, and how many of them it has."""
        missing = []
        for request in step.live_in(layer):
            held = self._contents.held(slot, layer, request.request)
            have = max(held, request.resident) if is_bound else held
            if have < request.num_computed:
                missing.append((request, have))
        return missing

    def _acquire(
        self, step: Step, layer: int, slot: int, missing: Missing
    ) -> tuple[Tenancy, Missing]:
        """Take the slot with what can be loaded into it.

        A load that kvd refuses ends its request, where that leaves others to go on with.

        Raises: KvdRefused.
        """
        try:
            return self._take(step, layer, slot, missing), missing
        except KvdRefused as error:
            if error.code not in OF_ONE_REQUEST or len(step.live) < 2:
                raise
        good = []
        for one in missing:
            try:
                self._client.slots.abandon(self._take(step, layer, slot, [one]))
            except KvdRefused as error:
                if error.code not in OF_ONE_REQUEST:
                    raise
                step.fail_request(one[0].request, as_step_failure(error))
            else:
                good.append(one)
        return self._take(step, layer, slot, good), good

    def _take(self, step: Step, layer: int, slot: int, missing: Missing) -> Tenancy:
        items = [self._rows.load_item(request, have) for request, have in missing]
        return self._client.slots.acquire(
            slot, layer, items, step.seconds_left(), boot_id=step.boot_id
        )

    def _plan(self, layer: int, slot: int, missing: Missing) -> CopyPlan:
        """The copies; made once kvd keeps the blocks, since only then their checksums stand."""
        plan = CopyPlan()
        sums = self._client.span_sums()
        for request, have in missing:
            self._rows.add_load(plan, layer, slot, request, have, sums)
        return plan

    def _ended(
        self, step: Step, layer: int, plan: CopyPlan, started: int, failure: DeviceError | None
    ) -> None:
        self.time.ended(started)
        state = step.layers[layer]
        assert state.tenancy is not None
        error: DeviceError | KvdRefused | None = failure
        if error is None:
            try:
                self._client.slots.check_loaded(state.tenancy)
            except KvdRefused as refused:
                error = refused
        bad: Sequence[BadSpan] = ()
        if error is not None:
            step.fail(as_step_failure(error))
        elif bad := plan.bad():
            self.num_mismatches += len(bad)
            fail_owners(step, layer, bad)
        self._tell(state, ok=error is None and step.failure is None, bad=bad)

    def _tell(self, state: LayerState, *, ok: bool, bad: Sequence[BadSpan] = ()) -> None:
        """Nothing is loaded any more: first kvd learns it, then whoever waits for the layer."""
        self._order.load_ended()
        assert state.tenancy is not None
        # A client that cannot tell is without kvd: the announcement will say it.
        with suppress(KvdRefused):
            items = [BadSumItem(*one) for one in bad]
            self._client.slots.load_ended(state.tenancy, ok, items)
        state.loaded.set()


@dataclass(frozen=True, slots=True)
class SaveTask:
    """One layer to be saved, of these requests; `written`: the event behind the write of its rows.

    The requests are those of the announcement: what is not in it has no save that may run.
    """

    step: Step
    layer: int
    requests: tuple[StepRequest, ...]
    written: Event


class Saver:
    """Saves layers in the order in which they were written."""

    def __init__(
        self,
        client: SlotClient,
        device: Device,
        memory: DeviceMemory,
        rows: LayerRows,
        order: CopyOrder,
    ) -> None:
        """Start the thread."""
        self._order = order
        self._client = client
        self._memory = memory
        self._rows = rows
        self._stream = device.stream("save")
        self._thread = WorkThread("kvd-save", device)
        self.time = BusyTime()
        self.num_bytes = 0
        self._lost: dict[str, StepFailed] = {}
        self._lock = threading.Lock()

    def lost(self, request: str) -> StepFailed | None:
        """Why rows of the request are not in the pool although they were announced."""
        with self._lock:
            return self._lost.get(request)

    def forget(self, request: str) -> None:
        """The request has ended."""
        with self._lock:
            self._lost.pop(request, None)

    def start(self, task: SaveTask) -> None:
        """Save one layer, once kvd has answered its announcement."""
        self._order.save_begins()
        armed = task.step.layers[task.layer].armed
        assert armed is not None
        armed.then(partial(self._thread.put, partial(self._run, task)))

    def close(self, seconds: float) -> None:
        """Let saves end that were handed over, those that wait for kvd's answer included."""
        end = time.monotonic() + seconds
        self._order.wait_for_saves(seconds)
        left = max(0.0, end - time.monotonic())
        self._thread.close(left)
        with suppress(DeviceError):
            self._stream.close(int(left * 1e9))

    def _run(self, task: SaveTask) -> None:
        state = task.step.layers[task.layer]
        try:
            self._copy(task, state)
        except (KvdRefused, DeviceError) as error:
            self._lose(task, as_step_failure(error))
            self._tell(state, ok=False)

    def _copy(self, task: SaveTask, state: LayerState) -> None:
        assert state.tenancy is not None
        plan, mode = CopyPlan(), self._client.checksums
        for request in task.requests:
            self._rows.add_save(plan, task.layer, state.tenancy.slot, request, mode)
        self._client.slots.save_started(state.tenancy, SAVER, task.step.seconds_left())
        pool = pool_of(self._client, state.tenancy)
        if pool is None:
            raise KvdRefused("pool_lost", what=f"blocks of layer {task.layer}")
        self._order.wait_for_loads(task.step.seconds_left())
        self._stream.wait(task.written)
        started = time.monotonic_ns()
        plan.submit(self._stream, pool, self._memory)
        ended = partial(self._ended, task, state, plan, started)
        self._stream.launch_host(ended)
        self.num_bytes += plan.num_bytes

    def _lose(self, task: SaveTask, failure: StepFailed) -> None:
        """Rows that were announced are not in the pool: their requests cannot load them again."""
        if all(request.optional for request in task.requests):
            task.step.is_shed = True
            return
        task.step.fail(failure)
        with self._lock:
            self._lost.update({request.request: failure for request in task.requests})

    def _ended(
        self,
        task: SaveTask,
        state: LayerState,
        plan: CopyPlan,
        started: int,
        failure: DeviceError | None,
    ) -> None:
        self.time.ended(started)
        if failure is not None:
            self._lose(task, as_step_failure(failure))
            self._tell(state, ok=False)
        else:
            self._tell(state, ok=True, sums=plan.sums())

    def _tell(self, state: LayerState, *, ok: bool, sums: bytes = b"") -> None:
        self._order.save_ended()
        assert state.tenancy is not None
        with suppress(KvdRefused):
            self._client.slots.save_ended(state.tenancy, SAVER, ok, sums=sums)
        state.saved.set()
