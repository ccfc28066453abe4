"""The books of a block table, and the questions that change nothing in them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from kvd.core.block_columns import U32, BlockColumns
from kvd.core.block_types import (
    FILLING,
    READY,
    RESET,
    BlockKey,
    BlockShape,
    BlockState,
    Changes,
    Fill,
    Marks,
    OpenCopy,
    OpenStep,
)
from kvd.core.errors import LocalError
from kvd.core.evict import EvictionPolicy
from kvd.core.ids import LoadId, Pin, ReadId, RequestKey, SaveId, StepId
from kvd.core.prefix import BlockIndex


class BlockBooks:
    """Everything that is known of the blocks of one pool.

    Of every block there is an entry in an array; only blocks that are filled or pinned have
    objects. Copies are of hundreds of blocks of one layer: what is asked of all of them at once is
    kept as sets.

    owned:   the filling and poisoned blocks of each owner, the same as in `fills`.
    dead:    the poisoned blocks.
    span_loads, span_saves: open copies of each span, and their blocks.
    saving:  how many open saves, and open steps that save, write into a block.
    steps:   steps that are not closed, or whose copies have not all ended.
    marks:   what one of these has saved since `settle`.
    """

    def __init__(
        self,
        total: int,
        shape: BlockShape,
        index: BlockIndex,
        policy: EvictionPolicy,
        columns: BlockColumns | None = None,
    ) -> None:
        """An empty pool of `total` blocks; with columns of an earlier life, `adopt` comes first."""
        self.total = total
        self.shape = shape
        self.index = index
        self.policy = policy
        self.columns = BlockColumns(total) if columns is None else columns
        self.state = self.columns.states
        self.free = array(U32, range(total - 1, -1, -1) if columns is None else ())
        self.counts = [total, 0, 0, 0]
        self.fills: dict[int, Fill] = {}
        self.pins: dict[int, frozenset[Pin]] = {}
        self.lives = array("Q", [0]) * total
        self.owned: dict[RequestKey, set[int]] = {}
        self.dead: set[int] = set()
        self.span_readers: dict[tuple[int, int], set[ReadId]] = {}
        self.span_loads: dict[int, dict[LoadId, frozenset[int]]] = {}
        self.span_saves: dict[int, dict[SaveId, frozenset[int]]] = {}
        self.load_blocks: dict[LoadId, OpenCopy] = {}
        self.save_blocks: dict[SaveId, OpenCopy] = {}
        self.saving: Counter[int] = Counter()
        self.steps: dict[StepId, OpenStep] = {}
        self.marks: Marks | None = None
        self.changes = Changes()

    def settle(self) -> None:
        """Enter in the fills of a step's targets what it has saved."""
        marks, self.marks = self.marks, None
        if marks is None:
            return
        for block, count in zip(marks.blocks, marks.tokens, strict=True):
            fill = self.fills[block]
            fill.least = None
            for span in marks.spans:
                fill.tokens[span] = count

    # Questions --------------------------------------------------------------------------------

    def num_saved(self, block: int) -> int:
        """Spans of a filling block that hold rows."""
        self.settle()
        return sum(map(bool, self.fills[block].tokens))

    def is_ready_under(self, block: int, key: BlockKey, tokens: int) -> bool:
        """Whether it is this key and count that a block is ready under; any number will do."""
        return (
            0 <= block < self.total
            and self.state[block] == BlockState.READY
            and self.columns.tokens[block] == tokens
            and self.columns.key(block) == key
        )

    def own_fill(self, engine: str, block: int, request: str = "") -> Fill:
        """The filling block `block`, if `engine` reserved it, for `request` if that is named.

        Raises: LocalError(block_not_reserved | block_poisoned).
        """
        fill = self.fills.get(block) if 0 <= block < self.total else None
        if fill is None or fill.owner.engine != engine or request not in ("", fill.owner.request):
            name = request or "?"
            raise LocalError("block_not_reserved", block=block, request=name, engine=engine)
        if self.state[block] == BlockState.POISONED:
            raise LocalError("block_poisoned", block=block, detail="a save into it failed")
        return fill

    def check_save(
        self, engine: str, block: int, layer: int, shard: int, tokens: int, request: str = ""
    ) -> None:
        """Whether a save into this span may start; `request` as in `commit`.

        Raises: LocalError(block_not_reserved | block_poisoned | span_busy).
        """
        self.check_target(engine, block, tokens, request)
        span = self.shape.span(layer, shard)
        if self.is_saved(block, span):
            raise LocalError("span_busy", layer=layer, block=block, doing="saved")
        if self.is_loaded(block, span):
            raise LocalError("span_busy", layer=layer, block=block, doing="loaded")
        if (block, layer) in self.span_readers:
            raise LocalError("span_busy", layer=layer, block=block, doing="read remotely")

    def check_target(self, engine: str, block: int, tokens: int, request: str = "") -> None:
        """Whether so many tokens may be saved into a block of the engine, whatever the span.

        Raises: LocalError(block_not_reserved | block_poisoned | limit_reached).
        """
        self.own_fill(engine, block, request)
        if not 0 < tokens <= self.shape.block_tokens:
            raise LocalError(
                "limit_reached",
                what="tokens in a block",
                value=tokens,
                limit=self.shape.block_tokens,
                key="block_tokens",
            )

    def check_targets(
        self,
        engine: str,
        blocks: Sequence[int],
        tokens: Sequence[int],
        requests: Sequence[str],
    ) -> None:
        """`check_target` of many blocks; raises for the first that is refused, as it would."""
        if self._are_targets(engine, blocks, tokens, requests) and self.dead.isdisjoint(blocks):
            return
        for block, count, request in zip(blocks, tokens, requests, strict=True):
            self.check_target(engine, block, count, request)

    def check_saves(
        self,
        engine: str,
        blocks: Sequence[int],
        layer: int,
        shard: int,
        tokens: Sequence[int],
        requests: Sequence[str],
        kept: frozenset[int] = frozenset(),
    ) -> None:
        """`check_save` of many blocks; raises for the first that is refused, as it would.

        kept: blocks that open steps of the member keep. Those may be poisoned by now, as long as
            others are not: it harms nobody to save into them, and the rows of others are good.
        """
        if self._may_all_be_saved(engine, blocks, layer, shard, tokens, requests, kept):
            return
        for block, count, request in zip(blocks, tokens, requests, strict=True):
            self.check_save(engine, block, layer, shard, count, request)

    def _may_all_be_saved(
        self,
        engine: str,
        blocks: Sequence[int],
        layer: int,
        shard: int,
        tokens: Sequence[int],
        requests: Sequence[str],
        kept: frozenset[int],
    ) -> bool:
        """Whether that is plain to see, as it is for nearly every save; False says nothing."""
        if not self.has_good(blocks, kept):
            return False
        if not self.is_untouched(blocks, self.shape.span(layer, shard)):
            return False
        return self._are_targets(engine, blocks, tokens, requests)

    def _are_targets(
        self,
        engine: str,
        blocks: Sequence[int],
        tokens: Sequence[int],
        requests: Sequence[str],
    ) -> bool:
        """Whether it is plain to see that the requests fill these blocks, and the counts fit."""
        if not blocks or not len(blocks) == len(tokens) == len(requests):
            return False
        if min(tokens) < 1 or max(tokens) > self.shape.block_tokens:
            return False
        names = set(requests)
        if len(names) == 1:
            return self.owned.get(RequestKey(engine, names.pop()), set()).issuperset(blocks)
        owned = {name: self.owned.get(RequestKey(engine, name), set()) for name in names}
        return all(block in owned[name] for block, name in zip(blocks, requests, strict=True))

    def is_untouched(self, blocks: Iterable[int], span: int) -> bool:
        """Whether it is plain to see that nobody saves, loads or reads a span of filling blocks
        now. False says nothing."""
        if self.span_readers:
            layer = span // self.shape.num_shards
            if any((block, layer) in self.span_readers for block in blocks):
                return False
        copies = (self.span_saves.get(span, {}), self.span_loads.get(span, {}))
        return all(taken.isdisjoint(blocks) for of in copies for taken in of.values())

    def has_good(self, blocks: Sequence[int] | frozenset[int], kept: frozenset[int]) -> bool:
        """Whether of blocks to save into none is poisoned, or only such as `kept`, and not all."""
        dead = self.dead.intersection(blocks)
        return not dead or (len(dead) < len(blocks) and kept.issuperset(dead))

    def is_loadable(self, blocks: frozenset[int], span: int) -> bool:
        """Whether what an open step loads may still be loaded; False says nothing."""
        return self.dead.isdisjoint(blocks) and not self.is_any_saved(blocks, span)

    def is_any_saved(self, blocks: Iterable[int], span: int) -> bool:
        """Whether a save into this span of one of the blocks is open."""
        saves = self.span_saves.get(span, {}).values()
        return not all(taken.isdisjoint(blocks) for taken in saves)

    def check_sources(
        self,
        owner: RequestKey,
        blocks: Sequence[int],
        shard: int,
        tokens: int,
        written: Collection[int],
    ) -> None:
        """`check_source` of the blocks of `tokens` tokens; raises for the first that is refused."""
        # What a step has saved since `settle` is in `written` until the step is over.
        state, pins, fills, total = self.state, self.pins, self.fills, self.total
        have, size, left = self.columns.tokens, self.shape.block_tokens, tokens
        for block in blocks:
            want = min(size, left)
            left = max(0, left - size)
            if 0 <= block < total and owner in pins.get(block, ()):
                found = state[block]
                if found == READY and have[block] >= want:
                    continue
                least = fills[block].least if found == FILLING else None
                if least is not None and least.get(shard, -1) >= want and block not in written:
                    continue
            self.check_source(owner, block, shard, want, written)

    def check_source(
        self, owner: RequestKey, block: int, shard: int, tokens: int, written: Collection[int]
    ) -> None:
        """`check_load` for all layers from now on; written: blocks that are being saved, or may be.

        Raises: as `check_load`.
        """
        state = self.state[block] if 0 <= block < self.total else RESET
        is_filling = state == FILLING and owner in self.pins.get(block, ())
        if not is_filling:
            self.check_load(owner, block, 0, shard, tokens)
            return
        if block in written:
            raise LocalError("span_busy", layer="any", block=block, doing="saved")
        self.settle()
        fill = self.fills[block]
        have = fill.tokens[shard :: self.shape.num_shards]
        least = min(have)
        if fill.least is None:
            fill.least = {}
        fill.least[shard] = least
        if least < tokens:
            layer = have.index(least)
            raise LocalError("span_unwritten", layer=layer, block=block, have=least, want=tokens)

    def is_saved(self, block: int, span: int) -> bool:
        """Whether a save into this span of the block is open."""
        return any(block in taken for taken in self.span_saves.get(span, {}).values())

    def is_loaded(self, block: int, span: int) -> bool:
        """Whether a load of this span of the block is open."""
        return any(block in taken for taken in self.span_loads.get(span, {}).values())

    def check_loads(
        self, owner: RequestKey, blocks: Sequence[int], layer: int, shard: int, tokens: int
    ) -> None:
        """`check_load` of the blocks of `tokens` tokens, in order; raises for the first refused."""
        self.settle()
        state, pins, fills, total = self.state, self.pins, self.fills, self.total
        have, size = self.columns.tokens, self.shape.block_tokens
        span, left = self.shape.span(layer, shard), tokens
        is_saved = bool(self.span_saves.get(span))
        for block in blocks:
            want = min(size, left)
            left = max(0, left - size)
            if 0 <= block < total and owner in pins.get(block, ()):
                found = state[block]
                if found == READY and have[block] >= want:
                    continue
                is_open = is_saved and self.is_saved(block, span)
                if found == FILLING and not is_open and fills[block].tokens[span] >= want:
                    continue
            self.check_load(owner, block, layer, shard, want)

    def check_load(
        self, owner: RequestKey, block: int, layer: int, shard: int, tokens: int
    ) -> None:
        """Whether `owner` may load `tokens` tokens of this span now.

        Raises: LocalError(block_not_reserved | block_poisoned | span_busy | span_unwritten).
        """
        state = self.state[block] if 0 <= block < self.total else BlockState.RESET
        if state == BlockState.POISONED:
            raise LocalError("block_poisoned", block=block, detail="its data is not valid")
        if owner not in self.pins.get(block, ()):
            raise LocalError(
                "block_not_reserved", block=block, request=owner.request, engine=owner.engine
            )
        if state == BlockState.READY:
            have = self.columns.tokens[block]
        else:
            span = self.shape.span(layer, shard)
            if self.is_saved(block, span):
                raise LocalError("span_busy", layer=layer, block=block, doing="saved")
            self.settle()
            have = self.fills[block].tokens[span]
        if have < tokens:
            raise LocalError("span_unwritten", layer=layer, block=block, have=have, want=tokens)

    def holds_rows(self, block: int, life: int, layer: int, shard: int, tokens: int) -> bool:
        """Whether this life of a block still goes on and `tokens` tokens of the span are valid."""
        if self.lives[block] != life:
            return False
        if self.state[block] == BlockState.READY:
            return self.columns.tokens[block] >= tokens
        span = self.shape.span(layer, shard)
        fill = self.fills.get(block)
        if fill is None or self.state[block] != BlockState.FILLING:
            return False
        if any(block in kept.targets for kept in self.steps.values()):
            return False  # it may be written at any time, and then nobody would be asked
        self.settle()
        return not self.is_saved(block, span) and fill.tokens[span] >= tokens
