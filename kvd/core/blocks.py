"""The block table: what every block of the pool is now, and who keeps it so.

    reset --reserve--> filling --commit and every span saved--> ready --evict--> reset
                          |                                       |
                          +------------- poison ---> poisoned <---+
                                                        |
                     last pin, last open save and last step that saves gone: reset

* A *filling* block is private to the request that reserved it. Its owner may load and rewrite it.
* It is *ready*, visible to look-ups, when its commit has come, the last ended save of every span
  made exactly the commit's token count valid, and no save into it is open.
* Pins, open saves and open steps are kept by name. While one exists the block is neither evicted
  nor reserved again nor freed (R11): abort, eviction of its owner and poison only mark it. What a
  step saves is not ready before the step is closed and all its copies have ended.
* A span is saved by one party at a time, and by nobody while it is loaded or read.
* Every reserve begins a new *life* of a block; who remembers one without a pin remembers that too.
* Its owner may go before its saves have ended. A committed block then waits for them until
  `orphan_deadline`; an uncommitted one is poisoned.

`free_blocks + sum of the other states == total` at every moment; `kvd.core.check` verifies it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from kvd.core.block_lives import BlockLives
from kvd.core.block_types import (
    FILLING,
    POISONED,
    READY,
    RESET,
    BlockKey,
    BlockShape,
    BlockState,
    CommitStatus,
    Fill,
    Marks,
    OpenCopy,
    OpenStep,
)
from kvd.core.errors import LocalError
from kvd.core.ids import LoadId, Pin, RequestKey, SaveId, StepId

__all__ = ["BlockKey", "BlockShape", "BlockState", "BlockTable", "CommitStatus", "Fill"]


AnyCopy = TypeVar("AnyCopy", LoadId, SaveId)


class BlockTable(BlockLives):
    """States, pins, spans and keys of all blocks of one pool."""

    # Reserve, commit, abandon -----------------------------------------------------------------

    def reserve(self, owner: RequestKey, count: int) -> list[int]:
        """Take `count` private blocks, evicting as needed; all or nothing.

        Raises: LocalError(reserve_too_large | pool_full), with nothing changed.
        """
        if count > self.total:
            raise LocalError("reserve_too_large", want=count, total=self.total)
        free, evictable = len(self.free), len(self.policy)
        if count > free + evictable:
            raise LocalError(
                "pool_full", want=count, free=free, evictable=evictable, total=self.total
            )
        self.evict(count - free)
        taken = [self.free.pop() for _ in range(count)]
        spans = self.shape.num_spans
        alone = frozenset((owner,))
        for block in taken:
            self._set(block, BlockState.FILLING)
            self.lives[block] += 1
            self.fills[block] = Fill(owner, [0] * spans)
            self.pins[block] = alone
        self.owned.setdefault(owner, set()).update(taken)
        return taken

    def commit(
        self, engine: str, block: int, key: BlockKey, tokens: int, request: str = ""
    ) -> CommitStatus:
        """Give a filling block its key. It is ready once all its spans are.

        request: whose it must be, '' for any request of the engine.
        Raises: LocalError(block_not_reserved | block_poisoned).
        """
        if self.is_ready_under(block, key, tokens):
            return CommitStatus.READY
        fill = self.own_fill(engine, block, request)
        other = self.index.get(*key)
        if other is not None:
            self.policy.found([other])
            fill.lose_key()
            return CommitStatus.DUPLICATE
        fill.key = key
        fill.want = tokens
        return self._try_ready(block, fill)

    def abandon(self, block: int, owner: RequestKey, now: int, grace: int) -> None:
        """The owner drops a block: its pin goes, and what nobody else needs is freed.

        A committed block whose saves are still open stays until they have ended, `grace` ns at
        most; then it is poisoned like an uncommitted one.
        """
        fill = self.fills.get(block)
        if fill is not None and fill.owner == owner and self.state[block] == BlockState.FILLING:
            if fill.key is None:
                self.poison(block)
            else:
                fill.orphan_deadline = now + grace
        self.unpin(block, owner)

    def expire_orphans(self, now: int) -> None:
        """Poison committed blocks without an owner whose saves never came."""
        late = [b for b, f in self.fills.items() if f.orphan_deadline and f.orphan_deadline <= now]
        for block in late:
            if self.state[block] == BlockState.FILLING:
                self.poison(block)

    # Saves ------------------------------------------------------------------------------------

    def begin_save(
        self,
        save: SaveId,
        layer: int,
        shard: int,
        blocks: tuple[int, ...],
        tokens: tuple[int, ...],
        step: StepId | None = None,
    ) -> None:
        """A checked save starts: until it ends its blocks are kept (R11), by itself or by its step.

        step: of which the blocks are the targets.
        """
        span = self.shape.span(layer, shard)
        if step is None:
            taken = frozenset(blocks)
            self.saving.update(blocks)
        else:
            opened = self.steps[step]
            opened.copies += 1
            taken = opened.targets
        self.span_saves.setdefault(span, {})[save] = taken
        self.save_blocks[save] = OpenCopy(span, blocks, tokens, step)

    def end_save(self, save: SaveId, ok: bool, tokens: tuple[int, ...] = ()) -> None:
        """A save ended; exactly the spans that it opened are marked.

        tokens: per target block what the copy made valid; () = what was announced.
        """
        opened = self.save_blocks.pop(save, None)
        if opened is None:
            return
        span, blocks, announced, step = opened
        _drop(self.span_saves, span, save)
        if ok:
            self.mark_saved(span, blocks, tokens or announced)
        else:
            for block in blocks:
                self.poison(block)
        if step is None:
            self._leave(blocks)
        else:
            self._end_copy(step)

    def mark_saved(self, span: int, blocks: Iterable[int], tokens: Iterable[int]) -> None:
        """So many tokens of this span of each block are valid."""
        self.settle()
        fills = self.fills
        for block, count in zip(blocks, tokens, strict=True):
            fill = fills[block]
            fill.tokens[span], fill.least = count, None

    def mark_step(
        self, step: StepId, span: int, blocks: tuple[int, ...], tokens: tuple[int, ...]
    ) -> None:
        """The same for all targets of an open step; entered with the other spans that it saves."""
        marks = self.marks
        if marks is None or marks.step != step:
            self.settle()
            marks = self.marks = Marks(step, blocks, tokens)
        marks.spans.append(span)

    def _leave(self, blocks: Iterable[int]) -> None:
        """One that wrote into each of these blocks does so no more."""
        saving = self.saving
        for block in blocks:
            left = saving.pop(block) - 1
            if left:
                saving[block] = left
            if block in self.dead:
                self._free_if_dead(block)
            elif (fill := self.fills[block]).want:
                self._try_ready(block, fill)

    # Loads ------------------------------------------------------------------------------------

    def begin_load(
        self,
        load: LoadId,
        layer: int,
        shard: int,
        blocks: tuple[int, ...],
        step: StepId | None = None,
    ) -> None:
        """A checked load starts: its blocks are kept, by itself or by its step, and its spans not
        rewritten, until it ends.

        step: of which the blocks are the sources.
        """
        span = self.shape.span(layer, shard)
        if step is None:
            taken = frozenset(blocks)
            self._pin_taken(taken, load)
        else:
            opened = self.steps[step]
            opened.copies += 1
            taken = opened.sources
        self.span_loads.setdefault(span, {})[load] = taken
        self.load_blocks[load] = OpenCopy(span, blocks, step=step)

    def end_load(self, load: LoadId) -> None:
        """A load ended; one that is not known is no error."""
        opened = self.load_blocks.pop(load, None)
        if opened is None:
            return
        taken = _drop(self.span_loads, opened.span, load)
        if opened.step is None:
            self._unpin_taken(taken, load)
        else:
            self._end_copy(opened.step)

    def _pin_taken(self, blocks: frozenset[int], pin: Pin) -> None:
        pins = self._common_pins(blocks)
        if pins:
            self.pins.update(dict.fromkeys(blocks, pins | {pin}))
        else:
            for block in blocks:
                self.pin(block, pin)

    def _unpin_taken(self, blocks: frozenset[int], pin: Pin) -> None:
        pins = self._common_pins(blocks)
        if pins and len(pins) > 1:
            self.pins.update(dict.fromkeys(blocks, pins - {pin}))
        else:
            for block in blocks:
                self.unpin(block, pin)

    # Steps ------------------------------------------------------------------------------------

    def open_step(self, step: StepId, targets: frozenset[int], sources: frozenset[int]) -> None:
        """A checked step starts: its blocks are kept until it is closed and its copies ended."""
        self.steps[step] = OpenStep(targets, sources)
        self.saving.update(targets)
        self._pin_taken(sources, step)

    def close_step(self, step: StepId) -> None:
        """No copy of the step begins any more; one that is not known is no error."""
        opened = self.steps.get(step)
        if opened is not None:
            opened.closed = True
            self._drop_step(step, opened)

    def _end_copy(self, step: StepId) -> None:
        opened = self.steps[step]
        opened.copies -= 1
        self._drop_step(step, opened)

    def _drop_step(self, step: StepId, opened: OpenStep) -> None:
        if opened.closed and not opened.copies:
            del self.steps[step]
            self.settle()
            self._leave(opened.targets)
            self._unpin_taken(opened.sources, step)

    # What an earlier life left ----------------------------------------------------------------

    def adopt(self, owner: RequestKey) -> tuple[list[int], list[int]]:
        """Take over the columns that the table was made with.

        Ready blocks are evictable, the lowest number first. Filling blocks may still be written by
        a process that does not know of this life: `owner` keeps them until it abandons them.

        Returns: the filling blocks; and those that are free since another block has their key.
        """
        columns = self.columns
        assert len(columns) == self.total
        assert len(self.free) == len(self.index) == 0, "adopted too late"
        twice = self.index.load(columns.states, columns.namespaces, columns.hashes)
        for block in twice:
            columns.drop_key(block)
            columns.states[block] = RESET
        self.counts = [columns.states.count(state) for state in range(len(self.counts))]
        assert self.counts[POISONED] == 0, "poison is never written into a header"
        for start, stop in columns.runs(READY):
            self.policy.admit_range(start, stop)
        for start, stop in columns.runs(RESET):
            self.free.extend(range(start, stop))
        self.free.reverse()
        held = [block for run in columns.runs(FILLING) for block in range(*run)]
        for block in held:
            self.fills[block] = Fill(owner, [0] * self.shape.num_spans)
        self.owned.setdefault(owner, set()).update(held)
        self.pins.update(dict.fromkeys(held, frozenset((owner,))))
        return held, twice


def _drop(
    of_span: dict[int, dict[AnyCopy, frozenset[int]]], span: int, copy: AnyCopy
) -> frozenset[int]:
    """Take an open copy out of the books of its span; returns its blocks."""
    copies = of_span[span]
    taken = copies.pop(copy)
    if not copies:
        del of_span[span]
    return taken
