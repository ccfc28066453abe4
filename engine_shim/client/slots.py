"""The member's own books on its slots: what it does in each, and what it did lately.

kvd keeps the holds; this is the other end of the same facts. It must be exact, because three things
rest on it: the announcement to a restarted kvd, the answers to kvd's questions about holds that
take long, and that no slot is taken while our own copies still touch it.

An end counts as *running* until kvd has acknowledged the event that reports it: the event carries
more than an answer does (token counts, the order), and it is resent until it has arrived.

Not thread-safe by itself: the client's lock is held around every call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from engine_shim.client.errors import KvdRefused
from engine_shim.client.event_types import Entry
from engine_shim.client.kept import KeptStep
from engine_shim.client.tickets import Ticket
from engine_shim.gate import AcquiredEpochs
from kvd.wire.gate_layout import STATE_FREE, split_word
from kvd.wire.messages import SlotAnnounce
from kvd.wire.slot_items import LoadItem, ReadItem, SaveItem, WrittenItem

TENANCIES_KEPT: Final = 8
"""Tenancies of each slot that are remembered, the present one included."""

COMPUTE: Final = "compute"
SAVE: Final = "save"

NEVER_STARTED: Final = "never_started"
RUNNING: Final = "running"
ENDED_OK: Final = "ended_ok"
ENDED_FAILED: Final = "ended_failed"
UNKNOWN: Final = "unknown"


class Tenancy(NamedTuple):
    """The use of a slot from its acquire to its release.

    generation: of the client when it was acquired; blocks of another generation are void.
    """

    slot: int
    epoch: int
    generation: int


@dataclass(slots=True)
class Activity:
    """Computing, or one save: running until `ended` is posted.

    announced: of a save, the token count for each of its blocks.
    kept:      of a save, the step that keeps its blocks, None where kvd was asked for this layer.
    """

    announced: tuple[int, ...] = ()
    ended: Ticket | None = None
    ok: bool = False
    kept: KeptStep | None = None

    def truth(self) -> str:
        """What became of it, for kvd's question."""
        if self.ended is None or not self.ended.is_settled:
            return RUNNING
        taken = self.ended.code == ""
        return ENDED_OK if self.ok and taken else ENDED_FAILED


@dataclass(slots=True)
class SlotUse:
    """One tenancy as the member knows it.

    acquired: kvd's answer to its begin.
    told:     what was told of it last, while that may be added to; None where something else was
              told since.
    kept:     the step that keeps the blocks of its loads, None where kvd was asked for this layer.
    """

    tenancy: Tenancy
    layer: int
    loads: tuple[LoadItem, ...]
    compute: Activity = field(default_factory=Activity)
    armed: Ticket | None = None
    announced: WrittenItem | None = None
    saves: dict[str, Activity] = field(default_factory=dict)
    reads: tuple[ReadItem, ...] = ()
    acquired: Ticket | None = None
    kept: KeptStep | None = None
    told: Entry | None = None

    @property
    def is_computing(self) -> bool:
        """Whether the member may still write or read the slot itself."""
        return self.compute.ended is None

    @property
    def savers(self) -> list[str]:
        """Saves that have not ended."""
        return [saver for saver, copy in self.saves.items() if copy.ended is None]

    @property
    def is_busy(self) -> bool:
        """Whether anything of this process still touches the slot."""
        return self.compute.ended is None or bool(self.loads) or self.is_saved

    @property
    def is_saved(self) -> bool:
        """Whether a save has not ended."""
        for copy in self.saves.values():  # noqa: SIM110 - asked several times for each layer
            if copy.ended is None:
                return True
        return False


class SlotBooks:
    """All slots of the member."""

    def __init__(self, num_slots: int) -> None:
        """Nothing was ever acquired."""
        self._acquired = AcquiredEpochs(num_slots)
        self._uses: list[OrderedDict[int, SlotUse]] = [OrderedDict() for _ in range(num_slots)]
        self._last: list[SlotUse | None] = [None] * num_slots

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return len(self._uses)

    @property
    def num_busy(self) -> int:
        """Slots that this process still touches."""
        return sum(1 for use in self._last if use is not None and use.is_busy)

    def last(self, slot: int) -> int:
        """The last epoch acquired, -1 for none."""
        return self._acquired.last(slot)

    # A tenancy's life -------------------------------------------------------------------------

    def may_take(self, slot: int, word: int) -> bool:
        """Whether the gate word opens the slot to its owner."""
        return self._acquired.may_acquire(slot, word)

    def opening(self, slot: int, word: int) -> str:
        """How the slot is open to its owner by this gate word: see `AcquiredEpochs.opening`."""
        return self._acquired.opening(slot, word)

    def is_in_use(self, slot: int) -> bool:
        """Whether this process itself still touches the slot.

        kvd may have released it all the same: it arms nothing for a `written` that it refused.
        """
        use = self._last[slot]
        return use is not None and use.is_busy

    def is_untouched(self, slot: int, word: int) -> bool:
        """Whether the slot may be written without a tenancy: nobody reads or writes it.

        Only its owner begins a use of a slot, so what has ended here has ended; but whether others
        still read what they were offered, only the gate word says.
        """
        use = self._latest(slot)
        return use is None or not (use.is_busy or (use.reads and not self.may_take(slot, word)))

    def is_read(self, slot: int) -> bool:
        """Whether the last use of the slot was offered to others."""
        use = self._latest(slot)
        return use is not None and bool(use.reads)

    def take(
        self,
        slot: int,
        word: int,
        generation: int,
        layer: int,
        loads: Sequence[LoadItem],
        *,
        early: bool = False,
    ) -> Tenancy:
        """Begin a tenancy; `may_take` or `opening`, and `is_in_use` were asked."""
        epoch = self._acquired.acquire(slot, word, early=early)
        tenancy = Tenancy(slot, epoch, generation)
        uses = self._uses[slot]
        self._last[slot] = uses[epoch] = SlotUse(tenancy, layer, tuple(loads))
        while len(uses) > TENANCIES_KEPT:
            uses.popitem(last=False)
        return tenancy

    def use_of(self, tenancy: Tenancy) -> SlotUse:
        """The tenancy's entry.

        Raises: KvdRefused(tenancy_misused): the slot's present tenancy is another.
        """
        slot = tenancy.slot
        use = self._last[slot] if 0 <= slot < len(self._last) else None
        if use is None or use.tenancy != tenancy:
            raise misused(tenancy, "this is not the slot's present tenancy")
        return use

    def _latest(self, slot: int) -> SlotUse | None:
        return self._last[slot]

    def check_written(self, use: SlotUse, saves: Sequence[SaveItem]) -> None:
        """Whether a tenancy may be written now, with these saves.

        Raises: KvdRefused(tenancy_misused).
        """
        tenancy = use.tenancy
        if use.armed is not None or not use.is_computing:
            raise misused(tenancy, "it was written or computed before")
        names = [save.saver for save in saves]
        if len(set(names)) != len(names):
            raise misused(tenancy, f"a saver is named twice in {names}")
        for save in saves:
            if len(save.blocks) != len(save.tokens):
                raise misused(tenancy, f"saver {save.saver} needs one token count for each block")
            if save.requests and len(save.requests) not in (1, len(save.blocks)):
                raise misused(tenancy, f"saver {save.saver} needs one request, or one a block")

    def write(
        self,
        use: SlotUse,
        item: WrittenItem,
        armed: Ticket,
        kept: KeptStep | None = None,
    ) -> None:
        """The rows are final; every save and read is owed, once `armed` says that kvd agrees."""
        use.armed, use.announced = armed, item
        use.layer = item.layer
        use.saves = {save.saver: Activity(tuple(save.tokens), kept=kept) for save in item.saves}
        use.reads = tuple(item.reads)

    def check_computed(self, use: SlotUse) -> None:
        """Whether attention may end now.

        Raises: KvdRefused(tenancy_misused | load_open).
        """
        if not use.is_computing:
            raise misused(use.tenancy, "it was computed before")
        if use.loads:
            raise KvdRefused("load_open", slot=use.tenancy.slot)

    def ended(self, use: SlotUse) -> None:
        """An end was posted: if it was the last one, and nobody else has a part in the tenancy,
        kvd will release the slot when it comes to that.
        """
        if not (use.is_busy or use.reads):
            self._acquired.is_over(use.tenancy.slot)

    def save_of(self, use: SlotUse, saver: str) -> Activity:
        """A save that has not ended.

        Raises: KvdRefused(tenancy_misused): no such save, or it ended before.
        """
        copy = use.saves.get(saver)
        if copy is None or copy.ended is not None:
            raise misused(use.tenancy, f"no save by {saver!r} is running")
        return copy

    def check_counts(self, use: SlotUse, copy: Activity, tokens: Sequence[int]) -> None:
        """Whether the counts of an ended save fit what was announced.

        Raises: KvdRefused(tenancy_misused).
        """
        said = copy.announced
        fits = len(tokens) == len(said) and all(map(int.__le__, tokens, said))
        if tokens and not fits:
            detail = f"token counts {list(tokens)} do not fit the announced {list(said)}"
            raise misused(use.tenancy, detail)

    # What others ask --------------------------------------------------------------------------

    def truth(self, slot: int, epoch: int, kind: str, owner: str) -> str:
        """What became of one of our holds, for kvd's question.

        `never_started` is said only of what never will start either.
        """
        if not 0 <= slot < len(self._uses):
            return UNKNOWN
        use = self._uses[slot].get(epoch)
        if use is None:
            return NEVER_STARTED if epoch > self.last(slot) else UNKNOWN
        if kind == COMPUTE:
            return use.compute.truth()
        if kind != SAVE:
            return UNKNOWN
        copy = use.saves.get(owner)
        if copy is not None:
            return copy.truth()
        return NEVER_STARTED if use.armed is not None or not use.is_computing else UNKNOWN

    def announce(self, word_of: Callable[[int], int]) -> list[SlotAnnounce]:
        """All slots for a kvd that does not know them; word_of: last word of the old page."""
        said = []
        for slot in range(len(self._uses)):
            epoch, state = split_word(word_of(slot))
            use = self._latest(slot)
            computing, savers, layer = False, [], -1
            reads: list[ReadItem] = []
            if use is not None:
                computing, savers, layer = use.is_computing, use.savers, use.layer
                # A word beyond the tenancy is its release: then every read has ended.
                reads = list(use.reads) if epoch <= use.tenancy.epoch else []
            said.append(
                SlotAnnounce(
                    slot,
                    epoch,
                    state == STATE_FREE,
                    self.last(slot),
                    computing,
                    savers,
                    layer,
                    reads,
                )
            )
        return said


def misused(tenancy: Tenancy, detail: str) -> KvdRefused:
    """The refusal of a step that does not fit its tenancy."""
    return KvdRefused("tenancy_misused", slot=tenancy.slot, epoch=tenancy.epoch, detail=detail)
