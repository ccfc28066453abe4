"""gather_rows on the device: selected rows from host memory to their slots, part by part.

`gather_rows` is two kinds of launches and no wait. The first finds each row's block and whether
anything is wrong, and then nothing moves; the caller asks with `raise_fault` when it synchronises
anyway.

Symbols: N rows of a call, R requests, L layers, B blocks of a request at most. Host memory is a
tensor that the device can read: pinned, or mapped into it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from kvd_kernels.rows import HoleError
from kvd_kernels.triton_ops import row_kernels as kernels
from kvd_kernels.triton_ops.checks import check_power, check_range, check_tensor

ROWS_MAX: Final = 1 << 24
LOCATE_LANES: Final = 1024
LANES: Final = 4096
"""Words that a program moves at a time."""

_WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.int8))


class RowTables(NamedTuple):
    """Where the rows of requests are.

    tables:  [R, B] int32, engine block ids.
    written: [R, L] int64, how many leading rows of a layer were written.
    """

    tables: torch.Tensor
    written: torch.Tensor
    block_tokens: int
    num_blocks: int


class RowPart(NamedTuple):
    """A part of every row, and where it stands at both ends, as in `kvd_kernels.rows.Part`.

    region and hot are flat tensors of uint8; offsets and strides are bytes. The wider the word that
    divides all of them, the fewer the accesses: 8, 4, 2 or 1 bytes.
    """

    region: torch.Tensor
    offset: int
    layer_stride: int
    block_stride: int
    row_bytes: int
    hot: torch.Tensor
    hot_offset: int
    hot_request_stride: int
    hot_layer_stride: int
    slot_stride: int
    scratch_offset: int = 0


class Rows(NamedTuple):
    """Rows of a call; positions below 0 are none, and no slot of a request is named twice.

    positions, slots, requests: [N] int32; a slot of num_slots or more is a row of scratch.
    blocks: [N] int32, and faults: [1] int32: what one launch tells the next.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    requests: torch.Tensor
    blocks: torch.Tensor
    faults: torch.Tensor


def make_rows(positions: torch.Tensor, slots: torch.Tensor, requests: torch.Tensor) -> Rows:
    """Return rows with room for what launches tell each other."""
    faults = torch.full((1,), kernels.NO_FAULT.value, dtype=torch.int32, device=positions.device)
    return Rows(positions, slots, requests, torch.empty_like(positions), faults)


def gather_rows(
    tables: RowTables,
    parts: Sequence[RowPart],
    rows: Rows,
    layer: int,
    *,
    num_slots: int,
    scratch_rows: int = 0,
    lanes: int = LANES,
) -> None:
    """Copy rows from the region to their slots, all parts of each.

    Nothing moves where a row was never written, or a request, position, block or slot does not
    exist: see `raise_fault`. Defined by `rows_reference.RowCopier.gather`, for one request.

    Raises: ValueError, IndexError for a layer that there is none of; nothing has changed then.
    """
    _check(tables, parts, rows)
    check_power("lanes", lanes)
    requests, layers = tables.written.shape
    if not 0 <= layer < layers:
        raise IndexError(f"layer is {layer} but must be 0 to {layers - 1}")
    lists = (rows.positions, rows.slots, rows.requests)
    num_rows = len(rows.positions)
    kernels.locate[(1,)](
        *lists, tables.tables, tables.written, rows.blocks, rows.faults,
        layer, num_rows, requests, layers, tables.tables.shape[1],
        tables.block_tokens, tables.num_blocks, num_slots + scratch_rows,
        BLOCK=min(lanes, LOCATE_LANES),
    )  # fmt: skip
    for part in parts:
        size, word = _word_of(part)
        row_words = part.row_bytes // size
        width = _power_of_two(row_words)
        height = max(1, lanes // width)
        kernels.gather_part[(-(-num_rows // height),)](
            part.region.view(word), part.hot.view(word), *lists, rows.blocks, rows.faults,
            num_rows, tables.block_tokens, num_slots,
            (part.offset + layer * part.layer_stride) // size,
            part.block_stride // size,
            (part.hot_offset + layer * part.hot_layer_stride) // size,
            part.hot_request_stride // size,
            part.slot_stride // size,
            part.scratch_offset // size,
            row_words, ROWS=height, WORDS=width,
        )  # fmt: skip


def raise_fault(rows: Rows) -> None:
    """Raise what kept the last call from moving rows: HoleError, IndexError. Waits for the device.

    Of several faulty rows it is that of the first.
    """
    fault = int(rows.faults.item())
    if fault == kernels.NO_FAULT.value:
        return
    index, kind = divmod(fault, kernels.FAULT_KINDS.value)
    position, request = int(rows.positions[index]), int(rows.requests[index])
    if kind == kernels.HOLE.value:
        raise HoleError(f"position {position} of request {request} was never written")
    if kind == kernels.BAD_REQUEST.value:
        raise IndexError(f"request {request} of row {index} does not exist")
    if kind == kernels.BAD_POSITION.value:
        raise IndexError(f"position {position} is outside the tables")
    if kind == kernels.BAD_BLOCK.value:
        raise IndexError(
            f"position {position} is in block {int(rows.blocks[index])}, there is none"
        )
    raise IndexError(f"slot {int(rows.slots[index])} of position {position} does not exist")


def _check(tables: RowTables, parts: Sequence[RowPart], rows: Rows) -> None:
    """Raise ValueError for tensors that do not fit each other, or parts that no row can have."""
    device = rows.faults.device
    check_tensor("tables", tables.tables, (None, None), torch.int32, device=device)
    check_tensor("written", tables.written, (len(tables.tables), None), torch.int64, device=device)
    check_range("block_tokens", tables.block_tokens, 1, 1 << 20)
    num_rows = len(rows.positions)
    check_range("the number of rows", num_rows, 1, ROWS_MAX)
    for name in ("positions", "slots", "requests", "blocks"):
        check_tensor(name, getattr(rows, name), (num_rows,), torch.int32, device=device)
    check_tensor("faults", rows.faults, (1,), torch.int32, device=device)
    if not parts:
        raise ValueError("a row has no parts")
    for number, part in enumerate(parts):
        check_range(f"row_bytes of part {number}", part.row_bytes, 1, 1 << 16)
        check_tensor(f"hot of part {number}", part.hot, (None,), torch.uint8, device=device)
        # Pinned host memory is read where it is: its device is the CPU.
        own = part.region.device
        check_tensor(f"region of part {number}", part.region, (None,), torch.uint8, device=own)


def _word_of(part: RowPart) -> tuple[int, torch.dtype]:
    """Return the widest word that everything of a part is a multiple of, and its bytes."""
    numbers = [value for value in part if isinstance(value, int)]
    for memory in (part.region, part.hot):
        numbers += [memory.data_ptr(), int(memory.storage_offset()), len(memory)]
    common = math.gcd(*numbers)
    return next((size, dtype) for size, dtype in _WORDS if common % size == 0)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
