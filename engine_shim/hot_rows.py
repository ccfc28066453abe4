"""Where the rows of hot buffers stand in device memory, and which rows of a request exist."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvd.plan.layout import SPAN_ALIGN, align_up

if TYPE_CHECKING:
    from typing_extensions import Buffer


class HoleError(ValueError):
    """A row that was never written would be read, or one would be written past a gap."""

    def __init__(self, request: str, layer: int, position: int, what: str) -> None:
        """Name the row; `what` says what was about to happen."""
        super().__init__(f"request {request} layer {layer}: position {position} {what}")
        self.request = request
        self.layer = layer
        self.position = position


@dataclass(frozen=True, slots=True)
class HotLayout:
    """Hot buffers in one device memory: [buffer] of ([layer][slot][row], [scratch row]).

    num_buffers:  requests that can decode at a time.
    num_layers:   cache-bearing layers.
    slots:        rows that a hot buffer holds in each layer.
    scratch_rows: rows of the scratch tile, which a buffer's layers use one after another.
    row_bytes:    bytes of one row.

    Layers and tiles start at multiples of 64 bytes. Offsets are bytes, 64-bit.
    Raises: ValueError naming the field.
    """

    num_buffers: int
    num_layers: int
    slots: int
    scratch_rows: int
    row_bytes: int

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("num_buffers", "num_layers", "slots", "row_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more")
        if self.scratch_rows < 0:
            raise ValueError(f"scratch_rows is {self.scratch_rows}; give 0 or more")

    @property
    def layer_bytes(self) -> int:
        """Bytes from one layer to the next."""
        return align_up(self.slots * self.row_bytes, SPAN_ALIGN)

    @property
    def buffer_bytes(self) -> int:
        """Bytes from one buffer to the next."""
        scratch = align_up(self.scratch_rows * self.row_bytes, SPAN_ALIGN)
        return self.num_layers * self.layer_bytes + scratch

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.num_buffers * self.buffer_bytes

    def layer_offset(self, buffer: int, layer: int) -> int:
        """Byte offset of slot 0 of a layer. Raises: IndexError outside the buffers."""
        if not (0 <= buffer < self.num_buffers and 0 <= layer < self.num_layers):
            raise IndexError(f"buffer {buffer} layer {layer} is outside {self}")
        return buffer * self.buffer_bytes + layer * self.layer_bytes

    def scratch_offset(self, buffer: int) -> int:
        """Byte offset of row 0 of a scratch tile. Raises: IndexError outside the buffers."""
        return self.layer_offset(buffer, 0) + self.num_layers * self.layer_bytes


class WrittenRows:
    """Which rows of one request are in the host region, layer by layer.

    Normally a watermark for each layer: rows come without gaps, and a gap is an error when the row
    behind it is written. With `track_rows`, for debugging, a byte for each row: rows may come in
    any order, and a hole is an error when it is read.
    """

    def __init__(self, request: str, num_layers: int, *, track_rows: bool) -> None:
        """No row is written."""
        self._request = request
        self._ends = [0] * num_layers
        self._rows = [bytearray() for _ in range(num_layers)] if track_rows else []

    def end(self, layer: int) -> int:
        """Return the first position that no row was written at or beyond."""
        return self._ends[layer]

    def check_writable(self, layer: int, start: int) -> None:
        """Raise HoleError if writing from `start` would leave a gap behind it."""
        if start > self._ends[layer] and not self._rows:
            raise HoleError(
                self._request,
                layer,
                self._ends[layer],
                f"is not written but {start} is; write rows without gaps",
            )

    def add(self, layer: int, start: int, end: int) -> None:
        """Take note that rows [start, end) of a layer are written.

        Raises: HoleError as check_writable; nothing changes then.
        """
        self.check_writable(layer, start)
        self._ends[layer] = max(self._ends[layer], end)
        if self._rows:
            rows = self._rows[layer]
            rows.extend(bytes(max(0, end - len(rows))))
            rows[start:end] = b"\x01" * (end - start)

    def require(self, layer: int, positions: Iterable[int]) -> None:
        """Raise HoleError for the first of these rows that was not written."""
        rows = self._rows[layer] if self._rows else None
        for position in positions:
            if position >= self._ends[layer] or (rows is not None and not rows[position]):
                raise HoleError(
                    self._request,
                    layer,
                    position,
                    "is read but was never written; its writer must report the row",
                )

    def truncate(self, num_tokens: int) -> None:
        """Forget the rows at positions >= num_tokens."""
        self._ends = [min(end, num_tokens) for end in self._ends]
        for rows in self._rows:
            del rows[num_tokens:]


def row_view(rows: Buffer, row_bytes: int) -> memoryview:
    """Look at rows as bytes. Raises: ValueError unless they are a whole number of rows, 1 or more;
    TypeError when they are not C-contiguous.
    """
    view = memoryview(rows).cast("B")
    if not len(view) or len(view) % row_bytes:
        raise ValueError(
            f"rows has {len(view)} bytes; give a multiple of row_bytes ({row_bytes}), 1 row or more"
        )
    return view
