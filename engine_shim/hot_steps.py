"""Decode steps over hot buffers by native operations alone, on arrays that stay where they are.

It works on the buffers and books of a `HotBuffers`, in the place of its `append`, `select` and
`ready`. For each layer of a step, in order:

    begin_step   first layer of a group: the step's own rows get slots
    append       the layer's new rows go to the region and to their slots
    choose       first layer of a group: scores, the best rows of each query as hits and misses, the
                 misses of all queries merged, slots for them
    attend       the layer attends to what was chosen

All layers of a group miss the same rows, and know it before they are reached: once the selection is
made, a stream of the device copies these rows for one layer after the other, while the engine makes
queries and computes the layers before. There are two forms:

* ordered: a layer attends when all of its rows have come, in the order of the selection. Every bit
  is that of a run whose rows are all resident.
* overlapped: the first layer of a group, which has the least time, copies its own rows while it
  attends to those that are there, and attends to them last. Sums are formed in another order:
  results differ by rounding (TOLERANCE of `kvd_kernels.rows_reference`).

Rows that found no slot are copied to the scratch tile, which all layers share, by each layer's own
`attend`.

The books say that a missed row is in its slot from `choose` on, for all layers of the group. Until
each layer has attended that is a promise: a step that did not get there empties the group's books
when the next one begins, so that nothing is taken for resident that is not.

On the CPU the calling thread is the device's compute: it waits for copies where an accelerator's
stream would, and reads nothing back but what the operations have written to registered arrays.

One request at a time: its layers from `begin_step` of a group to the last `attend` of that group
are not mixed with another's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from engine_shim.device import Complete, Device, DeviceCode, DeviceError
from engine_shim.hot import HotBuffers, HotHandle
from engine_shim.hot_loads import RequestLoads
from engine_shim.hot_native import NativeResidency
from engine_shim.hot_requests import HotRequest
from engine_shim.hot_residency import HotStatistics
from engine_shim.sparse_ops import Floats, Ints, KeyRows, SparseOps, StepSizes
from kvd.plan.layout import RegionLayout
from kvd_kernels.rows import FIRST_MISS, NOTHING, BlockTables, Part, RowCopier, RowList

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvd_kernels._rows import Memory

AHEAD: Final = 0
"""Key of the copies ahead among the loads of the arrays that they read."""


@dataclass(slots=True)
class Ahead:
    """A host function that copies the loads of one selection for the layers that follow it.

    ends:   completes the event of each layer's copy, in the order of layers.
    spent:  nanoseconds of each copy that has ended.
    """

    copier: RowCopier
    rows: RowList
    buffer: int
    count: int
    ends: dict[int, Complete]
    spent: dict[int, int] = field(default_factory=dict)
    has_run: bool = False

    def __call__(self, failure: DeviceError | None) -> None:
        """Copy, or pass on why not. A second call does nothing: the list is another's by then."""
        if self.has_run:
            return
        self.has_run = True
        for layer, complete in self.ends.items():
            complete(failure or self._copy(layer))

    def _copy(self, layer: int) -> DeviceError | None:
        started = time.perf_counter_ns()
        try:
            self.copier.gather(self.rows, self.buffer, layer, self.count)
        except (ValueError, IndexError) as error:
            return DeviceError(DeviceCode.COPY_FAILED, f"rows of layer {layer}: {error}")
        self.spent[layer] = time.perf_counter_ns() - started
        return None


class HotSteps:
    """The native steps of one rank's requests."""

    def __init__(
        self,
        device: Device,
        hot: HotBuffers,
        region: Memory,
        layout: RegionLayout,
        memory: memoryview[int],
        keys: KeyRows,
        sizes: StepSizes,
        threads: int = 2,
    ) -> None:
        """Register everything and make the stream of copies ahead.

        Args:   hot: made for `region` and `layout`; its books are native. `memory`: its bytes.
                keys: index keys of the groups' first layers, by the region's block ids.
                threads: see SparseOps.
        Raises: ValueError naming what does not fit.
        """
        shape, groups = hot.layout, len(hot.groups)
        if shape.scratch_rows < sizes.queries * sizes.selected:
            raise ValueError(
                f"scratch_rows is {shape.scratch_rows}; give {sizes.queries * sizes.selected}: all "
                "that a step can miss"
            )
        self._hot = hot
        self._device = device
        self._blocks = np.full((shape.num_buffers, layout.num_blocks), -1, np.int32)
        self._written = np.zeros((shape.num_buffers, layout.num_layers), np.int64)
        self._keys_written = np.zeros((shape.num_buffers, groups), np.int64)
        tables, key_tables = (
            BlockTables(
                self._blocks,
                written,
                block_tokens=layout.block_tokens,
                num_blocks=layout.num_blocks,
            )
            for written in (self._written, self._keys_written)
        )
        part = Part(
            region,
            0,
            layout.layer_bytes,
            layout.block_tokens * layout.row_bytes,
            layout.row_bytes,
            memory,
            0,
            shape.buffer_bytes,
            shape.layer_bytes,
            shape.row_bytes,
            shape.num_layers * shape.layer_bytes,
        )
        self._copier = RowCopier(
            tables, [part], num_slots=shape.slots, scratch_rows=shape.scratch_rows
        )
        self.ops: Final = SparseOps(sizes, self._copier, key_tables, keys, threads=threads)
        self._bytes = np.frombuffer(memory, np.uint8)
        self._make_lists(sizes, layout.row_bytes)
        self._lists = RequestLoads("copies ahead", hot.options.timeout_ns, lambda _: None)
        self._running: tuple[int, int] | None = None
        self._ahead: Ahead | None = None
        self._scratch_only = self._ordered = False
        self._stream = device.stream("hot-ahead")

    def _make_lists(self, sizes: StepSizes, row_bytes: int) -> None:
        """Make the arrays of the step's own rows, of copies ahead, and what is looked at often."""
        own, most, step = sizes.queries, sizes.queries * sizes.selected, self.ops.step
        self._own_positions, self._own_slots = np.zeros(own, np.int32), np.zeros(own, np.int32)
        self._own_rows = np.zeros((own, row_bytes), np.uint8)
        self._own = RowList(self._own_positions, self._own_slots, [self._own_rows])
        self._ahead_positions = np.zeros(most, np.int32)
        self._ahead_slots = np.zeros(most, np.int32)
        self._ahead_rows = RowList(self._ahead_positions, self._ahead_slots)
        self._used = np.zeros(self._hot.layout.slots, np.bool_)
        self._winners = _ints(step.winners)
        self._references, self._places = _ints(step.references), _ints(step.places)
        self._missed = _ints(step.positions)
        self._loads = (_ints(step.load_positions), _ints(step.load_slots))
        self._scratch = _ints(step.scratch)

    def begin_step(self, handle: HotHandle, group: int, start: int, end: int) -> None:
        """Begin a step that writes rows [start, end) of the group's layers; see `HotBuffers`.

        Raises: also ValueError for more rows than a step has queries.
        """
        if end - start > self.ops.sizes.queries:
            raise ValueError(
                f"a step has {end - start} rows; give {self.ops.sizes.queries} at most"
            )
        request = self._hot.lent(handle)
        if request.unread[group]:
            request.books[group].reset()
        self._hot.begin_step(handle, group, start, end)
        request.unread[group] = set(self._hot.groups[group])
        self._running = (handle.epoch, group)
        blocks = self._blocks[request.buffer]
        blocks[: len(request.blocks)] = request.blocks
        blocks[len(request.blocks) :] = -1
        count, books = end - start, self._books(request, group)
        self._own_positions[:count] = np.arange(start, end, dtype=np.int32)
        self.ops.selection[0, :count] = self._own_positions[:count]
        self.ops.step.counts[0] = count
        self.ops.step.lookup(books.tables, books.table, 0)
        self._own_slots[:count] = self._winners[0, :count]

    def append(self, handle: HotHandle, layer: int, start: int, rows: NDArray[np.uint8]) -> None:
        """Write all rows of the running step into the region and into their slots.

        Args:   rows: [T, row_bytes] bytes of the step's positions.
        Raises: ValueError for other rows than the step's; nothing changes then.
        """
        count = len(rows)
        request = self._hot.check_append(handle, layer, start, start + count)
        group = self._running_group(handle, layer)
        if request.steps[group] != range(start, start + count):
            raise ValueError(
                f"{count} rows are given; give those of {request.steps[group]} at once"
            )
        if self._hot.options.writes_region:
            self._own_rows[:count] = rows
            self._written[request.buffer, layer] = request.written.end(layer)
            self._copier.append(self._own, request.buffer, layer, count)
        else:
            slots = self._own_slots[:count]
            shape = self._hot.layout
            base = shape.layer_offset(request.buffer, layer)
            hot = self._bytes[base : base + shape.slots * shape.row_bytes]
            hot.reshape(shape.slots, shape.row_bytes)[slots[slots >= 0]] = rows[slots >= 0]
        request.written.add(layer, start, start + count)

    def choose(
        self,
        handle: HotHandle,
        group: int,
        queries: Floats,
        weights: Floats,
        *,
        ordered: bool = True,
    ) -> None:
        """Select for the step's queries, place what is missed, begin to copy it.

        The first layer's rows and the index keys of the step are written.

        Args:   queries: [T, index_heads, index_floats]; weights: [T, index_heads].
                ordered: which form the layers attend in.
        Raises: ValueError for scores that are not numbers; HoleError for a row never written;
                DeviceError when copies cannot start: the group's buffer is empty then.
        """
        layers = self._hot.groups[group]
        self._running_group(handle, layers[0])
        request = self._hot.lent(handle)
        meter = request.meters[group]
        start, count = request.steps[group].start, len(request.steps[group])
        if len(queries) != count:
            raise ValueError(f"queries has {len(queries)} positions; give the {count} of the step")
        for layer in layers:
            self._written[request.buffer, layer] = request.written.end(layer)
        self._keys_written[request.buffer, group] = request.written.end(layers[0])
        self.ops.score(queries, weights, request.buffer, group, start)
        self._lists.settle((AHEAD,))
        with meter.managing():
            missed = self._find(request, group, start, count)
            distinct = self.ops.step.merge_misses(count)
            books = self._books(request, group)
            self.ops.step.assign(books.tables, books.table)
            self._count(request, group, count, distinct)
            self._ordered = ordered
            (self._place_scratch if ordered else self._place_misses)(request.buffer, count)
        meter.merged_misses += missed - distinct
        self._copy_ahead(request, layers if ordered else layers[1:])

    def attend(self, handle: HotHandle, layer: int, queries: Floats) -> Floats:
        """Attend to what was chosen.

        Args:    queries: [T, heads, row_floats] float32, scaled.
        Returns: [T, heads, value_floats], a view that the next call overwrites.
        Raises:  DeviceError of a copy that failed, or did not end in time: the group's buffer is
                 empty then. HoleError for a row never written.
        """
        group = self._running_group(handle, layer)
        request = self._hot.lent(handle)
        meter = request.meters[group]
        count = len(request.steps[group])
        if len(queries) != count:
            raise ValueError(f"queries has {len(queries)} positions; give the {count} of the step")
        if layer != self._hot.groups[group][0] and not self._scratch_only:
            self._place_scratch(request.buffer, count)
        with meter.waiting():
            request.loads.end(layer)
        output = self.ops.attend(layer, queries, ordered=self._ordered)
        request.unread[group].discard(layer)
        if meter.is_sampled:
            times = self.ops.attention.statistics()
            meter.waited_ns += times.wait
            meter.copied_ns += times.copy
            meter.copied_ns += self._ahead.spent.pop(layer, 0) if self._ahead is not None else 0
        return output

    def close(self, timeout_ns: int) -> None:
        """End the copies; raises as `Stream.close`. Arrays live as long as this object."""
        self._stream.close(timeout_ns)

    def _running_group(self, handle: HotHandle, layer: int) -> int:
        group = self._hot.group_of[layer]
        if self._running != (handle.epoch, group) or not self._hot.lent(handle).steps[group]:
            raise ValueError(
                f"layer {layer} of {handle} has no running step, or another request's came "
                "between; begin a step and finish it"
            )
        return group

    def _books(self, request: HotRequest, group: int) -> NativeResidency:
        books = request.books[group]
        assert isinstance(books, NativeResidency), "steps by native operations need native books"
        return books

    def _find(self, request: HotRequest, group: int, start: int, count: int) -> int:
        """Select for each query; returns the misses of all, before they are merged."""
        books, step, k = self._books(request, group), self.ops.step, self.ops.sizes.selected
        missed = sum(
            step.lim(books.tables, books.table, query, start + query + 1, k)
            for query in range(count)
        )
        if self._hot.options.track_rows:
            counts = step.counts.tolist()
            given = [self.ops.selection[query, : counts[query]].tolist() for query in range(count)]
            with self._hot.counting_holes():
                request.require(self._hot.groups[group], group, given, True)
        return missed

    def _count(self, request: HotRequest, group: int, count: int, distinct: int) -> None:
        """Count what was selected, and the hits: the books count neither, see `Counts`."""
        given = self.ops.step.counts.tolist()[:count]
        for query, number in enumerate(given):
            winners = self._winners[query, :number]
            self._used[winners[winners >= 0]] = True
        hits = int(np.count_nonzero(self._used))
        self._used[:] = False
        selected = sum(given)
        merged = selected - hits - distinct
        counted = HotStatistics(selected=selected, merged=merged, hits=hits)
        request.beside[group] += counted

    def _place_misses(self, buffer: int, count: int) -> None:
        """Say where rows are to a layer that copies all misses itself."""
        ops, missed = self.ops, int(self.ops.step.figures[0])
        ops.items[0] = (buffer, count, missed)
        ops.miss_positions[0, :missed] = self._missed[:missed]
        ops.miss_slots[0, :missed] = self._places[:missed]
        for query, number in enumerate(ops.step.counts.tolist()[:count]):
            winners, places = self._winners[query, :number], ops.places[0, query]
            references = self._references[query, :number]
            places[:number] = np.where(references >= 0, FIRST_MISS - references, winners)
            places[number:] = NOTHING
        self._scratch_only = False

    def _place_scratch(self, buffer: int, count: int) -> None:
        """Say it to a layer whose loads come into their slots: the scratch tile is its to fill."""
        ops, slots = self.ops, self._hot.layout.slots
        missed, _, scratch, _ = ops.step.figures.tolist()
        ops.items[0] = (buffer, count, scratch)
        ops.miss_positions[0, :scratch] = self._scratch[:scratch]
        ops.miss_slots[0, :scratch] = np.arange(slots, slots + scratch, dtype=np.int32)
        found = self._places[: max(1, missed)]
        found = np.where(found < slots, found, FIRST_MISS - (found - slots))
        for query, number in enumerate(ops.step.counts.tolist()[:count]):
            winners, places = self._winners[query, :number], ops.places[0, query]
            references = self._references[query, :number]
            # A hit's reference is -1: what is found there is thrown away.
            places[:number] = np.where(references >= 0, found[references], winners)
            places[number:] = NOTHING
        self._scratch_only = True

    def _copy_ahead(self, request: HotRequest, layers: Sequence[int]) -> None:
        """Begin to copy the selection's loads for these layers of its group."""
        count = int(self.ops.step.figures[1])
        self._ahead = None
        if not count or not layers:
            return
        self._ahead_positions[:count] = self._loads[0][:count]
        self._ahead_slots[:count] = self._loads[1][:count]
        events = {layer: self._device.event() for layer in layers}
        ends = {layer: event.arm() for layer, event in events.items()}
        self._ahead = Ahead(self._copier, self._ahead_rows, request.buffer, count, ends)
        try:
            self._stream.launch_host(self._ahead)
        except DeviceError:
            request.books[self._hot.group_of[layers[0]]].reset()
            raise
        for layer, event in events.items():
            request.loads.add(layer, event)
        self._lists.add(AHEAD, events[layers[-1]])


def _ints(array: memoryview[int]) -> Ints:
    """Look at a registered array of the books; who may write it, the array says."""
    return np.asarray(array)
