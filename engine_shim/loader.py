"""Takes the slots of a step's layers, ahead of compute, and loads what they lack."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from engine_shim.client import KeptStep, KvdRefused, SlotQuarantined, Tenancy, Ticket
from engine_shim.copy_order import CopyOrder
from engine_shim.copy_plan import CopyPlan
from engine_shim.copy_threads import BusyTime, WorkThread
from engine_shim.device import Device, DeviceError, DeviceMemory
from engine_shim.layer_rows import LayerRows, SlotContents
from engine_shim.load_failures import NOT_OF_ROWS, OF_ONE_REQUEST, fail_owners
from engine_shim.lost_rows import LostRows
from engine_shim.slot_client import SlotClient, pool_of
from engine_shim.steps import LayerState, Missing, Step, StepFailed, as_step_failure
from kvd.plan.ring import RingPlan
from kvd.plan.sums import BadSpan
from kvd.wire.slot_items import BadSumItem

AWAY_S: Final = 0.25
"""How often a step that could do without kvd looks whether it is still there."""

OUT_OF_TIME: Final = frozenset({"deadline_exceeded", "busy"})
"""Refusals of an acquire that a later attempt may not meet."""


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
        """Start the threads: one takes slots, one waits for kvd where that did not say yes."""
        self._order = order
        self._client = client
        self._device = device
        self._memory = memory
        self._rows = rows
        self._contents = contents
        self._stream = device.stream("load")
        self._thread = WorkThread("kvd-load", device)
        self._again = WorkThread("kvd-load-again", device)
        self._turn = threading.Lock()
        self.time = BusyTime()
        self.num_bytes = 0
        self.num_mismatches = 0
        self.lost = LostRows()

    def start(self, step: Step, ring: RingPlan) -> None:
        """Load all layers of a step; where nothing is loaded, compute takes the slots itself.

        The first layer is begun here if its slot is free: the thread would have to be woken.
        """
        first = 0
        if not (step.takes_slots or step.is_free):
            first = int(self._begin(step, ring, 0, waits=False))
        if step.takes_slots or first == ring.num_layers:
            step.loads_issued.set()
        else:
            self._thread.put(partial(self._run, step, ring, first))

    def take(self, step: Step, ring: RingPlan, layer: int) -> None:
        """Take the slot of a layer of such a step, in the caller's thread, when it is free."""
        self._begin(step, ring, layer)

    def close(self, seconds: float) -> None:
        """Let running loads end."""
        end = time.monotonic() + seconds
        self._thread.close(seconds)
        self._again.close(max(0.0, end - time.monotonic()))
        with suppress(DeviceError):
            self._stream.close(int(seconds * 1e9))

    def _run(self, step: Step, ring: RingPlan, first: int) -> None:
        for layer in range(first, ring.num_layers):
            ahead = max(0, layer - ring.lookahead[layer])
            if not (step.wait_reached(ahead) and self._begin(step, ring, layer)):
                break
        step.loads_issued.set()

    def _begin(self, step: Step, ring: RingPlan, layer: int, *, waits: bool = True) -> bool:
        """Take a layer's slot and begin its load; False when the step cannot go on so, or has to
        wait for the slot and may not."""
        slot = ring.slot_of[layer]
        try:
            if step.is_free and not self._is_there(step, slot):
                step.go_without()
                return False
            self._load(step, layer, slot, ring.slots[slot].bound, waits)
        except SlotQuarantined as error:
            step.fail(StepFailed("slot_quarantined", str(error), error.slot))
            return False
        except (KvdRefused, DeviceError) as error:
            if waits or error.code not in OUT_OF_TIME:
                step.fail(as_step_failure(error))
            return False
        return True

    def _load(self, step: Step, layer: int, slot: int, is_bound: bool, waits: bool) -> None:
        state = step.layers[layer]
        missing = self._missing(step, layer, slot, is_bound)
        seconds = AWAY_S if waits else 0.0
        kept = step.kept_loads
        state.tenancy, ticket = self._take(step, layer, slot, missing, kept, seconds)
        self._contents.occupy(slot, layer)
        if not missing:
            state.loaded.set()
            state.acquired.set()
            return
        plan = self._early(layer, slot, missing)
        ticket.then(partial(self._answered, step, layer, missing, plan, ticket))

    def _early(self, layer: int, slot: int, missing: Missing) -> CopyPlan | None:
        """The copies, before kvd has answered; None where checksums stand only then."""
        # From here on the layer has a tenancy: what fails is for `_submit` to tell.
        with suppress(KvdRefused):
            if self._client.span_sums() is None:
                return self._rows.load_plan(layer, slot, missing, None)
        return None

    def _answered(
        self, step: Step, layer: int, missing: Missing, plan: CopyPlan | None, ticket: Ticket
    ) -> None:
        """Begin the load in the thread that heard kvd's yes: waking another takes longer."""
        if ticket.is_settled and not ticket.code:
            self._device.bind_thread()
            self._submit(step, layer, missing, plan)
            return
        own = self._own_answer(step, layer)
        if own is not None and own is not ticket:
            # Its step is not kept: then it depends on what kvd says to this layer.
            own.then(partial(self._answered, step, layer, missing, plan, own))
        else:
            self._again.put(partial(self._ask_again, step, layer, missing, ticket))

    def _own_answer(self, step: Step, layer: int) -> Ticket | None:
        state = step.layers[layer]
        with suppress(KvdRefused):
            if state.tenancy is not None:
                return self._client.slots.answer_to_begin(state.tenancy)
        return None

    def _ask_again(self, step: Step, layer: int, missing: Missing, ticket: Ticket) -> None:
        state = step.layers[layer]
        assert state.tenancy is not None
        slot = state.tenancy.slot
        try:
            state.tenancy, left = self._settle(step, layer, state.tenancy, missing, ticket)
        except SlotQuarantined as error:
            self._give_up(step, layer, StepFailed("slot_quarantined", str(error), error.slot))
        except KvdRefused as error:
            self._give_up(step, layer, as_step_failure(error))
        else:
            if left:
                self._submit(step, layer, left, None)
                return
            self._contents.occupy(slot, layer)
            self._is_loaded(state)
            state.acquired.set()

    def _give_up(self, step: Step, layer: int, failure: StepFailed) -> None:
        """The layer has no slot: it was given back."""
        step.layers[layer].tenancy = None
        step.fail(failure)
        step.layers[layer].loaded.set()

    def _submit(self, step: Step, layer: int, missing: Missing, plan: CopyPlan | None) -> None:
        state = step.layers[layer]
        assert state.tenancy is not None
        self._order.load_begins()
        try:
            pool = pool_of(self._client, state.tenancy)
            if pool is None:
                raise KvdRefused("pool_lost", what=f"blocks of layer {layer}")
            plan = plan or self._plan(layer, state.tenancy.slot, missing)
            with self._turn:
                started = time.monotonic_ns()
                ended = partial(self._ended, step, layer, missing, plan, started)
                plan.submit(self._stream, self._memory, pool, ended)
                self.num_bytes += plan.num_bytes
        except (KvdRefused, DeviceError) as error:
            self._tell(state, ok=False)
            step.fail(as_step_failure(error))
            return
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

    def _settle(
        self, step: Step, layer: int, tenancy: Tenancy, missing: Missing, ticket: Ticket
    ) -> tuple[Tenancy, Missing]:
        """Wait until kvd lets the loads start; a slot with what can be loaded into it.

        A load that kvd refuses ends its request, where that leaves others to go on with.

        Raises: KvdRefused.
        """
        slots, slot = self._client.slots, tenancy.slot
        items = [self._rows.load_item(request, have) for request, have in missing]
        try:
            slots.await_loads(tenancy, layer, items, ticket, step.seconds_left())
        except KvdRefused as error:
            # Those of which another layer's load was refused meanwhile have failed already.
            missing = [one for one in missing if one[0] in step.live]
            if error.code not in OF_ONE_REQUEST or (missing and len(step.live) < 2):
                raise
        else:
            return tenancy, missing
        good = []
        for one in missing:
            try:
                slots.abandon(self._take_again(step, layer, slot, [one]))
            except KvdRefused as error:
                if error.code not in OF_ONE_REQUEST:
                    raise
                step.fail_request(one[0].request, as_step_failure(error))
            else:
                good.append(one)
        return self._take_again(step, layer, slot, good), good

    def _take_again(self, step: Step, layer: int, slot: int, missing: Missing) -> Tenancy:
        tenancy, ticket = self._take(step, layer, slot, missing)
        if missing:
            items = [self._rows.load_item(request, have) for request, have in missing]
            seconds = step.seconds_left()
            self._client.slots.await_loads(tenancy, layer, items, ticket, seconds)
        return tenancy

    def _take(
        self,
        step: Step,
        layer: int,
        slot: int,
        missing: Missing,
        kept: KeptStep | None = None,
        away_s: float = AWAY_S,
    ) -> tuple[Tenancy, Ticket]:
        items = step.load_items(missing, self._rows.load_item)
        slots = self._client.slots
        while True:
            # In slices: a step that fails meanwhile must not wait for its slot.
            seconds = min(away_s, step.seconds_left())
            try:
                return slots.begin(
                    slot, layer, items, seconds, boot_id=step.boot_id, early=True, kept=kept
                )
            except KvdRefused as error:
                is_over = seconds < AWAY_S or step.failure is not None
                if is_over or error.code not in OUT_OF_TIME:
                    raise

    def _plan(self, layer: int, slot: int, missing: Missing) -> CopyPlan:
        """The copies; made once kvd keeps the blocks, since only then their checksums stand."""
        return self._rows.load_plan(layer, slot, missing, self._client.span_sums())

    def _ended(
        self,
        step: Step,
        layer: int,
        missing: Missing,
        plan: CopyPlan,
        started: int,
        failure: DeviceError | None,
    ) -> None:
        self.time.ended(started)
        state = step.layers[layer]
        assert state.tenancy is not None
        error: DeviceError | KvdRefused | None = failure
        heard: Ticket | None = None
        if error is None:
            try:
                heard = self._client.slots.check_loaded(state.tenancy)
            except KvdRefused as refused:
                error = refused
        bad: Sequence[BadSpan] = ()
        if error is not None:
            step.fail(as_step_failure(error))
        elif bad := plan.bad():
            self.num_mismatches += len(bad)
            fail_owners(step, layer, bad)
        self._tell(state, ok=error is None and step.failure is None, bad=bad)
        if heard is not None:
            heard.then(partial(self._heard, step, missing, heard), rides=True)

    def _heard(self, step: Step, missing: Missing, heard: Ticket) -> None:
        """kvd's answer to what was loaded for the sake of its step, and perhaps used already."""
        if heard.code and heard.code not in NOT_OF_ROWS:
            failure = as_step_failure(KvdRefused(heard.code, what="blocks that were loaded"))
            step.fail(failure)
            self.lost.lose((request.request for request, _ in missing), failure)

    def _tell(self, state: LayerState, *, ok: bool, bad: Sequence[BadSpan] = ()) -> None:
        """Nothing is loaded any more: first kvd learns it, then whoever waits for the layer."""
        self._order.load_ended()
        assert state.tenancy is not None
        # A client that cannot tell is without kvd: the announcement will say it.
        with suppress(KvdRefused):
            items = [BadSumItem(*one) for one in bad]
            self._client.slots.load_ended(state.tenancy, ok, items)
        self._is_loaded(state)

    def _is_loaded(self, state: LayerState) -> None:
        """Nothing is loaded into the slot any more; compute may have given it up meanwhile."""
        state.loaded.set()
        if state.is_let_go and state.tenancy is not None:
            with suppress(KvdRefused):  # compute has said it in the same moment
                self._client.slots.computed(state.tenancy, False)
