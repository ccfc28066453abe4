"""The rules, independent of how kvd keeps them.

1  no write to a slot while any copy out of it or into it is in flight     (memory.py, release)
2  a copy that is reported well saw one content throughout                 (memory.py)
3  one release for each epoch, and epochs rise by one
4  a prefix hit returns blocks whose bytes are those of its hashes
5  the machine's own books agree with each other after every event
6  the rows of a transfer that is over are exactly the right rows
7  neither destination rows nor a block's memory are reused under a copy
8  every request handle is answered exactly once
9  when faults stop, everything drains (drain.py)
"""

from __future__ import annotations

from kvd.core.check import problems
from kvd.core.copies import GATE_FREE
from kvd.core.ids import MemberRef
from kvd.core.machine import Machine
from tests.sim.content import Document, describe
from tests.sim.memory import Area, Copy, Violation

NEVER_COUNTED = (
    "ignored_future_epoch",
    "ignored_name_twice",
    "ignored_too_many_readers",
    "refused_frame_malformed",
    "refused_layer_unmapped",
    "refused_limit_reached",
    "refused_not_contributor",
    "refused_not_scheduler",
    "refused_slot_unknown",
    "refused_layout_mismatch",
)
"""Counters of what a correct engine cannot cause in a world of these sizes."""


class Oracle:
    """Remembers what was promised, and raises `Violation` when it is not kept."""

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._hashes: dict[bytes, tuple[Document, int, int]] = {}
        self._epochs: dict[tuple[int, MemberRef, int], int] = {}
        self._acquired: dict[tuple[MemberRef, int], int] = {}
        self.transfers: dict[str, tuple[Document, int, int]] = {}
        self.checked_rows = 0

    # Content ---------------------------------------------------------------------------------

    def name_block(self, document: Document, start: int, end: int) -> bytes:
        """The hash of rows [start, end) after all rows before them, remembered."""
        block_hash = document.block_hash(end)
        self._hashes[block_hash] = (document, start, end)
        return block_hash

    def rows_are(
        self,
        place: Area,
        at: int,
        rows: tuple[Document, int, int],
        layer: int,
        shard: int,
        rule: str,
        who: str,
    ) -> None:
        """Raise Violation when place[at:] is not rows [start, end) of a document."""
        document, start, end = rows
        want = document.tags(start, end, layer, shard)
        have = place.rows[at : at + len(want)]
        self.checked_rows += len(want)
        if have != want:
            for row, (got, right) in enumerate(zip(have, want, strict=True), start):
                if got != right:
                    text = f"{who}: row {row} in {place.name} is {describe(got)}"
                    raise Violation(rule, f"{text}, not {describe(right)}")

    def hit_is_right(self, spans: list[list[Area]], hashes: bytes, who: str) -> None:
        """Rule 4: spans[i] are the areas [layer * shards + shard] of the i-th block of a hit."""
        for index, areas in enumerate(spans):
            rows = self._hashes[hashes[index * 32 : index * 32 + 32]]
            for at, place in enumerate(areas):
                layer, shard = divmod(at, self._num_shards)
                self.rows_are(place, 0, rows, layer, shard, "hit", who)

    # Epochs ----------------------------------------------------------------------------------

    def acquired(self, member: MemberRef, slot: int, epoch: int, place: Area) -> None:
        """The owner takes a slot: at a new epoch, and nothing touches the memory."""
        key = (member, slot)
        if epoch <= self._acquired.get(key, -1):
            raise Violation("epochs", f"{member} slot {slot} acquired twice at epoch {epoch}")
        self._acquired[key] = epoch
        if place.touches:
            copy = place.touches[0][0]
            raise Violation("release", f"{place.name} acquired at {epoch} under {copy.name}")

    def stored(
        self, boot: int, member: MemberRef, word: tuple[int, int, int], joining: bool, place: Area
    ) -> None:
        """A life of kvd publishes (slot, epoch, state); `joining`: as part of the whole page.

        A life may begin with an epoch that an earlier one had released already: it died before the
        member could see that. It may not begin with one that the member has behind it.
        """
        slot, epoch, state = word
        known = self._epochs.get((boot, member, slot))
        acquired = self._acquired.get((member, slot), -1)
        if known is None:
            if epoch < acquired or (state == GATE_FREE and epoch == acquired):
                raise Violation("epochs", f"{member} slot {slot}: begins {epoch} after {acquired}")
        elif joining or state != GATE_FREE:
            if epoch != known:
                raise Violation("epochs", f"{member} slot {slot}: {epoch} is not {known}")
        elif epoch != known + 1:
            raise Violation("epochs", f"{member} slot {slot}: released {known} to {epoch}")
        # A word that its owner does not wait for any more frees nothing.
        # Nor does one for a save that kvd refused when it ran already: its owner looks to that.
        touches = [touch[0] for touch in place.touches if not _guards_its_slot(touch[0])]
        if state == GATE_FREE and epoch > acquired and touches:
            copy = touches[0]
            raise Violation("release", f"{place.name} freed at {epoch} under {copy.name}")
        self._epochs[boot, member, slot] = epoch

    # Books -----------------------------------------------------------------------------------

    def books_are_right(self, machine: Machine, where: str) -> None:
        """Rule 5."""
        found = problems(machine.state)
        if found:
            raise Violation("books", f"{where}: {found[0]} (of {len(found)})")
        counters = machine.state.counters
        for name in NEVER_COUNTED:
            if name in counters:
                raise Violation("never", f"{where}: {name} was counted")


def _guards_its_slot(copy: Copy) -> bool:
    return copy.cover is not None and copy.cover.guards_its_slot


class Handles:
    """Rule 8, for one life of one kvd."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._next = 1
        self._open: dict[int, str] = {}

    def new(self, what: str) -> int:
        """A handle for a request that arrived."""
        handle = self._next
        self._next += 1
        self._open[handle] = what
        return handle

    def answered(self, handle: int) -> None:
        """The machine answered it."""
        if self._open.pop(handle, None) is None:
            raise Violation("one answer", f"{self._where}: handle {handle} is not open")

    @property
    def open(self) -> list[str]:
        """What still waits."""
        return list(self._open.values())
