"""What a pipeline says about its slots: the only way to acquire one, and to report its steps.

Each call checks, changes the books and appends the slot event in one step under the client's lock,
so the books, the event stream and an announcement never contradict each other.

    acquire --> load_ended --> written --> save_started, save_ended ...
                                  |
                                  +------> computed

    open_step -> yes -> (all of it, for each layer) -> close_step

Loads wait for kvd's yes to `acquire`, saves for that to `written`; those of a step that kvd keeps
(`step_calls.py`) only for its yes to the step.

The caller reports each step once. What ends something (`load_ended`, `computed`, `save_ended`,
`poisoned`, `abandon`) never waits and is never refused for want of a connection: it has happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine_shim.client.acquiring import Acquiring
from engine_shim.client.errors import KvdRefused
from engine_shim.client.item_sizes import PLAIN_BYTES
from engine_shim.client.session import Core, LinkState
from engine_shim.client.slots import Tenancy
from engine_shim.client.tickets import Ticket
from kvd.wire.slot_items import (
    COMPUTED,
    LOADED,
    SAVED,
    BadSumItem,
    ComputedItem,
    LoadEndedItem,
    PoisonedItem,
    SaveEndedItem,
)


def _nothing() -> None:
    """Nobody waits."""


class SlotDesk(Acquiring):
    """The slots of one worker member."""

    def __init__(self, core: Core, member: str, contributes: bool = False) -> None:
        """member: for errors; contributes: whether it saves the spans that it loads."""
        super().__init__(core, member)
        self._contributes = contributes

    # Steps of a tenancy -----------------------------------------------------------------------

    def check_loaded(self, tenancy: Tenancy) -> Ticket | None:
        """To be asked when all loads of the tenancy have ended, before their rows are used.

        While kvd lives it keeps the blocks of a load. If it died before the copy's end, its next
        life may have given them to somebody else meanwhile: the rows are not to be trusted.

        Returns: what kvd has yet to say to loads of a step; None where nothing is left to be said.
        Raises: KvdRefused(pool_lost, and what kvd answered meanwhile to loads of a step).
        """
        core = self._core
        with core.lock:
            session = core.session
            gate = session.gate if session is not None else None
            is_kept = (
                core.state is LinkState.ATTACHED
                and tenancy.generation == core.generation
                and gate is not None
                and not gate.hung_up()
            )
            use = core.books.use_of(tenancy)
            answer = use.acquired if use.kept is not None and use.kept.is_kept else None
        if not is_kept:
            raise KvdRefused("pool_lost", what=f"the loads of slot {tenancy.slot}")
        if answer is not None and answer.code:
            raise KvdRefused(
                answer.code, what=f"the loads of slot {tenancy.slot}", slot=tenancy.slot
            )
        return answer

    def load_ended(self, tenancy: Tenancy, ok: bool, bad: Sequence[BadSumItem] = ()) -> Ticket:
        """All loads of the tenancy have ended; not ok poisons its rows.

        Args: bad: blocks whose bytes are not those that were saved; kvd poisons them. With ok,
            the rows of their requests are neither saved nor offered from here on.
        Raises: KvdRefused(tenancy_misused).
        """
        core, is_good = self._core, ok and not bad
        core.check_process()
        item = LoadEndedItem(tenancy.slot, tenancy.epoch, ok, list(bad))
        sizes = [] if is_good else self._checked(item)
        with core.lock:
            use = core.books.use_of(tenancy)
            closing = self._end_copies(use.kept) if use.loads else []
            use.loads, use.kept = (), None
            # It frees the spans to be saved again: that only who contributes does, and after this.
            rides = is_good and self._contributes and not closing
            if is_good:
                ticket = self._tell_end(use, LOADED, closing, rides=rides)
            else:
                ticket = self._post_end(use, [item], sizes, closing)
        if not rides:
            core.send()
        return ticket

    def computed(self, tenancy: Tenancy, ok: bool = True, *, rides: bool = False) -> Ticket:
        """Attention over the slot has ended.

        Args: rides: nobody waits for kvd to hear it; a later event takes it along.
        Raises: KvdRefused(tenancy_misused | load_open).
        """
        core = self._core
        core.check_process()
        with core.lock:
            use = core.books.use_of(tenancy)
            core.books.check_computed(use)
            # What is still saved keeps the slot as long, and its end takes this along.
            rides = use.is_saved or (rides and not use.reads)
            if ok:
                ticket = self._tell_end(use, COMPUTED, rides=rides)
            else:
                item = ComputedItem(tenancy.slot, tenancy.epoch, False)
                ticket = self._post_end(use, [item], [PLAIN_BYTES], rides=rides)
            use.compute.ended, use.compute.ok = ticket, ok
            core.books.ended(use)
        if not rides:
            core.send()
        return ticket

    def save_ended(
        self,
        tenancy: Tenancy,
        saver: str,
        ok: bool,
        tokens: Sequence[int] = (),
        sums: bytes = b"",
        *,
        rides: bool = False,
        posted: Callable[[], None] = _nothing,
    ) -> Ticket:
        """A save has ended; it touches neither slot nor blocks any more.

        Args:
            tokens: valid ones for each target block, () = as announced in `written`.
            sums: checksum of each target block, as `SaveEndedItem` says; b"" for none.
            rides: nobody waits for kvd to hear it; a later event takes it along.
            posted: called before it is sent, when nothing that is said later can overtake it.
        Raises: KvdRefused(tenancy_misused).
        """
        core, is_good = self._core, ok and not tokens and not sums and saver.isascii()
        core.check_process()
        item = SaveEndedItem(tenancy.slot, tenancy.epoch, saver, ok, list(tokens), sums)
        sizes = [] if is_good else self._checked(item)
        with core.lock:
            use = core.books.use_of(tenancy)
            save = core.books.save_of(use, saver)
            core.books.check_counts(use, save, tokens)
            closing = self._end_copies(save.kept)
            rides = rides and not use.reads and not closing
            if is_good:
                ticket = self._tell_end(use, SAVED, closing, saver=saver, rides=rides)
            else:
                ticket = self._post_end(use, [item], sizes, closing, rides=rides)
            save.ended, save.ok = ticket, ok
            core.books.ended(use)
        posted()
        if closing:
            core.wakeup.set()  # to send it here would keep the interpreter from who was told
        elif not rides:
            core.send()
        return ticket

    def poisoned(self, tenancy: Tenancy) -> Ticket:
        """The tenancy's rows are not valid, and nothing copied out of it may be used.

        Raises: KvdRefused(tenancy_misused).
        """
        core = self._core
        item = PoisonedItem(tenancy.slot, tenancy.epoch)
        sizes = self._checked(item)
        with core.lock:
            core.books.use_of(tenancy).told = None
            ticket = core.post([item], sizes)
        core.send()
        return ticket
