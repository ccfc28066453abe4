"""A dumb model of the block pool: every block as a plain record, every rule spelled out.

Besides states it keeps what is really in memory: each save writes the text that its owner wants to
store, so that a look-up can be checked for the bytes it would return.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.core.blocks import BlockShape
from kvd.core.ids import LoadId, Pin, ReadId, RequestKey, SaveId, StepId

Span = tuple[int, int]
"""(layer, shard)"""


@dataclass(slots=True)
class OpenSave:
    """A save that writes now: what it writes where, and how many tokens of it."""

    span: Span
    counts: dict[int, int]
    texts: dict[int, str]


@dataclass(slots=True)
class KeptStep:
    """A step that keeps blocks. `unheard`: spans that it writes and the table knows nothing of."""

    targets: list[int]
    sources: list[int]
    closed: bool = False
    copies: set[SaveId | LoadId] = field(default_factory=set)
    unheard: set[Span] = field(default_factory=set)


@dataclass(slots=True)
class Block:
    """One block. `memory` is what each span really holds: (text, tokens)."""

    state: str = "reset"
    owner: RequestKey | None = None
    text: str = ""
    key: str = ""
    tokens: int = 0
    lost: bool = False
    deadline: int = 0
    pins: set[Pin] = field(default_factory=set)
    valid: dict[Span, int] = field(default_factory=dict)
    memory: dict[Span, tuple[str, int]] = field(default_factory=dict)


class PoolModel:
    """What the pool must be, from its history."""

    def __init__(self, total: int, shape: BlockShape) -> None:
        self.shape = shape
        self.spans = [
            (layer, shard) for layer in range(shape.num_layers) for shard in range(shape.num_shards)
        ]
        self.blocks = [Block() for _ in range(total)]
        self.saves: dict[SaveId, OpenSave] = {}
        self.reads: dict[ReadId, tuple[int, int]] = {}
        self.loads: dict[LoadId, tuple[Span, list[int]]] = {}
        self.steps: dict[StepId, KeptStep] = {}
        self.seen: dict[Pin, list[tuple[int, Span, tuple[str, int] | None]]] = {}
        self.used_last: list[int] = []
        self.evicted: list[int] = []
        self.freed: list[int] = []
        self.ready: list[int] = []
        self.poisoned: list[int] = []

    # What is so --------------------------------------------------------------------------------

    def open_saves(self, block: int) -> list[SaveId]:
        """Saves that write into a block."""
        return [save for save, at in self.saves.items() if block in at.counts]

    def is_written(self, block: int) -> bool:
        """Whether a save writes into a block, or a step may at any time."""
        return bool(self.open_saves(block)) or self.is_target(block)

    def is_target(self, block: int) -> bool:
        """Whether a step may write into a block."""
        return any(block in step.targets for step in self.steps.values())

    def is_open(self, block: int, span: Span) -> bool:
        """Whether a save writes this span."""
        return any(self.saves[save].span == span for save in self.open_saves(block))

    def is_loaded(self, block: int, span: Span) -> bool:
        """Whether a load copies this span of a block."""
        return any(span == loaded and block in of for loaded, of in self.loads.values())

    def is_read(self, block: int, layer: int) -> bool:
        """Whether a reader has this layer of a block pinned."""
        return (block, layer) in self.reads.values()

    def evictable(self) -> list[int]:
        """Ready blocks without pins, least recently used first."""
        return [
            block
            for block in self.used_last
            if self.blocks[block].state == "ready" and not self.blocks[block].pins
        ]

    def free(self) -> list[int]:
        """Blocks that nobody uses."""
        return [at for at, block in enumerate(self.blocks) if block.state == "reset"]

    def found(self, key: str) -> int | None:
        """The ready block with this key."""
        for at, block in enumerate(self.blocks):
            if block.state == "ready" and block.key == key:
                return at
        return None

    def look(self, pin: Pin, blocks: list[int], spans: list[Span]) -> None:
        """A copy out of spans of blocks begins: remember the bytes."""
        self.seen[pin] = [
            (block, span, self.blocks[block].memory.get(span)) for block in blocks for span in spans
        ]

    def has_changed(self, pin: Pin) -> bool:
        """Whether a copy that ends now saw its bytes change since it began."""
        seen = self.seen.pop(pin)
        return any(self.blocks[block].memory.get(span) != bytes_ for block, span, bytes_ in seen)

    def has_rows(self, block: int, was: Block, span: Span, tokens: int) -> bool:
        """Whether a block is still what it was, with that many tokens in a span."""
        found = self.blocks[block]
        if found is not was or found.state not in ("filling", "ready"):
            return False
        if found.state == "ready":
            return found.tokens >= tokens
        if self.is_target(block) or self.is_open(block, span):
            return False
        return found.valid.get(span, 0) >= tokens

    # What happens --------------------------------------------------------------------------------

    def reserve(self, owner: RequestKey, count: int) -> str:
        """The error code that a reservation must have, '' when it succeeds; evicts for it."""
        if count > len(self.blocks):
            return "reserve_too_large"
        evictable = self.evictable()
        short = count - len(self.free())
        if short > len(evictable):
            return "pool_full"
        for block in evictable[: max(0, short)]:
            self.blocks[block] = Block()
            self.evicted.append(block)
        return ""

    def taken(self, owner: RequestKey, blocks: list[int]) -> None:
        """The reservation got these blocks."""
        assert len(set(blocks)) == len(blocks)
        for block in blocks:
            assert self.blocks[block].state == "reset", f"block {block} was in use"
            self.blocks[block] = Block("filling", owner, pins={owner})

    def pin(self, block: int, pin: Pin) -> None:
        """Keep a block."""
        self.blocks[block].pins.add(pin)

    def unpin(self, block: int, pin: Pin) -> None:
        """Let a block go; what is not pinned under the name is left alone."""
        found = self.blocks[block]
        if pin not in found.pins:
            return
        found.pins.remove(pin)
        if found.state == "ready" and not found.pins:
            self._touch(block)
        self._free_if_dead(block)

    def begin_save(self, save: SaveId, span: Span, counts: dict[int, int]) -> None:
        """A save starts to overwrite its span in its blocks."""
        texts = {block: self.blocks[block].text for block in counts}
        self.saves[save] = OpenSave(span, counts, texts)
        for block in counts:
            self.blocks[block].valid[span] = 0
            self.blocks[block].memory[span] = ("half written", 0)

    def end_save(self, save: SaveId, ok: bool, counts: dict[int, int]) -> None:
        """A save ended; what it wrote is there, or is poison."""
        opened = self.saves.pop(save)
        for block in opened.counts:
            found = self.blocks[block]
            if ok:
                found.memory[opened.span] = (opened.texts[block], counts[block])
                found.valid[opened.span] = counts[block]
            else:
                self.poison(block)
            self._free_if_dead(block)
            self._ready_if_complete(block)

    def open_step(self, step: StepId, targets: list[int], sources: list[int]) -> None:
        """A step may copy these blocks from now on."""
        self.steps[step] = KeptStep(targets, sources)
        for block in sources:
            self.pin(block, step)

    def copy_unheard(self, step: StepId, span: Span) -> None:
        """A copy of a step begins to overwrite a span before anybody was told."""
        self.steps[step].unheard.add(span)
        for block in self.steps[step].targets:
            self.blocks[block].memory[span] = ("unheard", 0)

    def close_step(self, step: StepId) -> None:
        """No copy of a step begins any more."""
        self.steps[step].closed = True
        self._drop_step(step)

    def copy_ended(self, step: StepId, copy: SaveId | LoadId) -> None:
        """A copy of a step has ended."""
        self.steps[step].copies.discard(copy)
        self._drop_step(step)

    def _drop_step(self, step: StepId) -> None:
        found = self.steps[step]
        if not found.closed or found.copies:
            return
        del self.steps[step]
        for block in sorted(found.targets):
            self._free_if_dead(block)
            self._ready_if_complete(block)
        for block in sorted(found.sources):
            self.unpin(block, step)

    def commit(self, block: int, key: str, tokens: int) -> str:
        """Give a filling block its key; 'pending', 'ready' or 'duplicate'."""
        found = self.blocks[block]
        if found.state == "ready":
            return "ready"
        other = self.found(key)
        if other is not None:
            self._touch(other)
            found.key, found.tokens, found.lost = "", 0, True
            return "duplicate"
        found.key, found.tokens, found.lost = key, tokens, False
        self._ready_if_complete(block)
        return "ready" if found.state == "ready" else "pending"

    def abandon(self, block: int, owner: RequestKey, deadline: int) -> None:
        """The owner goes; a committed block may wait for its saves until the deadline."""
        found = self.blocks[block]
        if found.state == "filling" and found.owner == owner:
            if found.key and not found.lost:
                found.deadline = deadline
            else:
                self.poison(block)
        self.unpin(block, owner)

    def expire(self, now: int) -> None:
        """Committed blocks whose owner left and whose saves never came are bad."""
        for at, block in enumerate(self.blocks):
            if block.state == "filling" and block.deadline and block.deadline <= now:
                self.poison(at)

    def poison(self, block: int) -> None:
        """The data is bad."""
        found = self.blocks[block]
        if found.state in ("filling", "ready"):
            found.state = "poisoned"
            self.poisoned.append(block)
            self._free_if_dead(block)

    def _touch(self, block: int) -> None:
        if block in self.used_last:
            self.used_last.remove(block)
        self.used_last.append(block)

    def _free_if_dead(self, block: int) -> None:
        found = self.blocks[block]
        if found.state == "poisoned" and not found.pins and not self.is_written(block):
            self.blocks[block] = Block()
            self.freed.append(block)

    def _ready_if_complete(self, block: int) -> None:
        found = self.blocks[block]
        if found.state != "filling" or not found.key or self.is_written(block):
            return
        if any(found.valid.get(span, 0) != found.tokens for span in self.spans):
            return
        other = self.found(found.key)
        if other is not None:
            self._touch(other)
            found.lost, found.key, found.tokens = True, "", 0
            if not found.pins:
                self.poison(block)
            return
        found.state = "ready"
        self.ready.append(block)
        if not found.pins:
            self._touch(block)
