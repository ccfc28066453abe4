"""Decode with the main rows in host memory: a `KvCache` over hot buffers.

Main rows are in a region of host memory, where a hand-off lands those of the prompt. On the device
are the index keys of all tokens, and a hot buffer for each request. There are two ways to read:

* native, `NativeHotCache`: scores, selection, row copies and attention are native operations on
  arrays that stay where they are (`engine_shim.hot_steps`). In the ordered form a step gives, bit
  for bit, what it gives over a `NativeResidentCache`; overlapped, within the tolerance of
  `kvd_kernels.rows_reference`.
* in torch, `HotCache`: what a layer reads is gathered from the hot buffer and the scratch tile, and
  is bit for bit what a `ResidentCache` would give.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine_shim.device import Device, DeviceMemory
from engine_shim.device_memory import mapping_of
from engine_shim.hot import HotBuffers, HotFigures, HotOptions
from engine_shim.hot_places import Places
from engine_shim.hot_steps import HotSteps
from engine_shim.reference.cache import BlockTable, PagedView
from engine_shim.reference.config import ModelConfig
from engine_shim.reference.indexer import IndexQueries
from engine_shim.reference.layouts import rows_tensor
from engine_shim.reference.native_reads import step_sizes
from engine_shim.sparse_ops import KeyRows, StepSizes
from kvd.plan.layout import RegionLayout
from kvd_kernels.host import Mapping


def region_layout(config: ModelConfig, num_blocks: int, block_tokens: int) -> RegionLayout:
    """Where the main rows of this model are in a decode region."""
    return RegionLayout(config.num_layers, num_blocks, block_tokens, config.main_row_bytes)


class HotStore:
    """What the requests of one rank share: hot buffers, index keys, and both as tensors."""

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        region: Mapping,
        layout: RegionLayout,
        *,
        slots: int,
        num_buffers: int,
        max_step_tokens: int,
        index_memory: DeviceMemory,
        writes_region: bool = True,
        timeout_ns: int = 10_000_000_000,
        track_rows: bool = False,
        native: bool = True,
        num_heads: int | None = None,
    ) -> None:
        """Allocate the hot buffers.

        Args:   device: one whose memory is mapped here.
                region, layout: host memory of the main rows; see `region_layout`.
                slots: rows of a hot buffer in each layer, at least max_step_tokens.
                num_buffers: requests that can decode at a time.
                max_step_tokens: tokens of one forward at most.
                index_memory: the index keys, [indexer layer][block][row]; the caller's.
                writes_region: whether this rank writes main rows into the region (rank 0).
                timeout_ns: longest wait for rows.
                track_rows: for debugging, note each row that is written.
                native: read by native operations, not in torch.
                num_heads: query heads of this rank; None for all.
        Raises: ValueError naming the argument.
        """
        fitting = region_layout(config, layout.num_blocks, layout.block_tokens)
        if layout != fitting:
            raise ValueError(f"layout is {layout}; give {fitting} for this model")
        if not 1 <= max_step_tokens <= slots:
            raise ValueError(f"max_step_tokens is {max_step_tokens}; give 1 to slots ({slots})")
        sizes = None
        if native:
            context = min(layout.num_blocks * layout.block_tokens, config.max_positions)
            sizes = step_sizes(config, width=max_step_tokens, num_heads=num_heads, context=context)
        index_view = mapping_of("index_memory", index_memory).view()
        self._index = _index_tensors(config, layout, index_view)
        groups = [
            [it for it in range(config.num_layers) if config.index_layer_of(it) == first]
            for first in config.index_layers
        ]
        options = HotOptions(
            slots=slots,
            scratch_rows=max_step_tokens * config.index_topk,
            num_buffers=num_buffers,
            timeout_ns=timeout_ns,
            track_rows=track_rows,
            writes_region=writes_region,
        )
        self.config = config
        self.region_layout = layout
        self.max_step_tokens = max_step_tokens
        self.hot = HotBuffers(device, region, layout, groups, options)
        self._hot_view: memoryview | None = mapping_of("device", self.hot.memory).view()
        self._timeout_ns = timeout_ns
        self._steps: HotSteps | None = None
        if sizes is not None:
            self._steps = self._make_steps(device, region, index_view, sizes)

    def _make_steps(
        self,
        device: Device,
        region: Mapping,
        index_view: memoryview,
        sizes: StepSizes,
    ) -> HotSteps:
        """Register all for native steps."""
        config, layout = self.config, self.region_layout
        tokens, row_bytes = layout.num_blocks * layout.block_tokens, config.index_row_bytes
        assert self._hot_view is not None
        return HotSteps(
            device,
            self.hot,
            region.view(),
            layout,
            self._hot_view,
            KeyRows(index_view, tokens * row_bytes, layout.block_tokens * row_bytes, row_bytes),
            sizes,
        )

    def open(self, request: str, blocks: Sequence[int] = (), *, ordered: bool = True) -> HotCache:
        """Make the cache of a new request, without rows.

        Args:   blocks: region blocks of its tokens, in token order.
                ordered: a layer attends when its missing rows have come, so that every bit is that
                of the resident run; otherwise some are copied meanwhile. Native reads alone.
        Raises: NoHotBufferError; ValueError for a block outside the region.
        """
        if self._steps is None:
            return HotCache(self, request, blocks)
        return NativeHotCache(self, request, blocks, ordered=ordered)

    @property
    def steps(self) -> HotSteps:
        """Native steps. Raises: ValueError when there are none, or the store is closed."""
        if self._steps is None:
            raise ValueError("the store has no native steps; make it with native, and use it open")
        return self._steps

    def index_rows(self, layer: int) -> Tensor:
        """Stored index keys of an indexer layer: [num_blocks * block_tokens, index_elements]."""
        return self._index[layer]

    def hot_rows(self, buffer: int, layer: int) -> Tensor:
        """Rows of a layer in a hot buffer: [slots, row_dim]."""
        return self._rows(self.hot.layout.layer_offset(buffer, layer), self.hot.layout.slots)

    def scratch_rows(self, buffer: int) -> Tensor:
        """Rows of a scratch tile: [max_step_tokens * index_topk, row_dim]."""
        layout = self.hot.layout
        return self._rows(layout.scratch_offset(buffer), layout.scratch_rows)

    def statistics(self) -> HotFigures:
        """Return what the hot buffers did so far."""
        return self.hot.statistics()

    def figures(self) -> dict[str, float]:
        """Return the statistics as named figures: `hot_hits`, `hot_misses`, ..."""
        return self.statistics().named()

    def close(self) -> None:
        """Give the hot buffers back. Raises: BufferError while tensors of them are in use."""
        if self._steps is not None:
            self._steps.close(self._timeout_ns)
        self._index, self._steps = {}, None
        self._hot_view = None  # a tensor that is still in use keeps its memory mapped
        self.hot.shut()

    def _rows(self, offset: int, num_rows: int) -> Tensor:
        if self._hot_view is None:
            raise ValueError("the hot buffers are closed")
        row_bytes = self.hot.layout.row_bytes
        return rows_tensor(self._hot_view, offset, num_rows, row_bytes, self.config.dtype)


def _index_tensors(
    config: ModelConfig, layout: RegionLayout, view: memoryview
) -> dict[int, Tensor]:
    """Return the index keys by layer. Raises: ValueError when the memory is too small."""
    rows, row_bytes = layout.num_blocks * layout.block_tokens, config.index_row_bytes
    needed = len(config.index_layers) * rows * row_bytes
    if len(view) < needed:
        raise ValueError(f"index_memory has {len(view)} bytes; give {needed}")
    return {
        layer: rows_tensor(view, at * rows * row_bytes, rows, row_bytes, config.index_storage)
        for at, layer in enumerate(config.index_layers)
    }


class HotCache:
    """`KvCache` of one decoding request; see `cache.py` for the calls. Made by `HotStore.open`."""

    def __init__(self, store: HotStore, request: str, blocks: Sequence[int]) -> None:
        """Take a hot buffer; arguments and errors as `HotStore.open`."""
        config, layout = store.config, store.region_layout
        self._store = store
        self._hot = store.hot
        self._handle = store.hot.open(request, blocks)
        self._table = BlockTable(layout.block_tokens, layout.num_blocks)
        self._table.append(blocks)
        self._group = [
            config.index_layers.index(config.index_layer_of(layer))
            for layer in range(config.num_layers)
        ]
        self._selected: dict[int, Places] = {}
        self._ready_layer = -1

    def extend(self, blocks: Sequence[int]) -> None:
        """Add region blocks behind the last one."""
        self._hot.extend(self._handle, blocks)
        self._table.append(blocks)

    def landed(self, num_tokens: int) -> None:
        """Take note that a hand-off has brought all rows of positions [0, num_tokens)."""
        for layer in range(self._store.config.num_layers):
            start = self._hot.num_rows(self._handle, layer)
            if start < num_tokens:
                self._hot.landed(self._handle, layer, start, num_tokens)

    def land(self, layer: int, positions: Tensor, main: Tensor, index: Tensor | None) -> None:
        """Bring rows of the prompt, in the place of a hand-off: region and index keys, not hot.

        Args: as `write`, any number of tokens.
        """
        self._hot.land(self._handle, layer, int(positions[0]), _bytes_of(main))
        if index is not None:
            PagedView(self._store.index_rows(layer), self._table).write(positions, index)

    def begin_layer(self, layer: int) -> None:
        """Wait for nothing: a layer's hot buffer is its own."""
        self._ready_layer = -1

    def write(self, layer: int, positions: Tensor, main: Tensor, index: Tensor | None) -> None:
        """Store the step's rows: in the region, and in their hot slots.

        Raises: ValueError for more than max_step_tokens, a gap, or rows beyond the blocks.
        """
        count, start = self._check_step(positions), int(positions[0])
        if index is not None:
            self._hot.begin_step(self._handle, self._group[layer], start, start + count)
            PagedView(self._store.index_rows(layer), self._table).write(positions, index)
        self._hot.append(self._handle, layer, start, _bytes_of(main))

    def _check_step(self, positions: Tensor) -> int:
        """Return how many positions there are. Raises: ValueError for too many."""
        count = positions.shape[0]
        if count > self._store.max_step_tokens:
            raise ValueError(
                f"{count} tokens are in one step; give {self._store.max_step_tokens} at most "
                "(max_step_tokens), and prefill elsewhere"
            )
        return count

    def end_write(self, layer: int) -> None:
        """Do nothing: the rows are where they stay."""

    def index_keys(self, layer: int, num_tokens: int) -> Tensor:
        """Return a copy of the index keys of positions [0, num_tokens)."""
        written = self._hot.num_rows(self._handle, layer)
        if num_tokens > written:
            raise ValueError(
                f"layer {layer}: position {num_tokens - 1} is read but only {written} positions "
                "are written"
            )
        return PagedView(self._store.index_rows(layer), self._table).prefix(num_tokens)

    def selected(self, layer: int, positions: Tensor) -> None:
        """Start to load what the hot buffer lacks, for all layers that follow this selection."""
        group = self._group[layer]
        plan = self._hot.select(self._handle, group, positions.tolist())
        self._selected[group] = Places.of(plan)

    def gather(self, layer: int, selected: Tensor) -> Tensor:
        """Return a copy of the selected rows; some row stands at -1."""
        announced = self._selected[self._group[layer]]
        places = announced.find(selected).flatten()
        if self._ready_layer != layer:
            self._hot.ready(self._handle, layer, announced.plan)
            self._ready_layer = layer
        buffer, slots = self._hot.buffer_of(self._handle), self._hot.layout.slots
        in_scratch = places >= slots
        hot = self._store.hot_rows(buffer, layer)
        rows = hot.index_select(0, places.masked_fill(in_scratch, 0))
        if announced.plan.scratch:
            scratch = self._store.scratch_rows(buffer)
            rows[in_scratch] = scratch.index_select(0, places[in_scratch] - slots)
        return rows.view(*selected.shape, -1)

    def end_layer(self, layer: int) -> None:
        """Do nothing: what is hot stays hot."""

    def truncate(self, num_tokens: int) -> None:
        """Void the rows at positions >= num_tokens."""
        self._hot.truncate(self._handle, num_tokens)

    def preempt(self) -> None:
        """Give the hot buffer up; the rows stay in the region."""
        self._hot.preempt(self._handle)
        self._selected = {}

    def resume(self) -> None:
        """Take an empty hot buffer. Raises: NoHotBufferError."""
        self._hot.resume(self._handle)

    def close(self) -> None:
        """End the request."""
        self._hot.close(self._handle)
        self._selected = {}


class NativeHotCache(HotCache):
    """The same, read natively (`NativeReads`)."""

    def __init__(
        self, store: HotStore, request: str, blocks: Sequence[int], *, ordered: bool
    ) -> None:
        """Arguments and errors as `HotStore.open`."""
        super().__init__(store, request, blocks)
        self._ordered = ordered

    def write(self, layer: int, positions: Tensor, main: Tensor, index: Tensor | None) -> None:
        """Store the step's rows; see `HotCache`."""
        count, start = self._check_step(positions), int(positions[0])
        steps = self._store.steps
        if index is not None:
            steps.begin_step(self._handle, self._group[layer], start, start + count)
            PagedView(self._store.index_rows(layer), self._table).write(positions, index)
        steps.append(self._handle, layer, start, main.contiguous().view(torch.uint8).numpy())

    def choose(self, layer: int, queries: IndexQueries) -> None:
        """Select, and start to load what the hot buffer lacks; see `NativeReads`."""
        self._store.steps.choose(
            self._handle,
            self._group[layer],
            queries.query.numpy(),
            queries.weight.numpy(),
            ordered=self._ordered,
        )

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """Attend while rows are loaded; see `NativeReads`."""
        output = self._store.steps.attend(self._handle, layer, queries.numpy())
        return torch.from_numpy(output)


def _bytes_of(rows: Tensor) -> memoryview:
    """Look at rows [T, R] as bytes."""
    return rows.contiguous().view(torch.uint8).numpy().data
