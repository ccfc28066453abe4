"""What becomes of single blocks: pinned, evicted, poisoned, ready, free; and the books of that."""

from __future__ import annotations

from kvd.core.block_books import BlockBooks
from kvd.core.block_types import BlockState, Changes, CommitStatus, Fill
from kvd.core.ids import Pin, ReadId


class BlockLives(BlockBooks):
    """States, pins and readers of blocks."""

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

    def _common_pins(self, blocks: frozenset[int]) -> frozenset[Pin] | None:
        """The pins that all these blocks have, as those have that came to a request together."""
        found = set(map(self.pins.get, blocks))
        return found.pop() if len(found) == 1 else None

    # Ends ---------------------------------------------------------------------------------------

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
