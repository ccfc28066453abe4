"""The kernels behind `kvd_kernels.triton_ops.residency`: one program per query or per table.

Lanes of a program look at BLOCK items at a time and carry counts from block to block, so that
ranks, and with them results, do not depend on BLOCK.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr, tensor

# Words of a line of `state`.
STEP = constexpr(0)
HAND = constexpr(1)
NUM_FREE = constexpr(2)
FRESH_START = constexpr(3)
FRESH_END = constexpr(4)
EVICTED = constexpr(5)
STATE_WORDS = constexpr(6)

# Words of a line of `plan`, by which `find_victims` tells `place` what it found.
NUM_PLACED = constexpr(0)
FREE_USED = constexpr(1)
FREE_BEFORE = constexpr(2)
HAND_NEXT = constexpr(3)
EVICTED_NEXT = constexpr(4)
PLAN_WORDS = constexpr(5)

NO_WINNER = constexpr(-(1 << 31))
ABSENT = constexpr(-1)


@triton.jit
def ordered_keys(scores: tensor) -> tensor:
    """Return int32s that are ordered as the float32s are: -0 equals 0, NaN counts as -inf."""
    ranked = tl.where(scores != scores, float("-inf"), scores)
    bits = tl.where(ranked == 0.0, 0.0, ranked).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def count_from(row: tensor, length: tensor, least: tensor, BLOCK: constexpr) -> tensor:
    """Return how many scores of a row have keys of `least` or more."""
    count = tl.full([], 0, tl.int32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < length
        keys = ordered_keys(tl.load(row + at, mask=inside, other=0.0).to(tl.float32))
        count += tl.sum((inside & (keys >= least)).to(tl.int32), 0)
    return count


@triton.jit
def key_of_rank(row: tensor, length: tensor, rank: tensor, BLOCK: constexpr) -> tensor:
    """Return the rank-th largest key of a row, bit by bit: the largest that `rank` scores reach.

    It starts at the lowest int32, whose highest bit is set and means minus: to flip a bit makes a
    larger number for every bit, the highest one first.
    """
    least = tl.full([], NO_WINNER, tl.int32)
    for turn in range(32):
        higher = least ^ (tl.full([], 1, tl.int32) << (31 - turn))
        if count_from(row, length, higher, BLOCK) >= rank:
            least = higher
    return least


@triton.jit
def stamp_of(step: tensor, is_hit: constexpr) -> tensor:
    """Return what a slot is stamped with: the step that used it, and a chance if it was hit."""
    return 2 * step + is_hit


@triton.jit
def lim(
    scores: tensor, lengths: tensor, table_of: tensor, cache_slots: tensor, stamps: tensor,
    state: tensor, positions: tensor, winners: tensor, counts: tensor, k: tensor,
    row_tokens: tensor, positions_max: tensor, slots: tensor, width: tensor, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Select the best k of one query's scores and look them up; grid: [queries]."""
    query = tl.program_id(0).to(tl.int64)
    table = tl.load(table_of + query).to(tl.int64)
    length = tl.minimum(tl.load(lengths + query), row_tokens)
    step = tl.load(state + table * STATE_WORDS + STEP)
    row = scores + query * row_tokens
    wanted = tl.minimum(length, k)
    least = key_of_rank(row, length, wanted, BLOCK)
    ties_wanted = wanted - count_from(row, length, least + 1, BLOCK)
    ties_seen = tl.full([], 0, tl.int32)
    taken = tl.full([], 0, tl.int32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < length
        keys = ordered_keys(tl.load(row + at, mask=inside, other=0.0).to(tl.float32))
        tied = inside & (keys == least)
        tie_rank = ties_seen + tl.cumsum(tied.to(tl.int32), 0)
        chosen = inside & ((keys > least) | (tied & (tie_rank <= ties_wanted)))
        rank = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
        slot = tl.load(cache_slots + table * positions_max + at, mask=chosen, other=ABSENT)
        tl.store(positions + query * width + rank, at, mask=chosen)
        tl.store(winners + query * width + rank, tl.where(slot >= 0, slot, ~at), mask=chosen)
        hit = chosen & (slot >= 0)
        tl.store(stamps + table * slots + slot, stamp_of(step, True), mask=hit)
        ties_seen += tl.sum(tied.to(tl.int32), 0)
        taken += tl.sum(chosen.to(tl.int32), 0)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        behind = (at >= wanted) & (at < width)
        tl.store(positions + query * width + at, ABSENT, mask=behind)
        tl.store(winners + query * width + at, NO_WINNER, mask=behind)
    tl.store(counts + query, wanted)


@triton.jit
def look_up(
    positions: tensor, counts: tensor, table_of: tensor, cache_slots: tensor, stamps: tensor,
    state: tensor, codes: tensor, positions_max: tensor, slots: tensor, width: tensor,
    BLOCK: constexpr,
) -> None:  # fmt: skip
    """Write winner codes of positions, and stamp the slots of those that have one; grid: [lines].

    A position outside the table's range is padding.
    """
    line = tl.program_id(0).to(tl.int64)
    table = tl.load(table_of + line).to(tl.int64)
    count = tl.minimum(tl.load(counts + line), width)
    step = tl.load(state + table * STATE_WORDS + STEP)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        position = tl.load(positions + line * width + at, mask=at < count, other=ABSENT)
        legal = (position >= 0) & (position < positions_max)
        slot = tl.load(cache_slots + table * positions_max + position, mask=legal, other=ABSENT)
        code = tl.where(legal, tl.where(slot >= 0, slot, ~position), NO_WINNER)
        tl.store(codes + line * width + at, code, mask=at < width)
        tl.store(stamps + table * slots + slot, stamp_of(step, True), mask=slot >= 0)


@triton.jit
def lacks_slot(codes: tensor, fresh_start: tensor, fresh_end: tensor) -> tensor:
    """Say of winner codes which are misses that may get a slot: not the rows the step writes."""
    position = ~codes
    fresh = (position >= fresh_start) & (position < fresh_end)
    return (codes < 0) & (codes != NO_WINNER) & (fresh == 0)


@triton.jit
def slots_ahead(hand: tensor, slots: tensor, start: tensor, BLOCK: constexpr) -> tensor:
    """Return a block of slots in the order of the clock's hand; those from `slots` on are void."""
    ahead = start + tl.arange(0, BLOCK)
    return tl.where(hand + ahead < slots, hand + ahead, hand + ahead - slots)


@triton.jit
def take_chances(
    stamps: tensor, hand: tensor, step: tensor, slots: tensor, passed: tensor, spared: tensor,
    BLOCK: constexpr,
) -> None:  # fmt: skip
    """Take the chances of the slots that the hand passed, but for those that the step uses.

    A slot that another lane writes is to be `spared`.
    """
    for start in range(0, passed, BLOCK):
        inside = start + tl.arange(0, BLOCK) < passed
        slot = slots_ahead(hand, slots, start, BLOCK)
        stamp = tl.load(stamps + slot, mask=inside, other=0)
        loses = inside & (stamp >> 1 != step) & (stamp & 1 != 0) & (slot != spared)
        tl.store(stamps + slot, stamp - 1, mask=loses)


@triton.jit
def find_victims(
    codes: tensor, table_of: tensor, cache_slots: tensor, tokens: tensor, stamps: tensor,
    state: tensor, victims: tensor, plan: tensor, positions_max: tensor, slots: tensor,
    width: tensor, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Find the slots to be emptied, in the order of the clock's hand; grid: [lines].

    Empty slots are used first, so victims are looked for only when those do not suffice. A look
    ends with the last victim needed: what it costs does not follow the number of slots. The first
    round takes slots without a chance. If there are too few, they all lose theirs, and the second
    round takes those that had one. Stamps change when both are over, so no lane reads what another
    one wrote.
    """
    line = tl.program_id(0).to(tl.int64)
    table = tl.load(table_of + line).to(tl.int64)
    words = state + table * STATE_WORDS
    step, hand, num_free = tl.load(words + STEP), tl.load(words + HAND), tl.load(words + NUM_FREE)
    fresh_start, fresh_end = tl.load(words + FRESH_START), tl.load(words + FRESH_END)
    need = tl.full([], 0, tl.int32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        code = tl.load(codes + line * width + at, mask=at < width, other=NO_WINNER)
        need += tl.sum(lacks_slot(code, fresh_start, fresh_end).to(tl.int32), 0)
    free_used = tl.minimum(need, num_free)
    num_victims = need - free_used
    found = tl.full([], 0, tl.int32)
    passed = tl.full([], 0, tl.int32)
    last = tl.full([], 0, tl.int32)
    for chance in range(2):
        start = tl.full([], 0, tl.int32)
        while (start < slots) & (found < num_victims):
            ahead = start + tl.arange(0, BLOCK)
            slot = slots_ahead(hand, slots, start, BLOCK)
            stamp = tl.load(stamps + table * slots + slot, mask=ahead < slots, other=0)
            token = tl.load(tokens + table * slots + slot, mask=ahead < slots, other=ABSENT)
            usable = (stamp >> 1 != step) & (stamp & 1 == chance) & (token >= 0)
            rank = found + tl.cumsum(usable.to(tl.int32), 0) - 1
            taken = usable & (rank < num_victims)
            tl.store(victims + line * width + rank, slot, mask=taken)
            tl.store(cache_slots + table * positions_max + token, ABSENT, mask=taken)
            found += tl.sum(taken.to(tl.int32), 0)
            farthest = tl.max(tl.where(taken, ahead + 1, 0), 0)
            last = tl.where(farthest > 0, farthest, last)
            start += BLOCK
        if chance == 0:
            passed = tl.where(found < num_victims, slots, last)
    take_chances(stamps + table * slots, hand, step, slots, passed, ABSENT, BLOCK)
    words = plan + line * PLAN_WORDS
    tl.store(words + NUM_PLACED, free_used + found)
    tl.store(words + FREE_USED, free_used)
    tl.store(words + FREE_BEFORE, num_free)
    tl.store(words + HAND_NEXT, (hand + last) % slots)
    tl.store(words + EVICTED_NEXT, tl.load(state + table * STATE_WORDS + EVICTED) + found)


@triton.jit
def place(
    codes: tensor, victims: tensor, plan: tensor, table_of: tensor, cache_slots: tensor,
    tokens: tensor, stamps: tensor, free: tensor, state: tensor, places: tensor,
    load_positions: tensor, load_slots: tensor, scratch: tensor, figures: tensor,
    positions_max: tensor, slots: tensor, width: tensor, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Give misses the slots that were found, the others rows of the scratch tile; grid: [lines]."""
    line = tl.program_id(0).to(tl.int64)
    table = tl.load(table_of + line).to(tl.int64)
    words, news = state + table * STATE_WORDS, plan + line * PLAN_WORDS
    step = tl.load(words + STEP)
    fresh_start, fresh_end = tl.load(words + FRESH_START), tl.load(words + FRESH_END)
    num_placed, free_used = tl.load(news + NUM_PLACED), tl.load(news + FREE_USED)
    free_before = tl.load(news + FREE_BEFORE)
    wanting = tl.full([], 0, tl.int32)
    num_scratch = tl.full([], 0, tl.int32)
    for start in range(0, width, BLOCK):
        at = line * width + start + tl.arange(0, BLOCK)
        inside = start + tl.arange(0, BLOCK) < width
        code = tl.load(codes + at, mask=inside, other=NO_WINNER)
        wants = lacks_slot(code, fresh_start, fresh_end)
        rank = wanting + tl.cumsum(wants.to(tl.int32), 0) - 1
        placed = wants & (rank < num_placed)
        pops = placed & (rank < free_used)
        popped = tl.load(free + table * slots + free_before - 1 - rank, mask=pops, other=ABSENT)
        evicts = placed & (rank >= free_used)
        victim = tl.load(victims + line * width + rank - free_used, mask=evicts, other=ABSENT)
        slot = tl.where(pops, popped, victim)
        tl.store(cache_slots + table * positions_max + ~code, slot, mask=placed)
        tl.store(tokens + table * slots + slot, ~code, mask=placed)
        tl.store(stamps + table * slots + slot, stamp_of(step, False), mask=placed)
        tl.store(load_positions + line * width + rank, ~code, mask=placed)
        tl.store(load_slots + line * width + rank, slot, mask=placed)
        homeless = (code < 0) & (code != NO_WINNER) & (placed == 0)
        row = num_scratch + tl.cumsum(homeless.to(tl.int32), 0) - 1
        tl.store(scratch + line * width + row, ~code, mask=homeless)
        found = tl.where(placed, slot, tl.where(homeless, slots + row, code))
        tl.store(places + at, tl.where(code == NO_WINNER, ABSENT, found), mask=inside)
        wanting += tl.sum(wants.to(tl.int32), 0)
        num_scratch += tl.sum(homeless.to(tl.int32), 0)
    tl.store(figures + line * 2, num_placed)
    tl.store(figures + line * 2 + 1, num_scratch)
    tl.store(words + NUM_FREE, free_before - free_used)
    tl.store(words + HAND, tl.load(news + HAND_NEXT))
    tl.store(words + EVICTED, tl.load(news + EVICTED_NEXT))
