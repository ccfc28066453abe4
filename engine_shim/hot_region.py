"""Rows of the host region: where a request's rows are, how they get to the device and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine_shim.device import Device, DeviceError, DeviceMemory, Event
from engine_shim.hot_meter import CopyTimer
from kvd.plan.layout import RegionLayout
from kvd.plan.runs import BlockRows, CopySpans
from kvd_kernels.host import Mapping


class UntrackedLoadError(DeviceError):
    """A load has started, but the stream did not take the event behind it.

    event: never completes.
    """

    def __init__(self, cause: DeviceError, event: Event) -> None:
        """Take over code and detail of what refused the event."""
        super().__init__(cause.code, cause.detail)
        self.event = event


class RegionRows:
    """One decode region and the stream that loads from it."""

    def __init__(self, device: Device, region: Mapping, layout: RegionLayout) -> None:
        """Make the stream. Raises: ValueError when the region is smaller than its layout."""
        if region.size < layout.num_bytes:
            raise ValueError(f"region has {region.size} bytes; give {layout.num_bytes}: {layout}")
        self._layout = layout
        self._device = device
        self._region = region
        self._stream = device.stream("hot")

    def check_blocks(self, blocks: Iterable[int]) -> None:
        """Raise ValueError for a block that the region does not have."""
        for block in blocks:
            if not 0 <= block < self._layout.num_blocks:
                raise ValueError(f"block is {block}; give 0 to {self._layout.num_blocks - 1}")

    def check_range(self, blocks: Sequence[int], start: int, end: int) -> None:
        """Raise ValueError unless [start, end) is a range of positions that has blocks."""
        tokens = len(blocks) * self._layout.block_tokens
        if not 0 <= start < end <= tokens:
            raise ValueError(
                f"rows [{start}, {end}) are not within the {tokens} tokens that the request has "
                "blocks for; extend it first"
            )

    def wait(self, event: Event) -> None:
        """Hold the loads from here on until the event is complete. Raises: DeviceError."""
        self._stream.wait(event)

    def load(
        self,
        blocks: Sequence[int],
        layer: int,
        rows: Iterable[tuple[int, int]],
        memory: DeviceMemory,
        base: int,
        timer: CopyTimer | None = None,
    ) -> Event:
        """Start to copy rows to the device.

        Args:    blocks: of the request. rows: (position, index of the row behind `base`).
                 base: byte offset in `memory`.
                 timer: is told when the copy begins and ends.
        Returns: the event behind the copy.
        Raises:  DeviceError when the stream takes nothing; UntrackedLoadError.
        """
        source, spans = self._rows(blocks, layer), CopySpans()
        for position, index in rows:
            offset, _ = source.locate(position)
            spans.add(base + index * source.row_bytes, offset, source.row_bytes)
        event = self._device.event()
        if timer is not None:
            self._stream.launch_host(timer.before)
        self._stream.copy(memory, self._region, spans)
        try:
            if timer is not None:
                self._stream.notify_host(timer.behind)
            self._stream.record(event)
        except DeviceError as error:
            # The copy runs and nothing will tell its end: what it touches stays taken for good.
            event.arm()
            raise UntrackedLoadError(error, event) from error
        return event

    def write(self, blocks: Sequence[int], layer: int, start: int, rows: memoryview) -> None:
        """Write rows from position `start` on; `rows` is bytes, a whole number of rows."""
        target, at = self._rows(blocks, layer), 0
        while at < len(rows):
            offset, run = target.locate(start + at // target.row_bytes)
            piece = rows[at : at + run * target.row_bytes]
            self._region.write_bytes(offset, piece)
            at += len(piece)

    def close(self, timeout_ns: int) -> None:
        """Close the stream; raises as `Stream.close`."""
        self._stream.close(timeout_ns)

    def _rows(self, blocks: Sequence[int], layer: int) -> BlockRows:
        layout = self._layout
        base = layout.row_offset(layer, 0, 0)
        stride = layout.block_tokens * layout.row_bytes
        return BlockRows(base, stride, layout.block_tokens, layout.row_bytes, blocks)
