"""Rows of sparse decode: copies between host region and hot buffers, attention, index scores.

In sparse decode all rows of a request are in the host region, and the device holds the few that
are selected again and again. The operations on their bytes are here; which row has which slot is
decided elsewhere.

* `BlockTables`: where a request's rows are in the region, and how many of them were written.
* `RowCopier`: `gather` region to slots, `append` new rows to the region and to their slots.
* `SparseAttention`: attention over the selected rows while the missing ones are copied.
* `IndexScorer`: how much a query wants each row.

Every object takes its arrays when it is made: addresses are fixed from then on, a call is a few
integers and allocates nothing, and whoever owns an array changes it between calls. A call checks
all that it was given before the first byte moves. Reading a row that was never written is a
`HoleError`.

What each operation means is defined in `kvd_kernels.rows_reference`. One binary has kernels for
several instruction sets; `row_kernels` names those that run here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kvd_kernels import _rows
from kvd_kernels._rows import (
    BlockTables,
    HoleError,
    IndexScorer,
    RowCopier,
    RowList,
    row_kernels,
)

if TYPE_CHECKING:
    from kvd_kernels._rows import Memory

__all__ = [
    "FIRST_MISS",
    "NOTHING",
    "AttentionTimes",
    "BlockTables",
    "HoleError",
    "IndexScorer",
    "Part",
    "RowCopier",
    "RowList",
    "SparseAttention",
    "place_of_miss",
    "row_kernels",
]

NOTHING: Final = -1
"""A place that selects no row."""

FIRST_MISS: Final = -2
"""Place of item 0 of the misses; those of the others follow downwards."""


def place_of_miss(number: int) -> int:
    """Return the place that names an item of a request's misses."""
    return FIRST_MISS - number


class Part(NamedTuple):
    """A part of every row, and where it stands at both ends; offsets and strides are bytes.

    A row is one part (1152 bytes of bf16, 656 of fp8) or several that lie apart (K and V of an
    Ascend cache). Slot addresses that are multiples of 64 are fastest.

    region, offset, layer_stride, block_stride: host memory; a row is at offset
        + layer * layer_stride + block * block_stride + row in block * row_bytes.
    row_bytes: of this part.
    hot, hot_offset, hot_request_stride, hot_layer_stride, slot_stride: device memory; a slot is at
        hot_offset + request * hot_request_stride + layer * hot_layer_stride + slot * slot_stride.
    scratch_offset: of row 0 of request 0's scratch tile in `hot`, which all layers share; further
        requests and rows follow by the strides of slots.
    """

    region: Memory
    offset: int
    layer_stride: int
    block_stride: int
    row_bytes: int
    hot: Memory
    hot_offset: int
    hot_request_stride: int
    hot_layer_stride: int
    slot_stride: int
    scratch_offset: int = 0


class AttentionTimes(NamedTuple):
    """Where the nanoseconds of the last `attend` went.

    total:  of the call.
    plan:   checking what was given.
    wait:   attention stood still for missing rows, or copied them itself.
    copy:   spent on copying, by either thread; more than `wait` is hidden behind attention.
    misses: rows copied.
    """

    total: int
    plan: int
    wait: int
    copy: int
    misses: int


class SparseAttention(_rows.SparseAttention):
    __doc__ = _rows.SparseAttention.__doc__
    __slots__ = ()

    def statistics(self) -> AttentionTimes:
        """Return where the time of the last call went."""
        return AttentionTimes(*self.times())
