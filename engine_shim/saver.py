"""Saves layers into the pool, in the order in which they were written."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from engine_shim.client import KvdRefused, Ticket
from engine_shim.copy_order import CopyOrder
from engine_shim.copy_plan import CopyPlan
from engine_shim.copy_threads import BusyTime, WorkThread
from engine_shim.device import Device, DeviceError, DeviceMemory, Event
from engine_shim.layer_rows import SAVER, LayerRows
from engine_shim.lost_rows import LostRows
from engine_shim.slot_client import SlotClient, pool_of
from engine_shim.steps import LayerState, Step, StepFailed, StepRequest, as_step_failure

UNHEARD: Final = "unreachable"
"""Code of a save whose announcement nobody will answer."""


class SaveTask(NamedTuple):
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
        *,
        alone: bool,
    ) -> None:
        """Start the thread; alone: no other rank loads or saves the same spans."""
        self._alone = alone
        self._order = order
        self._client = client
        self._memory = memory
        self._rows = rows
        self._stream = device.stream("save")
        self._thread = WorkThread("kvd-save", device)
        self.time = BusyTime()
        self.num_bytes = 0
        self.lost = LostRows()
        self._lock = threading.Lock()
        self._device = device
        self._turn = threading.Lock()
        self._queued = 0

    def start(self, task: SaveTask) -> None:
        """Save one layer, once kvd has answered its step or its announcement."""
        self._order.save_begins()
        state = task.step.layers[task.layer]
        assert state.tenancy is not None
        # Planned while kvd answers.
        slot, mode = state.tenancy.slot, self._client.checksums
        plan = self._rows.save_plan(task.layer, slot, task.requests, mode)
        answer = self._client.slots.answer_to_save(state.tenancy, SAVER)
        answer.then(partial(self._answered, task, plan, answer))

    def _answered(self, task: SaveTask, plan: CopyPlan, answer: Ticket) -> None:
        """Begin the save in the thread that heard kvd's yes, unless it would have to wait.

        Waking the saver takes as long as all that there is to do. Saves begin in their order: once
        one was handed to the saver, so are those behind it.
        """
        is_yes = answer.is_settled and not answer.code
        armed = task.step.layers[task.layer].armed
        if not is_yes and armed is not None and armed is not answer:
            # Its step is not kept: then it depends on what kvd says to this layer.
            armed.then(partial(self._answered, task, plan, armed))
            return
        if is_yes and self._order.may_save and self._turn.acquire(blocking=False):
            try:
                if not self._queued:
                    self._device.bind_thread()
                    self._run(task, plan)
                    return
            finally:
                self._turn.release()
        with self._lock:
            self._queued += 1
        self._thread.put(partial(self._run_queued, task, plan))

    def _run_queued(self, task: SaveTask, plan: CopyPlan) -> None:
        with self._turn:
            self._run(task, plan)
            with self._lock:
                self._queued -= 1

    def close(self, seconds: float) -> None:
        """Let saves end that were handed over, those that wait for kvd's answer included."""
        end = time.monotonic() + seconds
        self._order.wait_for_saves(seconds)
        left = max(0.0, end - time.monotonic())
        self._thread.close(left)
        with suppress(DeviceError):
            self._stream.close(int(left * 1e9))

    def _run(self, task: SaveTask, plan: CopyPlan) -> None:
        state = task.step.layers[task.layer]
        try:
            self._copy(task, state, plan)
        except (KvdRefused, DeviceError) as error:
            self._lose(task, as_step_failure(error))
            self._tell(state, ok=False)

    def _copy(self, task: SaveTask, state: LayerState, plan: CopyPlan) -> None:
        assert state.tenancy is not None
        heard = self._client.slots.save_started(state.tenancy, SAVER, task.step.seconds_left())
        pool = pool_of(self._client, state.tenancy)
        if pool is None:
            raise KvdRefused("pool_lost", what=f"blocks of layer {task.layer}")
        if not self._order.may_save:
            self._order.wait_for_loads(task.step.seconds_left())
        self._stream.wait(task.written)
        started = time.monotonic_ns()
        ended = partial(self._ended, task, state, plan, started, heard)
        plan.submit(self._stream, pool, self._memory, ended)
        self.num_bytes += plan.num_bytes

    def _lose(self, task: SaveTask, failure: StepFailed) -> None:
        """Rows that were announced are not in the pool: their requests cannot load them again."""
        if all(request.optional for request in task.requests):
            task.step.is_shed = True
            return
        task.step.fail(failure)
        self.lost.lose((request.request for request in task.requests), failure)

    def _ended(
        self,
        task: SaveTask,
        state: LayerState,
        plan: CopyPlan,
        started: int,
        heard: Ticket | None,
        failure: DeviceError | None,
    ) -> None:
        self.time.ended(started)
        error: DeviceError | KvdRefused | None = failure
        if error is None and heard is not None and heard.code:
            error = _refused(heard)
        if error is not None:
            self._lose(task, as_step_failure(error))
            self._tell(state, ok=False)
            return
        self._tell(state, ok=True, sums=plan.sums(), is_kept=heard is not None)
        if heard is not None:
            heard.then(partial(self._heard, task, heard), rides=True)

    def _heard(self, task: SaveTask, heard: Ticket) -> None:
        """kvd's answer to the announcement of what was copied for the sake of its step."""
        if heard.code or not heard.is_settled:
            self._lose(task, as_step_failure(_refused(heard)))

    def _tell(
        self, state: LayerState, *, ok: bool, sums: bytes = b"", is_kept: bool = False
    ) -> None:
        self._order.save_ended()
        # Blocks that a step keeps are of use to others when it is closed, and not before.
        rides = ok and self._alone and (is_kept or self._order.saves_open > 0)
        assert state.tenancy is not None
        # Who waits for the save goes on while it is sent: what is said then comes behind it.
        with suppress(KvdRefused):
            self._client.slots.save_ended(
                state.tenancy, SAVER, ok, sums=sums, rides=rides, posted=state.saved.set
            )
        state.saved.set()


def _refused(heard: Ticket) -> KvdRefused:
    return KvdRefused(heard.code or UNHEARD, what="a save that was announced")
