"""The block table: what every block of the pool is now, and who keeps it so.

    reset --reserve--> filling --commit and every span saved--> ready --evict--> reset
                          |                                       |
                          +------------- poison ---> poisoned <---+
                                                        |
                                  last pin and last open save gone: reset

* A *filling* block is private to the request that reserved it. Its owner may load and rewrite it.
* It is *ready*, visible to look-ups, when its commit has come, the last ended save of every span
  made exactly the commit's token count valid, and no save into it is open.
* Pins and open saves are kept by name. While one exists the block is neither evicted nor
  reserved again nor freed (R11): abort, eviction of its owner and poison only mark it.
* A span is saved by one party at a time, and by nobody while it is loaded or read.
* Every reserve begins a new *life* of a block; who remembers one without a pin remembers that too.
* Its owner may go before its saves have ended. A committed block then waits for them until
  `orphan_deadline`; an uncommitted one is poisoned.

`free_blocks + sum of the other states == total` at every moment; `kvd.core.check` verifies it.
"""

from __future__ import annotations

from typing import TypeVar

from kvd.core.block_books import BlockBooks
from kvd.core.block_types import (
    FILLING,
    POISONED,
    READY,
    RESET,
    BlockKey,
    BlockShape,
    BlockState,
    Changes,
    CommitStatus,
    Fill,
    OpenCopy,
)
from kvd.core.errors import LocalError
from kvd.core.ids import LoadId, Pin, ReadId, RequestKey, SaveId

__all__ = ["BlockKey", "BlockShape", "BlockState", "BlockTable", "CommitStatus", "Fill"]


AnyCopy = TypeVar("AnyCopy", LoadId, SaveId)


class BlockTable(BlockBooks):
    """States, pins, spans and keys of all blocks of one pool."""

    def take_changes(self) -> Changes:
        """Hand over what happened since the last call."""
        changes = self.changes
        if changes.ready or changes.freed or changes.evicted or changes.poisoned:
            self.changes = Changes()
        return changes

    # Pins -----------------------------------------------------------------------------------

    def pin(self, block: int, pin: Pin) -> None:
        """Keep a block. The caller has seen that it is ready, or its own filling block."""
        pins = self.pins.get(block)
        if pins is None:
            self.pins[block] = frozenset((pin,))
            self.policy.withdraw(block)
        else:
            self.pins[block] = pins | {pin}

    def pin_all(self, blocks: list[int], pin: Pin) -> dict[int, frozenset[Pin]]:
        """Keep several ready blocks, e.g. those of a hit; returns a mapping of which they are keys.

        Sets of pins are never changed, so that all blocks that a request alone has share one.
        """
        pins = self.pins
        alone = dict.fromkeys(blocks, frozenset((pin,)))
        if pins.keys().isdisjoint(alone.keys()):
            pins.update(alone)
            self.policy.withdraw_all(blocks)
        else:
            for block in blocks:
                self.pin(block, pin)
        return alone

    def unpin(self, block: int, pin: Pin) -> None:
        """Drop one named pin; one that is not there is no error (it is named, not counted)."""
        pins = self.pins.get(block)
        if pins is None or pin not in pins:
            return
        if len(pins) > 1:
            self.pins[block] = pins - {pin}
            return
        del self.pins[block]
        if self.state[block] == BlockState.READY:
            self.policy.admit(block)
        else:
            self._free_if_dead(block)

    def pin_span(self, block: int, layer: int, read: ReadId) -> None:
        """Pin a block for a reader of one layer; the layer is not rewritten meanwhile."""
        self.pin(block, read)
        self.span_readers.setdefault((block, layer), set()).add(read)

    def unpin_span(self, block: int, layer: int, read: ReadId) -> None:
        """The reader of one layer has ended."""
        readers = self.span_readers.get((block, layer))
        if readers is not None:
            readers.discard(read)
            if not readers:
                del self.span_readers[block, layer]
        self.unpin(block, read)

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

    def evict(self, count: int) -> None:
        """Free `count` ready blocks that nobody pins, at most as many as there are of these."""
        for _ in range(count):
            block = self.policy.victim()
            assert block is not None
            assert block not in self.pins
            key = self.columns.drop_key(block)
            self.policy.evict(block, *key)
            self.index.remove(*key)
            self.changes.evicted.append(block)
            self._reset(block)

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

    def poison(self, block: int) -> None:
        """The data is not valid: no look-up finds it, and it is freed when nobody needs it."""
        state = self.state[block]
        if state == BlockState.READY:
            self.index.remove(*self.columns.drop_key(block))
            self.policy.withdraw(block)
        elif state != BlockState.FILLING:
            return
        self._set(block, BlockState.POISONED)
        self.dead.add(block)
        self.changes.poisoned.append(block)
        self._free_if_dead(block)

    # Saves ------------------------------------------------------------------------------------

    def begin_save(
        self, save: SaveId, layer: int, shard: int, blocks: tuple[int, ...], tokens: tuple[int, ...]
    ) -> None:
        """A checked save starts: until it ends its blocks are kept (R11)."""
        span = self.shape.span(layer, shard)
        self.span_saves.setdefault(span, {})[save] = frozenset(blocks)
        self.save_blocks[save] = OpenCopy(span, blocks, tokens)
        self.saving.update(blocks)

    def end_save(self, save: SaveId, ok: bool, tokens: tuple[int, ...] = ()) -> None:
        """A save ended; exactly the spans that it opened are marked.

        tokens: per target block what the copy made valid; () = what was announced.
        """
        opened = self.save_blocks.pop(save, None)
        if opened is None:
            return
        span, blocks, announced = opened
        _drop(self.span_saves, span, save)
        fills, saving = self.fills, self.saving
        for block, count in zip(blocks, tokens or announced, strict=True):
            left = saving.pop(block) - 1
            if left:
                saving[block] = left
            fill = fills[block]
            if ok:
                fill.tokens[span] = count
            else:
                self.poison(block)
            if block in self.dead:
                self._free_if_dead(block)
            elif fill.want:
                self._try_ready(block, fill)

    def begin_load(self, load: LoadId, layer: int, shard: int, blocks: tuple[int, ...]) -> None:
        """A checked load starts: its blocks are kept, its spans not rewritten, until it ends."""
        span, taken = self.shape.span(layer, shard), frozenset(blocks)
        self.span_loads.setdefault(span, {})[load] = taken
        self.load_blocks[load] = OpenCopy(span, blocks)
        pins = self._common_pins(taken)
        if pins:
            self.pins.update(dict.fromkeys(taken, pins | {load}))
        else:
            for block in taken:
                self.pin(block, load)

    def end_load(self, load: LoadId) -> None:
        """A load ended; one that is not known is no error."""
        opened = self.load_blocks.pop(load, None)
        if opened is None:
            return
        taken = _drop(self.span_loads, opened.span, load)
        pins = self._common_pins(taken)
        if pins and len(pins) > 1:
            self.pins.update(dict.fromkeys(taken, pins - {load}))
        else:
            for block in taken:
                self.unpin(block, load)

    def _common_pins(self, blocks: frozenset[int]) -> frozenset[Pin] | None:
        """The pins that all these blocks have, as those have that came to a request together."""
        found = set(map(self.pins.get, blocks))
        return found.pop() if len(found) == 1 else None

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

    # Inside -----------------------------------------------------------------------------------

    def _try_ready(self, block: int, fill: Fill) -> CommitStatus:
        if block in self.saving or not fill.is_complete():
            return CommitStatus.PENDING
        assert fill.key is not None
        other = self.index.get(*fill.key)
        if other is not None:
            self.policy.found([other])
            fill.lose_key()
            if not self.pins.get(block):
                self.poison(block)
            return CommitStatus.DUPLICATE
        self._drop_fill(block)
        self._set(block, BlockState.READY)
        self.columns.set_key(block, fill.key, fill.want)
        self.index.put(*fill.key, block)
        self.changes.ready.append(block)
        self.policy.born(block, *fill.key)
        if block not in self.pins:
            self.policy.admit(block)
        return CommitStatus.READY

    def _free_if_dead(self, block: int) -> None:
        if self.state[block] != BlockState.POISONED or block in self.pins:
            return
        if block in self.saving:
            return
        if block in self.fills:
            self._drop_fill(block)
        self.changes.freed.append(block)
        self._reset(block)

    def _drop_fill(self, block: int) -> None:
        owner = self.fills.pop(block).owner
        owned = self.owned[owner]
        owned.discard(block)
        if not owned:
            del self.owned[owner]

    def _reset(self, block: int) -> None:
        self.dead.discard(block)
        self._set(block, BlockState.RESET)
        self.free.append(block)

    def _set(self, block: int, state: BlockState) -> None:
        self.counts[self.state[block]] -= 1
        self.counts[state] += 1
        self.state[block] = state


def _drop(
    of_span: dict[int, dict[AnyCopy, frozenset[int]]], span: int, copy: AnyCopy
) -> frozenset[int]:
    """Take an open copy out of the books of its span; returns its blocks."""
    copies = of_span[span]
    taken = copies.pop(copy)
    if not copies:
        del of_span[span]
    return taken
