"""Announcing what a tenancy's rows will be copied to, until kvd keeps both ends of the copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine_shim.client.errors import KvdRefused
from engine_shim.client.item_sizes import LAYERS_MAX
from engine_shim.client.kept import KeptStep
from engine_shim.client.options import left_s
from engine_shim.client.slots import Tenancy, misused
from engine_shim.client.step_calls import StepCalls
from engine_shim.client.tickets import Ticket
from kvd.wire.slot_items import WRITTEN, ReadItem, SaveItem, WrittenItem

RETRY_MIN_S: Final = 0.001
RETRY_MAX_S: Final = 0.05
"""Pauses between two attempts at a span: to load what is being saved, to save what is loaded."""

SPAN_BUSY: Final = "span_busy"

AGAIN: Final = frozenset({SPAN_BUSY, "span_unwritten"})


class Announcements(StepCalls):
    """Part of `SlotDesk`."""

    def written(
        self,
        tenancy: Tenancy,
        layer: int,
        saves: Sequence[SaveItem] = (),
        reads: Sequence[ReadItem] = (),
        deadline_s: float | None = None,
        *,
        kept: KeptStep | None = None,
    ) -> Ticket:
        """The rows are final; all saves and reads of the tenancy start to be owed now.

        Every saver named here must be reported by `save_ended`, even if it never starts; before
        it copies it asks `save_started`.

        Args: kept: an open step that keeps all targets of `saves`, once kvd has said so.
        Raises: KvdRefused; nothing is owed: tenancy_misused, frame_malformed, frame_too_large,
            busy, unreachable, closed, process_forked,
            pool_lost: the target blocks are of an earlier life of kvd (report without saves).
        """
        core = self._core
        slot, epoch, _ = tenancy
        item = WrittenItem(slot, epoch, layer, list(saves), list(reads))
        is_whole = kept is not None and not reads and kept.saves == item.saves
        is_short = (is_whole or not (saves or reads)) and 0 <= layer < LAYERS_MAX
        core.check_process()
        sizes = [] if is_short else self._checked(item)
        core.await_event_room(self._end(deadline_s))
        with core.lock:
            use = core.books.use_of(tenancy)
            core.books.check_written(use, saves)
            if saves and tenancy.generation != core.generation:
                raise KvdRefused("pool_lost", what=f"the saves of slot {tenancy.slot}")
            if kept is not None and not (saves and self._counts(kept)):
                kept = None
            is_awaited = bool(reads) or (bool(saves) and kept is None)
            if not (saves or reads):
                ticket = self._tell(use, WRITTEN, layer=layer)
            elif is_short and kept is not None:
                ticket = self._tell(use, WRITTEN, layer=layer, saves=kept.number)
            else:
                use.told = None
                sizes = sizes or core.sizes_of([item])
                ticket = core.post([item], sizes, rides=not is_awaited)
            core.books.write(use, item, ticket, kept)
            if kept is not None:
                kept.copies += len(saves)
        if is_awaited:
            core.send()
        return ticket

    def answer_to_save(self, tenancy: Tenancy, saver: str) -> Ticket:
        """The answer after which a save may be copied: of its step, or to its announcement.

        Raises: KvdRefused(tenancy_misused).
        """
        core = self._core
        with core.lock:
            use = core.books.use_of(tenancy)
            kept = core.books.save_of(use, saver).kept
            assert use.armed is not None
            return use.armed if kept is None else kept.answer

    def confirm(self, tenancy: Tenancy, deadline_s: float | None = None) -> Ticket:
        """Wait until kvd has answered `written`; say it again while others load the same spans.

        Ranks that share spans need it, before `computed`: one saves what another still loads.

        Returns: the last answer, a refusal or the end of the time included.
        Raises: KvdRefused(tenancy_misused).
        """
        core = self._core
        end, pause_s = self._end(deadline_s), RETRY_MIN_S
        with core.lock:
            use = core.books.use_of(tenancy)
        while use.armed is not None and use.announced is not None:
            if use.armed.wait(left_s(end)) != SPAN_BUSY or left_s(end) <= pause_s:
                return use.armed
            sizes = self._checked(use.announced)
            with core.lock:
                core.changed.wait(pause_s)
                if core.books.use_of(tenancy) is not use or tenancy.generation != core.generation:
                    return use.armed
                use.told = None
                use.armed = core.post([use.announced], sizes)
                core.room.notify_all()
            core.send()
            pause_s = min(2 * pause_s, RETRY_MAX_S)
        raise misused(tenancy, "it was not written")

    def save_started(
        self, tenancy: Tenancy, saver: str, deadline_s: float | None = None
    ) -> Ticket | None:
        """Wait until kvd keeps both ends of this save for us; then its copy may start.

        Returns: what kvd has yet to say to `written`, where it keeps both ends for the sake of a
            step: after a refusal nothing was saved. None where nothing is left to be said.
        Raises: KvdRefused; do not copy, report `save_ended` with ok=False: tenancy_misused,
            deadline_exceeded, unreachable, closed,
            pool_lost: the target blocks are of an earlier life of kvd;
            what kvd answered to `written` (block_not_reserved, block_poisoned ...).
        """
        core = self._core
        core.check_process()
        heard, is_lost = self._armed_of_step(tenancy, saver)
        code = heard.code if heard is not None else ""
        if heard is None:
            code = self._await_armed(tenancy, saver, self._end(deadline_s))
            heard, is_lost = self._armed_of_step(tenancy, saver)
        if is_lost:
            # Whatever another life of kvd says to what was announced to it meanwhile.
            code = "pool_lost"
        if code:
            what = f"the save of slot {tenancy.slot} by {saver}"
            raise KvdRefused(code, what=what, slot=tenancy.slot, path=core.path)
        return heard

    def _armed_of_step(self, tenancy: Tenancy, saver: str) -> tuple[Ticket | None, bool]:
        """The answer to `written`, if nobody need wait for it because the save's step is kept; and
        whether the target blocks are of an earlier life of kvd."""
        core = self._core
        with core.lock:
            use = core.books.use_of(tenancy)
            kept = core.books.save_of(use, saver).kept
            armed = use.armed if kept is not None and kept.is_kept else None
            return armed, tenancy.generation != core.generation

    def _await_armed(self, tenancy: Tenancy, saver: str, end: int) -> str:
        """Wait for the answer to `written`, and for that to its repetitions; returns its code."""
        core, code = self._core, SPAN_BUSY
        while code == SPAN_BUSY:
            with core.lock:
                use = core.books.use_of(tenancy)
                core.books.save_of(use, saver)
                armed, is_last = use.armed, not use.is_computing or left_s(end) == 0
                is_last = is_last or tenancy.generation != core.generation
            assert armed is not None
            code = armed.wait(left_s(end))
            if is_last:
                break
            with core.lock:
                if code == SPAN_BUSY and use.armed is armed and use.is_computing:
                    core.room.wait(min(left_s(end), RETRY_MAX_S))  # `confirm` says it again
        return code
