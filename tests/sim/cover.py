"""Every copy in flight is covered: both of its ends are held for it, by the right name.

The strictest form of R11, checked after every event of the kvd that must hold: it finds a hold
that is lifted too early even when nobody happens to reuse the memory in time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.blocks import BlockTable
from kvd.core.holds import Hold, HoldKind, Phase
from kvd.core.ids import LoadId, ReadId, SaveId, SlotRef, StepId
from kvd.core.slot import COMPUTE_OWNER, Slot
from kvd.core.state import State
from kvd.core.transfer_types import Source, SourceKind
from tests.sim.memory import Copy, Violation

if TYPE_CHECKING:
    from tests.sim.node import Node


class Cover:
    """What must be held for one copy. `boot`: life of the kvd that allowed it."""

    def __init__(self, boot: int, ref: SlotRef) -> None:
        self.boot = boot
        self.ref = ref

    def missing(self, node: Node) -> str:
        """What is not held that should be, '' for nothing."""
        assert node.machine is not None
        state = node.machine.state
        slot = _slot(state, self.ref)
        if node.boot == self.boot:
            return self._missing(state, slot)
        # A later life: it knows the copy once the member has announced it.
        if slot is None or not self.has_slot_end:
            return ""
        held = slot.ref == self.ref and not slot.is_free
        return "" if held else f"{slot.ref} instead, free {slot.is_free}"

    @property
    def has_slot_end(self) -> bool:
        """Whether the slot itself is an end of the copy."""
        return True

    @property
    def reads_pool(self) -> bool:
        """Whether it copies out of the pool."""
        return False

    @property
    def guards_its_slot(self) -> bool:
        """Whether its own process keeps the slot for it, since kvd may have refused it."""
        return False

    def _missing(self, state: State, slot: Slot | None) -> str:
        raise NotImplementedError


class SaveCover(Cover):
    """A save needs its hold on the slot and its open spans."""

    def __init__(self, boot: int, ref: SlotRef, saver: str) -> None:
        super().__init__(boot, ref)
        self.saver = saver

    def _missing(self, state: State, slot: Slot | None) -> str:
        if not _has(slot, self.ref, HoldKind.SAVE, self.saver):
            return "no SAVE hold"
        assert state.pool is not None
        known = SaveId(self.ref, self.saver) in state.pool.blocks.save_blocks
        return "" if known else "no open span"


class LoadCover(Cover):
    """A load needs COMPUTE on the slot and pins on its blocks."""

    @property
    def reads_pool(self) -> bool:
        """See `Cover`."""
        return True

    def _missing(self, state: State, slot: Slot | None) -> str:
        if not _has(slot, self.ref, HoldKind.COMPUTE, COMPUTE_OWNER):
            return "no COMPUTE hold"
        assert state.pool is not None
        table = state.pool.blocks
        load = LoadId(self.ref)
        opened = table.load_blocks.get(load)
        pinned = opened is not None and all(
            load in table.pins.get(block, ()) for block in opened.blocks
        )
        return "" if pinned else "no pins on its blocks"


class StepCover(Cover):
    """A copy that began before kvd was heard needs its open step, and that this has its blocks."""

    def __init__(self, boot: int, ref: SlotRef, step: StepId, blocks: frozenset[int]) -> None:
        super().__init__(boot, ref)
        self.step = step
        self.blocks = blocks

    def _missing(self, state: State, slot: Slot | None) -> str:
        assert state.pool is not None
        return self._not_kept(state.pool.blocks)

    def _not_kept(self, table: BlockTable) -> str:
        raise NotImplementedError


class StepSaveCover(StepCover):
    """Nobody else gets the blocks, and nobody reads them."""

    @property
    def guards_its_slot(self) -> bool:
        """See `Cover`."""
        return True

    def _not_kept(self, table: BlockTable) -> str:
        kept = table.steps.get(self.step)
        if kept is None or not kept.targets >= self.blocks:
            return "no step that saves its blocks"
        if not self.blocks <= table.saving.keys():
            return "blocks that nobody saves"
        read = self.blocks.intersection(block for block, _ in table.span_readers)
        return f"readers of {read}" if read else ""


class StepLoadCover(StepCover):
    """The blocks stay what they are."""

    @property
    def reads_pool(self) -> bool:
        """See `Cover`."""
        return True

    def _not_kept(self, table: BlockTable) -> str:
        pinned = all(self.step in table.pins.get(block, ()) for block in self.blocks)
        return "" if pinned else "no pins on its blocks"


class ReadCover(Cover):
    """A read needs a running hold of its own name and executor: on the slot, or on the pool."""

    def __init__(self, boot: int, read: ReadId, executor: str, source: Source) -> None:
        super().__init__(boot, source.ref)
        self.read = read
        self.executor = executor
        self.kind = source.kind
        self.blocks = source.blocks

    @property
    def has_slot_end(self) -> bool:
        """A redirected read reads the pool."""
        return self.kind is SourceKind.SLOT

    @property
    def reads_pool(self) -> bool:
        """See `Cover`."""
        return self.kind is SourceKind.POOL

    def _missing(self, state: State, slot: Slot | None) -> str:
        hold: Hold | None = None
        if self.kind is SourceKind.SLOT:
            if slot is not None and slot.ref == self.ref:
                hold = slot.find(HoldKind.READ, self.read)
        else:
            transfer = state.outgoing.get(self.read.transfer)
            key = (self.read.layer, self.read.start)
            found = transfer.open.get(key) if transfer is not None else None
            if found is not None and found.read == self.read:
                hold = found.hold
            assert state.pool is not None
            pins = state.pool.blocks.pins
            if not all(self.read in pins.get(block, ()) for block in self.blocks):
                return "no pins on its blocks"
        if hold is None or hold.phase is not Phase.RUNNING or hold.executor != self.executor:
            return f"no running hold, only {hold}"
        return ""


def check(node: Node, live: dict[Copy, None]) -> None:
    """Raise Violation when a copy that this node must hold for is not covered."""
    for copy in live:
        if copy.guard is node:
            assert copy.cover is not None
            missing = copy.cover.missing(node)
            if missing:
                raise Violation("cover", f"{copy.name} runs, but {node.address} has {missing}")


def _slot(state: State, ref: SlotRef) -> Slot | None:
    member = state.members.get(ref.member)
    return member.slots[ref.slot] if member is not None else None


def _has(slot: Slot | None, ref: SlotRef, kind: HoldKind, owner: str) -> bool:
    return slot is not None and slot.ref == ref and slot.find(kind, owner) is not None
