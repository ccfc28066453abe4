"""The kernels behind `admit` and `invalidate_from`: one program per table."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from kvd_kernels.triton_ops.residency_kernels import (
    ABSENT,
    EVICTED,
    FRESH_END,
    FRESH_START,
    HAND,
    NUM_FREE,
    STATE_WORDS,
    STEP,
    slots_ahead,
    stamp_of,
    take_chances,
)


@triton.jit
def next_victim(
    stamps: tensor, hand: tensor, step: tensor, slots: tensor, BLOCK: constexpr
) -> tensor:
    """Return the slot at which the clock's hand stops, ABSENT for none, and take chances before it.

    It is the first that neither the step uses nor a chance saves; else, after a round that took all
    chances, the first that the step does not use.
    """
    unused = tl.full([], 0, tl.int32) + slots
    first = unused
    start = tl.full([], 0, tl.int32)
    while (start < slots) & (first == slots):
        ahead = start + tl.arange(0, BLOCK)
        slot = slots_ahead(hand, slots, start, BLOCK)
        stamp = tl.load(stamps + slot, mask=ahead < slots, other=0)
        free = (stamp >> 1 != step) & (ahead < slots)
        unused = tl.minimum(unused, tl.min(tl.where(free, ahead, slots), 0))
        first = tl.min(tl.where(free & (stamp & 1 == 0), ahead, slots), 0)
        start += BLOCK
    stop = tl.where(first < slots, first, unused)
    found = tl.where(stop < slots, (hand + stop) % slots, ABSENT)
    take_chances(stamps, hand, step, slots, first, found, BLOCK)
    return found


@triton.jit
def admit_row(
    turn: tensor, starts: tensor, ends: tensor, cache_slots: tensor, tokens: tensor,
    stamps: tensor, free: tensor, state: tensor, positions_max: tensor, slots: tensor,
    BLOCK: constexpr,
) -> None:  # fmt: skip
    """Give a slot to row end - 1 - turn of a table, if it is one; grid: [tables].

    One warp per program, in which a word is read before it is written.
    """
    table = tl.program_id(0).to(tl.int64)
    hints, books = cache_slots + table * positions_max, table * slots
    words = state + table * STATE_WORDS
    start, end = tl.load(starts + table), tl.load(ends + table)
    tl.store(words + FRESH_START, start)
    tl.store(words + FRESH_END, end)
    position = end - 1 - turn
    if (position >= start) & (position >= 0) & (position < positions_max):
        step, num_free = tl.load(words + STEP), tl.load(words + NUM_FREE)
        slot = tl.load(hints + position)
        stamp = stamp_of(step, True)
        if slot < 0:
            stamp = stamp_of(step, False)
            if num_free > 0:
                slot = tl.load(free + books + num_free - 1)
                tl.store(words + NUM_FREE, num_free - 1)
            else:
                slot = next_victim(stamps + books, tl.load(words + HAND), step, slots, BLOCK)
                if slot >= 0:
                    tl.store(hints + tl.load(tokens + books + slot), ABSENT)
                    tl.store(words + HAND, (slot + 1) % slots)
                    tl.store(words + EVICTED, tl.load(words + EVICTED) + 1)
        if slot >= 0:
            tl.store(hints + position, slot)
            tl.store(tokens + books + slot, position)
            tl.store(stamps + books + slot, stamp)


@triton.jit
def invalidate(
    firsts: tensor, cache_slots: tensor, tokens: tensor, stamps: tensor, free: tensor,
    state: tensor, positions_max: tensor, slots: tensor, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Empty the slots of a table's rows from a position on, in their order; grid: [tables].

    A lane reads and clears words of its own only, which asks for as many lanes as there are
    threads, or more.
    """
    table = tl.program_id(0).to(tl.int64)
    hints, books = cache_slots + table * positions_max, table * slots
    words = state + table * STATE_WORDS
    first = tl.maximum(tl.load(firsts + table), 0)
    num_free = tl.load(words + NUM_FREE)
    fresh_end = tl.load(words + FRESH_END)
    for start in range(first, positions_max, BLOCK):
        at = start + tl.arange(0, BLOCK)
        slot = tl.load(hints + at, mask=at < positions_max, other=ABSENT)
        stale = slot >= 0
        rank = num_free + tl.cumsum(stale.to(tl.int32), 0) - 1
        tl.store(free + books + rank, slot, mask=stale)
        tl.store(tokens + books + slot, ABSENT, mask=stale)
        tl.store(stamps + books + slot, 0, mask=stale)
        tl.store(hints + at, ABSENT, mask=stale)
        num_free += tl.sum(stale.to(tl.int32), 0)
    tl.store(words + NUM_FREE, num_free)
    tl.store(words + FRESH_END, tl.minimum(fresh_end, first))
