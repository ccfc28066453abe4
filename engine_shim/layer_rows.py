"""Which rows of which layer are copied where, and what a slot still holds from its last use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from engine_shim.copy_plan import CopyPlan
from engine_shim.ring import pool_rows, slot_rows
from engine_shim.steps import Missing, StepRequest
from kvd.plan.layout import BlockLayout
from kvd.plan.runs import BlockRows, add_rows
from kvd.plan.sums import add_block_groups, add_group, is_summed
from kvd.wire.layout import DeviceLayout
from kvd.wire.slot_items import LoadItem, ReadItem, SaveItem
from kvd.wire.sum_layout import SumView

Key = TypeVar("Key")

SAVER = "save"
"""Name of a tenancy's one save."""

Parts = list[tuple[BlockRows, BlockRows]]
"""(destination, source) of each part of a layer."""


@dataclass(slots=True)
class _Content:
    """Rows of one layer: for each request how many tokens from 0 on are there."""

    layer: int = -1
    tokens: dict[str, int] = field(default_factory=dict)


class SlotContents:
    """What each slot holds. A slot of its own keeps a layer's rows from step to step."""

    def __init__(self, num_slots: int) -> None:
        """Nothing is held."""
        self._contents = [_Content() for _ in range(num_slots)]

    def held(self, slot: int, layer: int, request: str) -> int:
        """Tokens of the request that the slot holds for this layer."""
        content = self._contents[slot]
        return content.tokens.get(request, 0) if content.layer == layer else 0

    def occupy(self, slot: int, layer: int) -> None:
        """Another layer moves in: what was there is void."""
        if self._contents[slot].layer != layer:
            self._contents[slot] = _Content(layer)

    def add(self, slot: int, requests: tuple[StepRequest, ...]) -> None:
        """A step has written and computed the slot."""
        self._contents[slot].tokens.update({r.request: r.end for r in requests})

    def void(self, slot: int) -> None:
        """What the slot holds is not known any more."""
        self._contents[slot] = _Content()

    def forget(self, request: str) -> None:
        """The request has ended; its device blocks will be another's."""
        for content in self._contents:
            content.tokens.pop(request, None)


_Place = tuple[int, int, tuple[tuple[int, int, int, int], ...]]


@dataclass(frozen=True, slots=True)
class _Made(Generic[Key]):
    """A plan without checksums: that of the same rows in another layer differs by two offsets."""

    key: Key
    layer: int
    slot: int
    plan: CopyPlan


class LayerRows:
    """Addresses of a worker's rows: slots on one side, pool blocks on the other."""

    def __init__(
        self, layout: DeviceLayout, blocks: BlockLayout, shard: int, *, opaque: bool = False
    ) -> None:
        """Know where everything is.

        Args:
            shard: the span of each layer that this rank loads and saves.
            opaque: rows are not contiguous within a block (packed keys, interleaved heads): only
                whole blocks can be moved, and a checksum runs over all of one.
        """
        self._layout = layout
        self._blocks = blocks
        self._shard = shard
        self._opaque = opaque
        self.block_tokens = blocks.block_tokens
        self._places: dict[tuple[int, int], _Place] = {}
        self._last_save: _Made[tuple[StepRequest, ...]] | None = None
        self._last_load: _Made[Missing] | None = None

    def save_plan(
        self, layer: int, slot: int, requests: tuple[StepRequest, ...], mode: str
    ) -> CopyPlan:
        """The copies of a layer's new rows from its slot into the pool; mode as in `add_save`."""
        if mode == "off":
            last = self._last_save
            if last is not None and last.key == requests:
                shift = self._shift(last, layer, slot)
                if shift is not None:
                    return _elsewhere(last.plan, shift[1], shift[0])
        plan = CopyPlan()
        for request in requests:
            self.add_save(plan, layer, slot, request, mode)
        if mode == "off":
            self._last_save = _Made(requests, layer, slot, plan)
        return plan

    def load_plan(self, layer: int, slot: int, missing: Missing, sums: SumView | None) -> CopyPlan:
        """The copies of what a slot lacks from the pool into it; sums as in `add_load`."""
        if sums is None:
            last = self._last_load
            if last is not None and last.key == missing:
                shift = self._shift(last, layer, slot)
                if shift is not None:
                    return _elsewhere(last.plan, *shift)
        plan = CopyPlan()
        for request, have in missing:
            self.add_load(plan, layer, slot, request, have, sums)
        if sums is None:
            self._last_load = _Made(missing, layer, slot, plan)
        return plan

    def _shift(self, made: _Made[Key], layer: int, slot: int) -> tuple[int, int] | None:
        """How far slot and pool rows of a layer are from those of a plan, None for otherwise laid
        out ones."""
        before, here = self._place(made.layer, made.slot), self._place(layer, slot)
        if before[2] != here[2]:
            return None
        return here[0] - before[0], here[1] - before[1]

    def _place(self, layer: int, slot: int) -> _Place:
        """Where rows of a layer lie: in the slot, in the pool, and each part from there on."""
        place = self._places.get((layer, slot))
        if place is None:
            parts = [
                (
                    slot_rows(self._layout, slot, span.part, ()),
                    pool_rows(self._blocks, layer, self._shard, span.part, ()),
                )
                for span in self._blocks.spans(layer, self._shard)
            ]
            in_slot, in_pool = (parts[0][0].base, parts[0][1].base) if parts else (0, 0)
            shape = tuple(
                (here.base - in_slot, here.block_stride, there.base - in_pool, here.row_bytes)
                for here, there in parts
            )
            place = self._places[layer, slot] = in_slot, in_pool, shape
        return place

    def load_item(self, request: StepRequest, have: int) -> LoadItem:
        """The blocks behind rows [have, num_computed), as kvd must know them."""
        size = self._blocks.block_tokens
        first, last = have // size, -(-request.num_computed // size)
        blocks = list(request.pool_blocks[first:last])
        return LoadItem(request.request, blocks, request.num_computed - first * size)

    def save_items(self, requests: tuple[StepRequest, ...]) -> list[SaveItem]:
        """One save of all new rows; for each block, the tokens valid once it has ended."""
        size = self._blocks.block_tokens
        blocks: list[int] = []
        tokens: list[int] = []
        names: list[str] = []
        for request in requests:
            start, end = request.saved_start, request.saved_end(size)
            first, last = start // size, -(-end // size)
            if end == start:
                continue
            blocks.extend(request.pool_blocks[first:last])
            tokens += [size] * (last - first - 1)
            tokens.append(end - (last - 1) * size)
            names.extend([request.request] * (last - first))
        names = names[:1] if len(requests) == 1 else names
        return [SaveItem(SAVER, blocks, tokens, names)] if blocks else []

    def read_items(self, requests: tuple[StepRequest, ...]) -> list[ReadItem]:
        """What each transfer is offered: every row that it was not offered before."""
        size = self._layout.block_tokens
        items = []
        for request in requests:
            first, last = request.offered // size, -(-request.end // size)
            for target in request.targets:
                items.append(
                    ReadItem(
                        target.transfer,
                        target.peer,
                        request.offered,
                        request.end,
                        list(request.device_blocks[first:last]),
                        list(request.pool_blocks[first:last]),
                    )
                )
        return items

    def add_load(
        self,
        plan: CopyPlan,
        layer: int,
        slot: int,
        request: StepRequest,
        have: int,
        sums: SumView | None,
    ) -> None:
        """Add the copy of rows [have, num_computed) from the pool into the slot.

        sums: what the blocks' checksums must be, None to compare none.
        """
        parts = [(there, here) for here, there in self._parts(layer, slot, request)]
        have, end = self._moved(have, request.num_computed)
        if sums is None:
            for dst, src in parts:
                add_rows(plan.plain, have, end, dst, src)
            return
        size = self._blocks.block_tokens
        span = layer * self._blocks.spec.num_shards + self._shard
        whole = _whole_blocks(have, end, size)
        full = sums.full(span, request.pool_blocks[whole.start : whole.stop], size)
        if full is None:
            whole, full = range(whole.start, whole.start), []
        for at in range(have // size, whole.start):
            self._add_summed_load(plan, span, at, (have, end), request, parts, sums)
        plan.expected.extend(full)
        add_block_groups(plan.summed, whole, parts)
        for at in range(whole.stop, -(-end // size)):
            self._add_summed_load(plan, span, at, (have, end), request, parts, sums)

    def _add_summed_load(
        self,
        plan: CopyPlan,
        span: int,
        at: int,
        tokens: tuple[int, int],
        request: StepRequest,
        parts: Parts,
        sums: SumView,
    ) -> None:
        """Add the copy of what of tokens [start, end) is in the request's block number `at`."""
        size, block = self._blocks.block_tokens, request.pool_blocks[at]
        first = at * size
        rows = (max(tokens[0], first), min(tokens[1], first + size))
        known = sums.get(span, block)
        covered = size if self._opaque or known is None else known.tokens
        if known is not None and rows[1] <= first + covered <= first + size:
            plan.expected.append((block, known.crc))
            add_group(plan.summed, (first, first + covered), rows, parts)
        else:
            for dst, src in parts:
                add_rows(plan.plain, *rows, dst, src)

    def add_save(
        self, plan: CopyPlan, layer: int, slot: int, request: StepRequest, mode: str
    ) -> None:
        """Add the copy of the step's new rows from the slot into the pool.

        mode: which blocks get a checksum (`kvd.plan.sums`).
        """
        size = self._blocks.block_tokens
        start, stop = self._moved(request.saved_start, request.saved_end(size))
        parts = self._parts(layer, slot, request) if start < stop else []
        if mode == "off" or not parts:
            for dst, src in parts:
                add_rows(plan.plain, start, stop, dst, src)
            return
        last = -(-stop // size)
        whole = _whole_blocks(start, stop, size) if mode == "always" else range(last, last)
        for at in range(start // size, whole.start):
            self._add_saved_block(plan, layer, at, (start, stop), request, parts, mode)
        plan.marks.extend(range(len(plan.summed.counts), len(plan.summed.counts) + len(whole)))
        add_block_groups(plan.summed, whole, parts)
        for at in range(whole.stop, last):
            self._add_saved_block(plan, layer, at, (start, stop), request, parts, mode)

    def _add_saved_block(
        self,
        plan: CopyPlan,
        layer: int,
        at: int,
        tokens: tuple[int, int],
        request: StepRequest,
        parts: Parts,
        mode: str,
    ) -> None:
        """Add the save of what of tokens [start, end) is in the request's block number `at`."""
        size = self._blocks.block_tokens
        first, end = at * size, min(tokens[1], (at + 1) * size)
        if is_summed(mode, request.pool_blocks[at], layer):
            plan.marks.append(len(plan.summed.counts))
            add_group(plan.summed, (first, end), (first, end), parts)
        else:
            plan.marks.append(-1)
            for dst, src in parts:
                add_rows(plan.plain, max(tokens[0], first), end, dst, src)

    def _moved(self, start: int, end: int) -> tuple[int, int]:
        """The tokens that are moved for the sake of tokens [start, end)."""
        if not self._opaque or start >= end:
            return start, end
        size = self._blocks.block_tokens
        return start // size * size, -(-end // size) * size

    def _parts(self, layer: int, slot: int, request: StepRequest) -> Parts:
        """(rows in the pool, rows in the slot) of each part of the layer."""
        parts = []
        for span in self._blocks.spans(layer, self._shard):
            in_slot = slot_rows(self._layout, slot, span.part, request.device_blocks)
            in_pool = pool_rows(self._blocks, layer, self._shard, span.part, request.pool_blocks)
            parts.append((in_pool, in_slot))
        return parts


def _elsewhere(plan: CopyPlan, dst: int, src: int) -> CopyPlan:
    """The same copies, so many bytes away."""
    return CopyPlan(plan.plain.shifted(dst, src))


def _whole_blocks(start: int, end: int, size: int) -> range:
    """The blocks that lie in tokens [start, end) as a whole; an empty range ends where they do."""
    first, stop = -(-start // size), end // size
    last = -(-end // size)
    return range(first, stop) if first < stop else range(last, last)
