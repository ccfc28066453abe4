"""Hot buffers: the rows that decode selects again and again, kept on the device.

All rows of a request are in the host region. Its hot buffer holds `slots` of them in each layer;
what a step selects beyond those is loaded. For each layer of a step, in order:

    begin_step   first layer of a group: the step's own rows get slots
    append       the layer's new rows go to the region and to their slots
    select       first layer of a group: hits stay, misses get slots and their loads start, for all
                 layers of the group at once; what finds no slot will go to the scratch tile
    ready        before the rows are read: loads have ended, the scratch tile is filled

A *group* is an indexer layer and the layers that follow its selection. Who is who: a request is
named by an epoch that is given out once, so that no other request, not even one of the same name,
ever reads its rows. A hot buffer is lent to one request at a time. It is lent again only when no
copy into it runs any more: one with loads in flight is *parked* until they have ended.

A load that fails empties the group's books, so that no row is taken for resident that is not, and
is raised. Nothing here hides a failure: reading a row that was never written is a HoleError.

One thread, bound to the device, calls all of this.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from engine_shim.device import Device, DeviceError, DeviceMemory, Event, Stream
from engine_shim.hot_counts import HotCounts
from engine_shim.hot_lending import BufferLender, NoHotBufferError
from engine_shim.hot_loads import SCRATCH, RequestLoads
from engine_shim.hot_meter import GroupFigures, together
from engine_shim.hot_region import RegionRows, UntrackedLoadError
from engine_shim.hot_requests import HotRequest
from engine_shim.hot_residency import ABSENT, HotStatistics, Plan, Residency
from engine_shim.hot_rows import HoleError, HotLayout, WrittenRows, row_view
from engine_shim.hot_types import HotFigures, HotHandle, HotOptions
from kvd.plan.layout import RegionLayout
from kvd_kernels.host import Mapping

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "GroupFigures",
    "HoleError",
    "HotBuffers",
    "HotFigures",
    "HotHandle",
    "HotLayout",
    "HotOptions",
    "HotStatistics",
    "NoHotBufferError",
    "Plan",
]


class HotBuffers(HotCounts):
    """The hot buffers of one rank."""

    def __init__(
        self,
        device: Device,
        region: Mapping,
        layout: RegionLayout,
        groups: Sequence[Sequence[int]],
        options: HotOptions,
    ) -> None:
        """Allocate the buffers.

        Args:   region: host memory of all rows, written here and by whoever lands rows.
                layout: where rows are in it.
                groups: for each group its layers, ascending; each layer in one group.
        Raises: ValueError naming the argument; DeviceError when memory is short.
        """
        layers = [layer for group in groups for layer in group]
        ascending = all(group and list(group) == sorted(group) for group in groups)
        if not ascending or sorted(layers) != list(range(layout.num_layers)):
            raise ValueError(
                f"groups is {groups}; give each of the {layout.num_layers} layers in one group, "
                "ascending"
            )
        self.layout: Final = HotLayout(
            options.num_buffers,
            layout.num_layers,
            options.slots,
            options.scratch_rows,
            layout.row_bytes,
        )
        self.groups: Final = tuple(tuple(group) for group in groups)
        self.memory: Final[DeviceMemory] = device.alloc(self.layout.num_bytes, "hot")
        try:
            self._region = RegionRows(device, region, layout)
        except (ValueError, DeviceError):
            self.memory.close()
            raise
        self.group_of: Final = {layer: at for at, group in enumerate(groups) for layer in group}
        self.options: Final = options
        super().__init__(BufferLender(options.num_buffers), len(groups))
        self._device = device
        self._epochs = itertools.count(1)
        self._books: dict[int, list[Residency]] = {}

    def open(self, request: str, blocks: Sequence[int] = ()) -> HotHandle:
        """Lend a hot buffer to a new request, without rows.

        Args:   blocks: region blocks of the request's tokens, in token order.
        Raises: NoHotBufferError; ValueError for a block outside the region.
        """
        self._region.check_blocks(blocks)
        track = self.options.track_rows
        written = WrittenRows(request, self.layout.num_layers, track_rows=track)
        made = HotRequest(request, list(blocks), written, len(self.groups))
        self._lend(made)
        handle = HotHandle(request, next(self._epochs))
        self._requests[handle.epoch] = made
        return handle

    def extend(self, handle: HotHandle, blocks: Sequence[int]) -> None:
        """Add region blocks behind the request's last one. ValueError outside the region."""
        request = self._find(handle)
        self._region.check_blocks(blocks)
        request.blocks.extend(blocks)

    def preempt(self, handle: HotHandle) -> None:
        """Take the request's hot buffer away; its rows stay in the region. Idempotent."""
        self._give_back(self._find(handle))

    def resume(self, handle: HotHandle) -> None:
        """Lend an empty hot buffer to a preempted request. Raises: NoHotBufferError."""
        request = self._find(handle)
        if request.buffer == ABSENT:
            self._lend(request)

    def close(self, handle: HotHandle) -> None:
        """End the request; its handle is void. Its region blocks stay the engine's to free."""
        request = self._find(handle)
        self._give_back(request)
        self._past = list(map(together, self._past, request.figures()))
        del self._requests[handle.epoch]

    def buffer_of(self, handle: HotHandle) -> int:
        """Return the index of the request's hot buffer. Raises: ValueError while preempted."""
        return self.lent(handle).buffer

    def slot_of(self, handle: HotHandle, group: int, position: int) -> int:
        """Return the slot of a row in the layers of a group, -1 when it is absent."""
        return self.lent(handle).books[group].slot_of(position)

    def num_rows(self, handle: HotHandle, layer: int) -> int:
        """Return the first position of a layer that no row was written at or beyond."""
        return self._find(handle).written.end(layer)

    def landed(self, handle: HotHandle, layer: int, start: int, end: int) -> None:
        """Take note that rows [start, end) of a layer were written into the region by others.

        Raises: HoleError for a gap before `start`; DeviceError when loads do not end.
        """
        request = self._find(handle)
        self._region.check_range(request.blocks, start, end)
        with self.counting_holes():
            request.written.check_writable(layer, start)
        if request.books:
            group = self.group_of[layer]
            request.loads.settle((*self.groups[group], SCRATCH))
            request.books[group].invalidate_from(start)
        request.written.add(layer, start, end)

    def land(self, handle: HotHandle, layer: int, start: int, rows: Buffer) -> None:
        """Write rows from `start` on into the region, in the place of a hand-off.

        Args: rows: [T, row_bytes] bytes, C-contiguous. Raises: as `landed`.
        """
        request, view = self._find(handle), row_view(rows, self.layout.row_bytes)
        end = start + len(view) // self.layout.row_bytes
        self.landed(handle, layer, start, end)
        self._region.write(request.blocks, layer, start, view)

    def begin_step(self, handle: HotHandle, group: int, start: int, end: int) -> None:
        """Begin a step that writes rows [start, end) of the group's layers.

        Raises: ValueError for rows beyond the blocks; HoleError for a gap before `start`;
                DeviceError(timeout) when loads of an earlier step do not end.
        """
        request = self.lent(handle)
        self._region.check_range(request.blocks, start, end)
        if end - start > self.layout.slots and not self.options.writes_region:
            raise ValueError(
                f"a step writes {end - start} rows but slots is {self.layout.slots}; give a step "
                "fewer, or let this rank write the region"
            )
        with self.counting_holes():
            for layer in self.groups[group]:
                request.written.check_writable(layer, start)
        request.loads.settle(self.groups[group])
        meter = request.meters[group]
        meter.begin()
        with meter.managing():
            request.books[group].begin_step()
            request.books[group].admit(start, end)
        request.steps[group] = range(start, end)

    def append(self, handle: HotHandle, layer: int, start: int, rows: Buffer) -> None:
        """Write rows of the running step into the region and into their slots.

        Args:   rows: [T, row_bytes] bytes of positions [start, start + T), C-contiguous.
        Raises: ValueError for rows that are not the step's; nothing changes then.
        """
        row_bytes = self.layout.row_bytes
        view = row_view(rows, row_bytes)
        end = start + len(view) // row_bytes
        request = self.check_append(handle, layer, start, end)
        if self.options.writes_region:
            self._region.write(request.blocks, layer, start, view)
        books, base = request.books, self.layout.layer_offset(request.buffer, layer)
        for at, position in enumerate(range(start, end)):
            slot = books[self.group_of[layer]].slot_of(position)
            if slot != ABSENT:
                row = view[at * row_bytes : (at + 1) * row_bytes]
                self.memory.write_bytes(base + slot * row_bytes, row)
        request.written.add(layer, start, end)

    def check_append(self, handle: HotHandle, layer: int, start: int, end: int) -> HotRequest:
        """Return the request if rows [start, end) of a layer may be written now.

        Raises: ValueError for rows that are not the step's; HoleError for a gap before them.
        """
        request = self.lent(handle)
        step = request.steps[self.group_of[layer]]
        if start < step.start or end > step.stop:
            raise ValueError(
                f"rows [{start}, {end}) of layer {layer} are not of the running step "
                f"[{step.start}, {step.stop}); begin a step with them"
            )
        with self.counting_holes():
            request.written.check_writable(layer, start)
        return request

    def select(self, handle: HotHandle, group: int, selections: Iterable[Sequence[int]]) -> Plan:
        """Place what the step's queries selected, and start to load what is missing.

        Args:   selections: for each query its positions; -1 is padding. Merged and deduplicated.
        Raises: HoleError for a row never written, ValueError for a position out of range or
                without a step: nothing changes then. ValueError when the scratch tile is too small,
                DeviceError when loads cannot start: the group's buffer is empty then.
        """
        request = self.lent(handle)
        given = [list(selection) for selection in selections]
        if not request.steps[group]:
            raise ValueError(f"group {group} has no step; call begin_step before select")
        with self.counting_holes():
            request.require(self.groups[group], group, given, self.options.track_rows)
        books = request.books[group]
        with request.meters[group].managing():
            plan = books.select(given)
        if len(plan.scratch) > self.options.scratch_rows:
            books.reset()
            raise ValueError(
                f"{len(plan.positions)} rows are selected but slots ({self.options.slots}) and "
                f"scratch_rows ({self.options.scratch_rows}) hold fewer; raise one of them"
            )
        try:
            for layer in self.groups[group] if plan.misses else ():
                base = self.layout.layer_offset(request.buffer, layer)
                self._load(request, layer, layer, plan.misses, base)
        except DeviceError:
            books.reset()
            raise
        return plan

    def load_event(self, handle: HotHandle, layer: int) -> Event | None:
        """Return the event behind the layer's loads, for a stream to wait on; None without."""
        return self.lent(handle).loads.event(layer)

    def ready(
        self, handle: HotHandle, layer: int, plan: Plan, stream: Stream | None = None
    ) -> None:
        """Wait until the plan's rows of a layer can be read; fills the scratch tile.

        The tile is the layer's until `ready` of the next one.

        Args:   stream: waits in the caller's place: then a forward has no wait of the host. What
                    reads the rows is submitted to it before the next `ready`, and a load that fails
                    is a failure of the stream; the next step starts with an empty buffer then. The
                    caller waits for the stream before it begins that, or takes the buffer away.
        Raises: DeviceError of a load that failed: the group's buffer is empty then.
                DeviceError(timeout) after timeout_ns; HoleError for a scratch row never written.
        """
        request = self.lent(handle)
        self._await(request, layer, layer, stream)
        if not plan.scratch:
            return
        with self.counting_holes():
            request.written.require(layer, plan.scratch)
        read: Event | None = None
        if stream is None:
            request.loads.settle((SCRATCH,))
        else:
            read = self._device.event()
            stream.record(read)
        rows = [(position, at) for at, position in enumerate(plan.scratch)]
        tile = self.layout.scratch_offset(request.buffer)
        self._load(request, SCRATCH, layer, rows, tile, read)
        self._await(request, SCRATCH, layer, stream)

    def _await(self, request: HotRequest, key: int, layer: int, stream: Stream | None) -> None:
        if stream is not None:
            request.loads.hold(key, stream)
            return
        with request.meters[self.group_of[layer]].waiting():
            request.loads.end(key)

    def truncate(self, handle: HotHandle, num_tokens: int) -> None:
        """Void the rows at positions >= num_tokens: they belong to rejected drafts."""
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}; give 0 or more")
        request = self._find(handle)
        for books in request.books:
            books.invalidate_from(num_tokens)
        request.steps = [range(it.start, min(it.stop, num_tokens)) for it in request.steps]
        request.written.truncate(num_tokens)

    def shut(self) -> None:
        """Close the stream and give the memory back. Raises: DeviceError, BufferError as those."""
        self._region.close(self.options.timeout_ns)
        self.memory.close()

    def lent(self, handle: HotHandle) -> HotRequest:
        """Return a request with its buffer and books. Raises: ValueError while it is preempted."""
        found = self._find(handle)
        if found.buffer == ABSENT:
            raise ValueError(f"{handle} is preempted; resume it first")
        return found

    def _lend(self, request: HotRequest) -> None:
        """Lend a buffer. Its books are kept with it, and emptied: that is cheaper than new ones."""
        buffer = self._lender.lend()
        failed = partial(self._load_failed, request)
        request.loads = RequestLoads(request.name, self.options.timeout_ns, failed)
        if buffer not in self._books:
            made = [self.options.residency(self.layout.slots) for _ in self.groups]
            self._books[buffer] = made
        request.take(buffer, self._books[buffer])

    def _give_back(self, request: HotRequest) -> None:
        if request.buffer == ABSENT:
            return
        self._lender.give_back(request.buffer, request.loads.events())
        request.give_up()

    def _load(
        self,
        request: HotRequest,
        key: int,
        layer: int,
        rows: Sequence[tuple[int, int]],
        base: int,
        after: Event | None = None,
    ) -> None:
        """Start a load, once `after` is complete, and note it."""
        timer = request.meters[self.group_of[layer]].copy_timer()
        if after is not None:
            self._region.wait(after)
        try:
            event = self._region.load(request.blocks, layer, rows, self.memory, base, timer)
        except UntrackedLoadError as error:
            request.loads.add(key, error.event)
            raise
        request.loads.add(key, event)

    def _load_failed(self, request: HotRequest, key: int) -> None:
        """Forget what the load was to bring; called by its RequestLoads."""
        self._load_failures += 1
        if key != SCRATCH:
            request.books[self.group_of[key]].reset()
