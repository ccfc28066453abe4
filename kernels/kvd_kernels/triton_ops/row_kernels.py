"""The kernels behind `kvd_kernels.triton_ops.rows`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, tensor

NONE = constexpr(-1)

# A fault is index * FAULT_KINDS + kind, so that the least is that of the first faulty row.
FAULT_KINDS = constexpr(8)
NO_FAULT = constexpr(0x7FFFFFFF)
BAD_REQUEST = constexpr(1)
HOLE = constexpr(2)
BAD_POSITION = constexpr(3)
BAD_BLOCK = constexpr(4)
BAD_SLOT = constexpr(5)


@triton.jit
def locate(
    positions: tensor, slots: tensor, requests: tensor, tables: tensor, written: tensor,
    blocks: tensor, faults: tensor, layer: tensor, num_rows: tensor, num_requests: tensor,
    num_layers: tensor, table_blocks: tensor, block_tokens: tensor, num_blocks: tensor,
    slots_end: tensor, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Write the block of each row, NONE for no row, and the first fault; grid: [1]."""
    fault = tl.full([], NO_FAULT, tl.int32)
    for start in range(0, num_rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        position = tl.load(positions + at, mask=at < num_rows, other=NONE)
        asked = position >= 0
        request = tl.load(requests + at, mask=asked, other=0)
        known = (request >= 0) & (request < num_requests)
        mark = written + request.to(tl.int64) * num_layers + layer
        end = tl.load(mark, mask=asked & known, other=0)
        inside = position < table_blocks * block_tokens
        entry = tables + request.to(tl.int64) * table_blocks + position // block_tokens
        block = tl.load(entry, mask=asked & known & inside, other=NONE)
        slot = tl.load(slots + at, mask=asked, other=0)
        kind = tl.where((slot < 0) | (slot >= slots_end), BAD_SLOT, 0)
        kind = tl.where((block < 0) | (block >= num_blocks), BAD_BLOCK, kind)
        kind = tl.where(inside, kind, BAD_POSITION)
        kind = tl.where(position < end, kind, HOLE)
        kind = tl.where(known, kind, BAD_REQUEST)
        found = tl.where(asked & (kind != 0), at * FAULT_KINDS + kind, NO_FAULT)
        fault = tl.minimum(fault, tl.min(found, 0))
        tl.store(blocks + at, tl.where(asked, block, NONE), mask=at < num_rows)
    tl.store(faults, fault)


@triton.jit
def gather_part(
    region: tensor, hot: tensor, positions: tensor, slots: tensor, requests: tensor,
    blocks: tensor, faults: tensor, num_rows: tensor, block_tokens: tensor, num_slots: tensor,
    region_base: tensor, block_stride: tensor, hot_base: tensor, request_stride: tensor,
    slot_stride: tensor, scratch_base: tensor, row_words: tensor, ROWS: constexpr,
    WORDS: constexpr,
) -> None:  # fmt: skip
    """Copy one part of ROWS rows, unless there was a fault; grid: [rows / ROWS].

    Bases, strides and sizes are counted in words; addresses have 64 bits.
    """
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    end = tl.where(tl.load(faults) == NO_FAULT, num_rows, 0)
    block = tl.load(blocks + at, mask=at < end, other=NONE)
    moved = block >= 0
    position = tl.load(positions + at, mask=moved, other=0)
    slot = tl.load(slots + at, mask=moved, other=0)
    request = tl.load(requests + at, mask=moved, other=0)
    row = (position % block_tokens).to(tl.int64)
    source = region_base + block.to(tl.int64) * block_stride + row * row_words
    in_hot = hot_base + slot.to(tl.int64) * slot_stride
    in_scratch = scratch_base + (slot - num_slots).to(tl.int64) * slot_stride
    target = request.to(tl.int64) * request_stride + tl.where(slot < num_slots, in_hot, in_scratch)
    word = tl.arange(0, WORDS)
    mask = moved[:, None] & (word < row_words)[None, :]
    words = tl.load(region + source[:, None] + word[None, :], mask=mask)
    tl.store(hot + target[:, None] + word[None, :], words, mask=mask)
