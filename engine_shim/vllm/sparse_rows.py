"""KV rows of a real engine in a decode region, with hot buffers before it.

In each layer vLLM writes the step's rows and then attends; the selection is known by then:

    write   rows go to the region; those of a decoding request to its hot buffer, too, and what its
            selection lacks there starts to be loaded, for all layers that follow this selection
    read    a decoding request's rows come from its hot buffer and the scratch tile

A request *decodes* in a step of so few tokens as a decode step has; with more it is prefilled. Then
its queries select most of what is there, which no hot buffer holds, and it has none: its rows are
gathered straight from the region, a bounded number of queries at a time.

With `overlap_attention` a decoding request attends to what is in its hot buffer while the rest is
loaded; else it waits for the loads first, and its sums are those of an engine without hot buffers.

Ranks of an engine have the same rows: one writes them, and all meet after each layer's write.

A request that fails reads zeros from then on and is reported; the others are not touched by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias, TypeVar

import torch
from vllm.forward_context import get_forward_context

from engine_shim.device import DeviceError
from engine_shim.device_memory import mapping_of
from engine_shim.hot import HoleError, HotBuffers, HotHandle, NoHotBufferError
from engine_shim.hot_places import Places
from engine_shim.vllm import sparse_math
from engine_shim.vllm.cpu_sparse import PagedRows, SparseMetadata
from engine_shim.vllm.messages import Failure
from engine_shim.vllm.sparse_plan import SparsePlan
from engine_shim.vllm.sparse_written import WrittenBlocks

HOLE: Final = "row_missing"
DIFFERS: Final = "row_differs"
NO_BUFFER: Final = "no_hot_buffer"

NOTHING: Final = Failure("nothing", "there is nothing to write")
"""Of a draft that is not computed; nobody is told."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Share:
    """A request in a step: its tokens [start, end), at [begin, begin + end - start) of the batch.

    table:   [blocks] int64, block ids of the request.
    handle:  of its hot buffer while it decodes.
    places:  by group, of its selection.
    late:    by group, positions of its selection that are loaded, where that is of interest.
    ready:   layer whose rows can be read.
    failure: why it reads zeros.
    is_draft: of a draft layer, which the engine may have left out in some steps.
    """

    request: str
    blocks: Sequence[int]
    table: torch.Tensor
    start: int
    end: int
    begin: int
    handle: HotHandle | None = None
    places: dict[int, Places] = field(default_factory=dict)
    late: dict[int, torch.Tensor] = field(default_factory=dict)
    ready: int = -1
    failure: Failure | None = None
    is_draft: bool = False

    @property
    def batch(self) -> slice:
        """Its tokens in the batch."""
        return slice(self.begin, self.begin + self.end - self.start)


Read: TypeAlias = Callable[[int, Share, torch.Tensor], torch.Tensor]
Part: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class SparseStore:
    """The rows of one rank."""

    def __init__(
        self,
        plan: SparsePlan,
        hot: HotBuffers,
        region: memoryview,
        dtype: torch.dtype,
        *,
        writes_region: bool,
        meet: Callable[[], None] | None,
    ) -> None:
        """Look at the memory; see `open`.

        Args: writes_region: whether this rank writes rows into the region, or another one does.
              meet: waits for the other ranks, None where there are none.
        """
        layout = plan.region
        self.plan = plan
        self.shares: tuple[Share, ...] = ()
        self._dtype = dtype
        self._writes_region = writes_region
        self._meet = meet
        self._width = layout.row_bytes // dtype.itemsize
        self._group_of = {layer: at for at, group in enumerate(plan.groups) for layer in group}
        self.open(hot, region)

    def open(self, hot: HotBuffers, region: memoryview) -> None:
        """Look at memory without rows. Args: region: all of it, a tensor over it is kept."""
        layout, dtype = self.plan.region, self._dtype
        self.hot = hot
        self.written = WrittenBlocks(layout.num_layers, layout.num_blocks, layout.block_tokens)
        whole = torch.frombuffer(region, dtype=dtype, count=layout.num_bytes // dtype.itemsize)
        self._region = whole.view(layout.num_layers, -1, self._width)
        self._hot = torch.frombuffer(mapping_of("hot", hot.memory).view(), dtype=torch.uint8)

    def close(self) -> None:
        """Let go of all memory but the hot buffers; until `open` every share has to fail."""
        self.shares = ()
        self._region = self._hot = torch.empty(0)

    # Writing ----------------------------------------------------------------------------------

    def write(
        self,
        layer: int,
        shares: Sequence[Share],
        slots: torch.Tensor,
        rows: torch.Tensor,
        selected: torch.Tensor,
    ) -> None:
        """Store the step's rows of a layer, and start the loads of its selection.

        Args: slots: [T] rows of a layer of the region, by block id.
              rows: [T, R] of any float. selected: [T, K] positions, -1 for none.
        """
        rows = rows.to(self._dtype).contiguous()
        for share in shares:
            attempt(share, partial(self._write, layer, share, slots, rows, selected))
        if self._meet is not None:
            # No rank reads a row of this step before it is there, nor writes the next layer's
            # before all have read this one's last step.
            self._meet()

    def _write(
        self,
        layer: int,
        share: Share,
        slots: torch.Tensor,
        rows: torch.Tensor,
        selected: torch.Tensor,
    ) -> None:
        if share.is_draft:
            self.fill_gap(layer, share)
        if share.handle is not None:
            self._decode_write(layer, share, share.handle, rows, selected)
        elif self._writes_region:
            self._region[layer][slots[share.batch].long()] = rows[share.batch]
        self.written.add(share.request, layer, share.table, share.start, share.end)

    def fill_gap(self, layer: int, share: Share) -> None:
        """Write zeros where a draft layer has no rows before the share's first.

        The engine drafts nothing in steps near its longest length. What a drafter makes of such
        rows is verified like all its guesses.
        """
        known = self.written.end(layer, share.table, share.start)
        if known < share.start:
            if self._writes_region:
                missing = torch.arange(known, share.start)
                size = self.plan.region.block_tokens
                self._region[layer][sparse_math.slots_of(share.table, missing, size)] = 0
            self.written.add(share.request, layer, share.table, known, share.start)
        if share.handle is not None:
            reached = self.hot.num_rows(share.handle, layer)
            if reached < share.start:
                self.hot.landed(share.handle, layer, reached, share.start)

    def _decode_write(
        self,
        layer: int,
        share: Share,
        handle: HotHandle,
        rows: torch.Tensor,
        selected: torch.Tensor,
    ) -> None:
        hot, at = self.hot, self._group_of[layer]
        is_first = self.plan.groups[at][0] == layer
        if is_first:
            hot.begin_step(handle, at, share.start, share.end)
        hot.append(handle, layer, share.start, rows[share.batch].view(torch.uint8).numpy().data)
        if is_first:
            most = min(share.end, selected.shape[1])
            plan = hot.select(handle, at, selected[share.batch, :most].tolist())
            share.places[at] = Places.of(plan)
            if self.plan.overlap:
                late = [position for position, _ in plan.misses]
                share.late[at] = torch.tensor([*late, *plan.scratch], dtype=torch.int64)

    def drafts(self, step: SparseMetadata, slots: torch.Tensor) -> tuple[Share, ...]:
        """The requests of a drafter's forward pass, in the order of the step that it follows.

        One without slots is beyond the longest length: nothing of it is written or read.
        """
        shares = []
        for number, of in enumerate(self.shares[: step.num_reqs]):
            begin, after = step.starts[number : number + 2]
            end = step.seq_lens[number]
            start = end - (after - begin)
            made = Share(of.request, of.blocks, of.table, start, end, begin, of.handle)
            made.is_draft, made.failure = True, of.failure
            if made.failure is None and bool((slots[made.batch] < 0).any()):
                made.failure = NOTHING
            shares.append(made)
        return tuple(shares)

    # Reading ----------------------------------------------------------------------------------

    def read(self, layer: int, share: Share, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of a request at positions of any shape: [..., R]; some row stands at -1."""
        read = self._decode_read if share.handle is not None else self._prefill_read
        return self._or_zeros(read, layer, share, tokens)

    def parts(self, layer: int, share: Share, tokens: torch.Tensor) -> Iterator[Part]:
        """Rows of a decoding request: those in its hot buffer, then those that are loaded.

        See `cpu_sparse.RowStore.parts`.
        """
        late = share.late.get(self._group_of[layer], tokens[:0].flatten())
        is_late = torch.isin(tokens, late)
        early = (tokens >= 0) & ~is_late
        for mine, read in ((early, self._resident), (is_late, self._decode_read)):
            some = mine.any(0)
            if bool(some.any()):
                yield self._or_zeros(read, layer, share, tokens[:, some]), mine[:, some]

    def _or_zeros(self, read: Read, layer: int, share: Share, tokens: torch.Tensor) -> torch.Tensor:
        rows = attempt(share, partial(read, layer, share, tokens))
        return rows if rows is not None else torch.zeros(*tokens.shape, self._width)

    def _prefill_read(self, layer: int, share: Share, tokens: torch.Tensor) -> torch.Tensor:
        if share.ready != layer:
            self.written.require(share.request, layer, share.table, share.end)
            share.ready = layer
        size = self.plan.region.block_tokens
        return self._region[layer][sparse_math.slots_of(share.table, tokens.clamp(min=0), size)]

    def _decode_read(self, layer: int, share: Share, tokens: torch.Tensor) -> torch.Tensor:
        if share.ready != layer:
            assert share.handle is not None
            self.hot.ready(share.handle, layer, share.places[self._group_of[layer]].plan)
            share.ready = layer
        return self._resident(layer, share, tokens)

    def _resident(self, layer: int, share: Share, tokens: torch.Tensor) -> torch.Tensor:
        """Rows that are in the hot buffer or the tile by now."""
        assert share.handle is not None
        announced = share.places[self._group_of[layer]]
        places, slots = announced.find(tokens), self.hot.layout.slots
        buffer = self.hot.buffer_of(share.handle)
        rows = self._rows(self.hot.layout.layer_offset(buffer, layer), slots)
        if not announced.plan.scratch:
            return rows[places]
        tile = self._rows(self.hot.layout.scratch_offset(buffer), self.hot.layout.scratch_rows)
        in_tile = places >= slots
        found = rows[places.masked_fill(in_tile, 0)]
        found[in_tile] = tile[places[in_tile] - slots]
        return found

    def _rows(self, offset: int, count: int) -> torch.Tensor:
        """Rows of a hot buffer or a tile, as a tensor [count, R]."""
        size = count * self.hot.layout.row_bytes
        return self._hot[offset : offset + size].view(self._dtype).view(count, self._width)


def attempt(share: Share, call: Callable[[], T]) -> T | None:
    """What `call` returns; None when its request has failed, now or before."""
    if share.failure is not None:
        return None
    try:
        return call()
    except HoleError as hole:
        code, detail = HOLE, str(hole)
    except NoHotBufferError as error:
        code, detail = NO_BUFFER, str(error)
    except DeviceError as error:
        code, detail = error.code.value, error.detail
    share.failure = Failure(code, detail, tuple(share.blocks))
    return None


class LayerRows:
    """The rows of one layer, for its attention (`cpu_sparse.RowStore`)."""

    def __init__(self, store: SparseStore, layer: int, selected: torch.Tensor) -> None:
        """Args: selected: buffer that the layer's indexer, or the one before, fills."""
        self._store = store
        self._layer = layer
        self._selected = selected
        self._device = PagedRows()

    def write(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Put the step's rows where they belong; `cache` holds them for debugging only."""
        if self._store.plan.keep_device:
            self._device.write(cache, slots, rows)
        self._store.write(self._layer, self._shares(slots), slots, rows, self._selected)

    def _shares(self, slots: torch.Tensor) -> Sequence[Share]:
        """The requests whose rows are written."""
        return self._store.shares

    def _share(self, request: int) -> Share:
        """A request whose rows are read."""
        return self._store.shares[request]

    def read(
        self, cache: torch.Tensor, step: SparseMetadata, request: int, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return the rows of a request's positions."""
        share = self._share(request)
        rows = self._store.read(self._layer, share, tokens)
        if self._store.plan.keep_device and share.failure is None:
            kept = self._device.read(cache, step, request, tokens)
            if not torch.equal(rows[tokens >= 0], kept[tokens >= 0]):
                what = f"layer {self._layer}: rows differ from those that the device keeps"
                share.failure = Failure(DIFFERS, what, tuple(share.blocks))
        return rows

    def parts(
        self, cache: torch.Tensor, step: SparseMetadata, request: int, tokens: torch.Tensor
    ) -> Iterator[Part] | None:
        """Rows of a request that decodes, in the order in which they come."""
        plan, share = self._store.plan, self._share(request)
        if not plan.overlap or plan.keep_device or share.handle is None:
            return None
        return self._store.parts(self._layer, share, tokens)


class DraftRows(LayerRows):
    """The rows of a draft layer (MTP): its forward passes follow that of a step, each of its own.

    A failure there is one of the request, and is reported with the next step.
    """

    def __init__(self, store: SparseStore, layer: int, selected: torch.Tensor, name: str) -> None:
        """Args: name: of the layer in the engine; others as `LayerRows`."""
        super().__init__(store, layer, selected)
        self._name = name
        self._drafts: tuple[Share, ...] = ()

    def write(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Put the pass's rows where they belong."""
        super().write(cache, slots, rows)
        self._pass_on()

    def read(
        self, cache: torch.Tensor, step: SparseMetadata, request: int, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return the rows of a request's positions."""
        rows = super().read(cache, step, request, tokens)
        self._pass_on()
        return rows

    def parts(
        self, cache: torch.Tensor, step: SparseMetadata, request: int, tokens: torch.Tensor
    ) -> Iterator[Part] | None:
        """Rows of a request that decodes, in the order in which they come."""
        parts = super().parts(cache, step, request, tokens)
        return self._then_pass_on(parts) if parts is not None else None

    def _then_pass_on(self, parts: Iterator[Part]) -> Iterator[Part]:
        yield from parts
        self._pass_on()

    def _shares(self, slots: torch.Tensor) -> Sequence[Share]:
        step = get_forward_context().attn_metadata[self._name]
        self._drafts = self._store.drafts(step, slots)
        return self._drafts

    def _share(self, request: int) -> Share:
        return self._drafts[request]

    def _pass_on(self) -> None:
        for draft, of in zip(self._drafts, self._store.shares, strict=False):
            if draft.failure is not NOTHING:
                of.failure = of.failure or draft.failure
