"""Drives a block table and its dumb model side by side, and compares every single answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

from kvd.core.blocks import BlockShape, BlockTable, CommitStatus
from kvd.core.errors import LocalError
from kvd.core.evict import LruPolicy
from kvd.core.ids import LoadId, MemberRef, ReadId, RequestKey, SaveId, SlotRef, StepId
from kvd.store.native_index import NativeIndex
from kvd.store.native_queues import NativeQueues
from tests.stateful.pool_model import Block, PoolModel

TOTAL = 5
SHAPE = BlockShape(block_tokens=4, num_layers=2, num_shards=2)
NAMESPACE = 3
ENGINES = ("p", "q")
REQUESTS = tuple(RequestKey(engine, name) for engine in ENGINES for name in ("r0", "r1"))
TEXTS = ("alpha", "beta", "gamma", "delta")
GRACE = 100
MEMBER = MemberRef("p", "w0", 1)


def key_of(text: str, tokens: int) -> bytes:
    """Hash of a text cut off after `tokens`: what an engine would look up."""
    return hashlib.sha256(f"{text}:{tokens}".encode()).digest()


class BlockDriver:
    """A table, its index and its model; every method acts on both and asserts that they agree."""

    def __init__(self) -> None:
        self.index = NativeIndex()
        self.index.clear(TOTAL)
        self.table = BlockTable(TOTAL, SHAPE, self.index, LruPolicy(TOTAL, NativeQueues))
        self.model = PoolModel(TOTAL, SHAPE)
        self.now = 0
        self.serial = 0
        self.step_of: dict[SaveId | LoadId, StepId] = {}
        self.remembered: list[tuple[int, int, Block]] = []

    def reserve(self, owner: RequestKey, count: int) -> list[int]:
        """Reserve, or be refused and change nothing; returns the blocks."""
        refused = self.model.reserve(owner, count)
        before = self.picture()
        if refused:
            assert self.code(lambda: self.table.reserve(owner, count)) == refused
            assert self.picture() == before, "a refused reservation changed something"
            return []
        taken = self.table.reserve(owner, count)
        assert len(taken) == count
        self.model.taken(owner, taken)
        for block in taken:
            self.model.blocks[block].text = TEXTS[self.serial % len(TEXTS)]
            self.serial += 1
        return taken

    def abandon(self, block: int, owner: RequestKey) -> None:
        """The owner of a block goes."""
        self.table.abandon(block, owner, self.now, GRACE)
        self.model.abandon(block, owner, self.now + GRACE)

    def save_all(self, block: int, count: int) -> None:
        """Save every span that can be saved, well.

        The last of those that were missing makes it ready, or frees it where its owner has left and
        another block has its key; then nothing more can be saved.
        """
        for span in self.model.spans:
            if block in self.filling() and not self.is_busy(block, span):
                self.end(self.begin([block], span, count), True, None)

    def begin(self, blocks: list[int], span: tuple[int, int], count: int) -> SaveId:
        """Begin a save if it may; returns its name either way."""
        owner = self.model.blocks[blocks[0]].owner
        assert owner is not None
        codes = [self.check_save(owner.engine, block, span, count) for block in blocks]
        counts = [count] * len(blocks)
        for name in ("", owner.request):
            self.check_together(owner.engine, blocks, span, counts, [name] * len(blocks))
        save = self.save_id(self.serial)
        if any(codes):
            return save
        self.serial += 1
        self.table.begin_save(save, *span, tuple(blocks), tuple(counts))
        self.model.begin_save(save, span, dict.fromkeys(blocks, count))
        return save

    def check_together(
        self,
        engine: str,
        blocks: list[int],
        span: tuple[int, int],
        counts: list[int],
        names: list[str],
    ) -> None:
        """Many blocks at once are refused as the first of them that is refused by itself."""
        table = self.table
        alone = [
            self.code(partial(table.check_save, engine, block, *span, count, name))
            for block, count, name in zip(blocks, counts, names, strict=True)
        ]
        together = self.code(lambda: table.check_saves(engine, blocks, *span, counts, names))
        assert together == next((code for code in alone if code), "")

    def check_load(self, block: int, span: tuple[int, int], owner: RequestKey, tokens: int) -> None:
        """Ask whether a load may start; the answer must be the model's."""
        found = self.model.blocks[block]
        have = found.tokens if found.state == "ready" else found.valid.get(span, 0)
        if found.state == "poisoned":
            wanted = "block_poisoned"
        elif owner not in found.pins:
            wanted = "block_not_reserved"
        elif found.state == "filling" and self.model.is_open(block, span):
            wanted = "span_busy"
        else:
            wanted = "span_unwritten" if have < tokens else ""
        assert self.code(lambda: self.table.check_load(owner, block, *span, tokens)) == wanted
        if 0 < tokens <= SHAPE.block_tokens:
            many = self.code(lambda: self.table.check_loads(owner, [block], *span, tokens))
            assert many == wanted

    def check_save(self, engine: str, block: int, span: tuple[int, int], count: int) -> str:
        """Ask whether a save may start; the answer must be the model's. Returns its code."""
        found = self.model.blocks[block]
        if found.state in ("reset", "ready") or found.owner is None or found.owner.engine != engine:
            wanted = "block_not_reserved"
        elif found.state == "poisoned":
            wanted = "block_poisoned" if block in self.table.fills else "block_not_reserved"
        elif not 0 < count <= SHAPE.block_tokens:
            wanted = "limit_reached"
        elif self.is_busy(block, span):
            wanted = "span_busy"
        else:
            wanted = ""
        before = self.picture()
        code = self.code(lambda: self.table.check_save(engine, block, *span, count))
        assert code == wanted
        assert self.picture() == before
        return code

    def commit(self, engine: str, block: int, tokens: int) -> None:
        """Commit a block, or be refused and change nothing."""
        found = self.model.blocks[block]
        key = f"{found.text}:{tokens}"
        block_key = (NAMESPACE, key_of(found.text, tokens))
        is_owner = found.owner is not None and found.owner.engine == engine
        again = found.state == "ready" and (found.key, found.tokens) == (key, tokens)
        if again or (is_owner and found.state == "filling"):
            status = self.table.commit(engine, block, block_key, tokens)
            assert CommitStatus[self.model.commit(block, key, tokens).upper()] is status
            return
        before = self.picture()
        code = self.code(lambda: self.table.commit(engine, block, block_key, tokens))
        kept = is_owner and found.state == "poisoned" and block in self.table.fills
        assert code == ("block_poisoned" if kept else "block_not_reserved")
        assert self.picture() == before

    def end(self, save: SaveId, ok: bool, tokens: int | None) -> None:
        """End a save, with its announced counts or `tokens` for each block."""
        opened = self.model.saves.get(save)
        if opened is None:
            return
        counts = {block: tokens or count for block, count in opened.counts.items()}
        named = tuple(counts.values()) if tokens else ()
        self.table.end_save(save, ok, named)
        self.model.end_save(save, ok, counts)
        step = self.step_of.pop(save, None)
        if step is not None:
            self.model.copy_ended(step, save)

    def begin_load(self, blocks: list[int], span: tuple[int, int]) -> None:
        """A load of one span of some blocks begins, if nothing is being saved there."""
        if any(self.model.is_open(b, span) or self.model.is_target(b) for b in blocks):
            return
        self.serial += 1
        load = LoadId(SlotRef(MEMBER, self.serial, 0))
        self.table.begin_load(load, *span, tuple(blocks))
        self.model.loads[load] = (span, blocks)
        for block in blocks:
            self.model.pin(block, load)
        self.model.look(load, blocks, [span])

    def end_load(self, load: LoadId) -> None:
        """A load has ended; saying so again is no error."""
        assert not self.model.has_changed(load), f"{load} saw other bytes while it copied"
        _, blocks = self.model.loads.pop(load)
        self.table.end_load(load)
        self.table.end_load(load)
        for block in blocks:
            self.model.unpin(block, load)
        step = self.step_of.pop(load, None)
        if step is not None:
            self.model.copy_ended(step, load)

    # Steps ------------------------------------------------------------------------------------

    def open_step(self, targets: list[int], sources: list[int]) -> None:
        """A step of blocks that nobody else touches begins."""
        model = self.model
        read = {block for block, _ in model.reads.values()}
        loaded = {block for _, blocks in model.loads.values() for block in blocks}
        kept = {block for step in model.steps.values() for block in step.sources}
        targets = [b for b in targets if not (b in read | loaded | kept or model.is_written(b))]
        sources = [b for b in sources if not model.is_written(b) and b not in targets]
        self.serial += 1
        step = StepId(MEMBER, self.serial)
        self.table.open_step(step, frozenset(targets), frozenset(sources))
        model.open_step(step, targets, sources)

    def save_by_step(self, step: StepId, span: tuple[int, int], count: int) -> None:
        """The table hears of a save of a step; what it refuses is poisoned."""
        found = self.model.steps[step]
        if not found.targets or found.closed:
            return
        found.unheard.discard(span)
        if any(self.is_busy(block, span) for block in found.targets):
            self.poison_all(found.targets)
            return
        save = self.save_id(self.serial)
        self.serial += 1
        blocks = tuple(found.targets)
        self.table.begin_save(save, *span, blocks, (count,) * len(blocks), step)
        self.model.begin_save(save, span, dict.fromkeys(blocks, count))
        found.copies.add(save)
        self.step_of[save] = step

    def load_by_step(self, step: StepId, span: tuple[int, int]) -> None:
        """The table hears of a load of a step."""
        found = self.model.steps[step]
        if not found.sources or found.closed:
            return
        self.serial += 1
        load = LoadId(SlotRef(MEMBER, self.serial, 0))
        self.table.begin_load(load, *span, tuple(found.sources), step)
        self.model.loads[load] = (span, found.sources)
        self.model.look(load, found.sources, [span])
        found.copies.add(load)
        self.step_of[load] = step

    def close_step(self, step: StepId) -> None:
        """A step is closed, once all of its copies were told."""
        found = self.model.steps[step]
        if not found.unheard:
            self.table.close_step(step)
            self.model.close_step(step)

    def poison_all(self, blocks: list[int]) -> None:
        """Rows that nobody can tell are nobody's."""
        for block in blocks:
            self.table.poison(block)
            self.model.poison(block)

    def begin_read(self, block: int, layer: int) -> None:
        """A remote read of one layer of a block begins, if nothing is being saved there."""
        spans = [span for span in self.model.spans if span[0] == layer]
        if self.model.is_target(block) or any(self.model.is_open(block, span) for span in spans):
            return
        self.serial += 1
        read = ReadId(f"t{self.serial}", layer, 0, 0)
        self.table.pin_span(block, layer, read)
        self.model.pin(block, read)
        self.model.reads[read] = (block, layer)
        self.model.look(read, [block], spans)

    def end_read(self, read: ReadId) -> None:
        """A remote read has ended; saying so again is no error."""
        assert not self.model.has_changed(read), f"{read} saw other bytes while it copied"
        block, layer = self.model.reads.pop(read)
        self.table.unpin_span(block, layer, read)
        self.table.unpin_span(block, layer, read)
        self.model.unpin(block, read)

    def remember(self, block: int) -> None:
        """Somebody notes a block without pinning it."""
        self.remembered.append((block, self.table.lives[block], self.model.blocks[block]))

    def is_busy(self, block: int, span: tuple[int, int]) -> bool:
        """Whether a span of a block may not be saved now."""
        model = self.model
        busy = model.is_open(block, span) or model.is_loaded(block, span)
        return busy or model.is_read(block, span[0])

    def save_id(self, number: int) -> SaveId:
        """The name of a save."""
        return SaveId(SlotRef(MEMBER, number, 0), "s")

    def filling(self) -> list[int]:
        """Blocks that are private to somebody."""
        return [at for at, b in enumerate(self.model.blocks) if b.state == "filling" and b.owner]

    def unsaved(self) -> list[int]:
        """Private blocks that nothing was saved into yet."""
        return [
            at
            for at in self.filling()
            if not self.model.is_written(at) and not any(self.model.blocks[at].valid.values())
        ]

    def ready(self) -> list[int]:
        """Blocks that look-ups find."""
        return [at for at, block in enumerate(self.model.blocks) if block.state == "ready"]

    def readable(self) -> list[int]:
        """Blocks that a copy may be made out of."""
        return [at for at, b in enumerate(self.model.blocks) if b.state in ("ready", "filling")]

    @staticmethod
    def code(call: Callable[[], object]) -> str:
        """The code with which a call is refused, '' when it is not."""
        try:
            call()
        except LocalError as error:
            return error.code
        return ""

    def picture(self) -> str:
        """Everything the table knows, to see that nothing changed."""
        table = self.table
        return repr(
            (
                bytes(table.state),
                table.free,
                table.fills,
                [table.columns.key(at) for at, count in enumerate(table.columns.tokens) if count],
                table.columns.tokens,
                sorted(map(str, table.pins.items())),
                table.span_readers,
                table.span_loads,
                table.span_saves,
                table.owned,
                table.dead,
                table.saving,
                table.load_blocks,
                table.save_blocks,
                table.steps,
                table.lives,
                list(table.policy),
            )
        )
