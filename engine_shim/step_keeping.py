"""Asks kvd, when a step begins, to keep what all its layers will copy: then no copy waits for it.

Where that is refused, or does not fit the step, each layer is asked for alone.
"""

from __future__ import annotations

from contextlib import suppress

from engine_shim.client import KvdRefused
from engine_shim.layer_rows import LayerRows
from engine_shim.pipeline_types import PipelineOptions
from engine_shim.slot_client import SlotClient
from engine_shim.steps import Step
from kvd.plan.ring import RingPlan


class StepKeeper:
    """Opens and closes steps with kvd."""

    def __init__(self, client: SlotClient, rows: LayerRows, options: PipelineOptions) -> None:
        """Know what is copied where."""
        self._client = client
        self._rows = rows
        self._options = options

    def open(self, step: Step, ring: RingPlan) -> None:
        """Ask for what the step loads, and for what it saves; waits for no answer.

        Not where others copy the same spans, or read the rows remotely: there only kvd can say
        when each layer may be copied.
        """
        if self._options.shares_spans:
            return
        if not self._client.is_attached or any(request.targets for request in step.live):
            return
        slots = self._client.slots
        # First what is loaded: kvd keeps no load of blocks that the step may save at any time.
        loads = [
            (request, have)
            for request in step.live
            if (have := 0 if ring.reuse else request.resident) < request.num_computed
        ]
        saved = step.live if self._options.contributes else ()
        saves = step.save_items(saved, self._rows.save_items) if saved else []
        try:
            if loads:
                items = step.load_items(loads, self._rows.load_item)
                step.kept_loads = slots.open_step(items, (), 0.0)
            if saves:
                step.kept_saves = slots.open_step((), saves, 0.0)
        except KvdRefused:
            return

    def close(self, step: Step) -> None:
        """No layer of the step begins a copy any more."""
        for kept in (step.kept_loads, step.kept_saves):
            if kept is not None:
                # Refused in a forked child only: nothing of the step is its own.
                with suppress(KvdRefused):
                    self._client.slots.close_step(kept)
