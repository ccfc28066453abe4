"""Waiting for slots without taking them."""

from __future__ import annotations

from collections.abc import Sequence

from engine_shim.client.errors import KvdRefused, SlotQuarantined
from engine_shim.client.options import end_after, left_ns, left_s
from engine_shim.client.session import Core
from kvd.wire.gate_layout import STATE_FREE, make_word


class GateWaits:
    """Part of `SlotDesk`."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def await_free(self, slot: int, deadline_s: float | None = None) -> None:
        """Wait until the slot may be acquired.

        Raises: SlotQuarantined; KvdRefused(deadline_exceeded | unreachable | closed).
        """
        core, end = self._core, self._end(deadline_s)
        gate = core.await_gate(None, end)
        outcome, _ = gate.wait_free(slot, core.books.last(slot), left_ns(end), 0)
        if outcome == "quarantined":
            raise SlotQuarantined(slot)
        if outcome != "free":
            raise KvdRefused("deadline_exceeded", what=f"the wait for slot {slot}")

    def await_untouched(self, slots: Sequence[int], deadline_s: float | None = None) -> None:
        """Wait until nobody touches these slots, and take none; kvd need not know, or be there.

        For rows that are neither loaded, saved nor offered: their owner may write them then.

        Raises: SlotQuarantined; KvdRefused(deadline_exceeded).
        """
        end = self._end(deadline_s)
        for slot in slots:
            self._await_untouched(slot, end)

    def _await_untouched(self, slot: int, end: int) -> None:
        core = self._core
        while True:
            with core.lock:
                session = core.session
                gate = session.gate if session is not None else None
                word = gate.word(slot) if gate is not None else make_word(0, STATE_FREE)
                if core.books.is_untouched(slot, word):
                    return
                left = left_s(end)
                if left == 0:
                    raise KvdRefused("deadline_exceeded", what=f"the last use of slot {slot}")
                if core.books.is_in_use(slot):
                    core.room.wait(left)
                    continue
            gate = core.await_gate(None, end)
            outcome, _ = gate.wait_free(slot, core.books.last(slot), left_ns(end), 0)
            if outcome == "quarantined":
                raise SlotQuarantined(slot)

    def _end(self, deadline_s: float | None) -> int:
        return end_after(self._core.options.deadline_s if deadline_s is None else deadline_s)
