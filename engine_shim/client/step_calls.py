"""Steps: kvd keeps the blocks that all layers of one copy, so that no copy waits for an answer.

    open_step --> begin (loads), written (saves): each names the step, and its copies may start
       |          as soon as kvd has answered the step with a yes
       +-------> close_step: told to kvd once the last of these copies was reported

A step outlives none of kvd's lives: what is begun after a re-attach is asked for layer by layer.
So is what is begun while the connection is lost: the next life may have been told already what
runs, and would not wait for more.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_shim.client.gate_waits import GateWaits
from engine_shim.client.item_sizes import PLAIN_BYTES, is_plain
from engine_shim.client.kept import KeptStep
from engine_shim.client.session import LinkState
from engine_shim.client.slots import SlotUse
from engine_shim.client.tickets import Ticket
from kvd.wire.slot_items import (
    LoadItem,
    SaveItem,
    SlotItem,
    StepClosedItem,
    StepOpenedItem,
    UsedItem,
)


class StepCalls(GateWaits):
    """Part of `SlotDesk`."""

    def open_step(
        self,
        loads: Sequence[LoadItem] = (),
        saves: Sequence[SaveItem] = (),
        deadline_s: float | None = None,
    ) -> KeptStep:
        """Ask kvd to keep what each layer of a step loads and saves; does not wait for the answer.

        A refusal changes nothing: layers are then asked for one by one.

        Args:
            loads: blocks of which all layers can be loaded from now on.
            saves: at most one save, which names the request of each block.
        Raises: KvdRefused; nothing is asked: frame_malformed, frame_too_large, busy, unreachable,
            closed, process_forked.
        """
        core = self._core
        item = StepOpenedItem(1, list(loads), list(saves))
        core.check_process()
        sizes = core.sizes_of([item])
        core.await_event_room(self._end(deadline_s))
        with core.lock:
            core.last_step += 1
            item = StepOpenedItem(core.last_step, item.loads, item.saves)
            ticket = core.post([item], sizes)
            kept = KeptStep(core.last_step, core.generation, item.loads, item.saves, ticket)
        core.send()
        return kept

    def _checked(self, item: SlotItem) -> list[int]:
        """Encoded size of an event, which kvd is sure to be able to read.

        Raises: KvdRefused(frame_malformed | frame_too_large | process_forked).
        """
        self._core.check_process()
        return [PLAIN_BYTES] if is_plain(item) else self._core.sizes_of([item])

    def close_step(self, kept: KeptStep) -> None:
        """No copy of the step begins any more; those that run are waited for. Idempotent.

        Raises: KvdRefused(process_forked).
        """
        core = self._core
        core.check_process()
        with core.lock:
            kept.closes = True
            items = self._closing(kept)
            if items:
                core.post(items, [PLAIN_BYTES] * len(items), is_awaited=False)
        if items:
            core.wakeup.set()  # nobody waits for it: the client's thread sends it

    def _tell(
        self,
        use: SlotUse,
        did: int,
        *,
        layer: int = -1,
        loads: int = 0,
        saves: int = 0,
        saver: str = "",
    ) -> Ticket:
        """Tell something that went well, and that nobody waits for; the lock is held.

        It is added to what was told of the tenancy last, if that was not sent yet.
        """
        told = use.told
        if told is not None and told.is_open:
            item = told.item
            assert type(item) is UsedItem
            if layer < 0 or item.layer in (-1, layer):
                item.did |= did
                item.layer = max(item.layer, layer)
                item.saves = item.saves or saves
                item.saver = item.saver or saver
                return told.ticket
        slot, epoch, _ = use.tenancy
        item = UsedItem(slot, epoch, layer, did, loads, saves, saver)
        told = use.told = self._core.post_open(item, PLAIN_BYTES)
        return told.ticket

    def _counts(self, kept: KeptStep) -> bool:
        """Whether copies may name the step: they begin once it is kept. The lock is held.

        Should kvd have refused it meanwhile, it takes what they say as if it had asked for them
        alone.
        """
        core = self._core
        is_present = core.state is LinkState.ATTACHED and kept.generation == core.generation
        return is_present and not (kept.closes or kept.is_refused)

    def _end_copies(self, kept: KeptStep | None, count: int = 1) -> list[SlotItem]:
        """Copies were reported; what is to be posted behind their ends. Under the lock."""
        if kept is None:
            return []
        kept.copies -= count
        return self._closing(kept)

    def _closing(self, kept: KeptStep) -> list[SlotItem]:
        if not kept.closes or kept.copies or kept.closed:
            return []
        kept.closed = True
        # A step that was refused, too: its copies may have named it. A kvd that came meanwhile
        # does not know the number, which no step has twice.
        return [StepClosedItem(kept.number)]
