"""lim and assign on the device: which rows have a slot, and slots for those that have none.

A step of some tables::

    begin_step(tables)
    admit(tables, starts, ends)                                   slots for rows that it writes
    lim(tables, table_of_query, scores, lengths, k, selection)    the best k, each a slot or a miss
    ...                                                           distinct misses of each table
    assign(tables, table_of_line, misses, counts, placement)      slots for them, and scratch rows

Symbols: R tables, S slots of each, C positions, Q queries, T tokens, K what a query selects at
most, A lines of misses, M misses of a line at most. All tensors are contiguous and on one device;
PADDING (-1) is no position. Results do not depend on how programs are scheduled.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from kvd_kernels.triton_ops import residency_kernels as kernels
from kvd_kernels.triton_ops import upkeep_kernels
from kvd_kernels.triton_ops.checks import check_power, check_range, check_tensor

POSITIONS_MAX: Final = 1 << 20
SLOTS_MAX: Final = 1 << 18
CHOSEN_MAX: Final = 4096
MISSES_MAX: Final = 14 * CHOSEN_MAX
ADMITTED_MAX: Final = 14
BLOCK: Final = 2048
"""Lanes of a program."""

WARP_BLOCK: Final = 256
"""Lanes of a program that is one warp."""


class Tables(NamedTuple):
    """The books of R hot buffers; `state` has words of `residency_kernels`, evictions among them.

    cache_slots: [R, C] int32, the slot of a position or -1.
    tokens:      [R, S] int32, the position in a slot or -1.
    stamps:      [R, S] int32, twice the last step that used a slot, plus 1 for one that a look-up
                 hit since the clock's hand last came by; never a step to come.
    free:        [R, S] int32, a stack of the empty slots, its depth in `state`.
    state:       [R, 6] int32.
    """

    cache_slots: torch.Tensor
    tokens: torch.Tensor
    stamps: torch.Tensor
    free: torch.Tensor
    state: torch.Tensor

    @property
    def slots(self) -> int:
        """S."""
        return self.tokens.shape[1]

    @property
    def positions_max(self) -> int:
        """C."""
        return self.cache_slots.shape[1]


class Selection(NamedTuple):
    """What `lim` writes.

    positions: [Q, K] int32, ascending, PADDING behind the count.
    winners:   [Q, K] int32: the slot, ~position for a miss, NO_WINNER for padding.
    counts:    [Q] int32.
    """

    positions: torch.Tensor
    winners: torch.Tensor
    counts: torch.Tensor


class Placement(NamedTuple):
    """What `assign` writes; what lies behind a list's end is void.

    places:         [A, M] int32: a slot, S + row of the scratch tile, -1 for padding.
    load_positions: [A, M] int32: rows to be loaded before their slots are read,
    load_slots:     [A, M] int32: and the slots.
    scratch:        [A, M] int32: positions in the order of the scratch tile's rows.
    figures:        [A, 2] int32: rows to be loaded, rows in scratch.
    codes, victims: [A, M] int32, and plan: [A, 5] int32: what one launch tells the next.
    """

    places: torch.Tensor
    load_positions: torch.Tensor
    load_slots: torch.Tensor
    scratch: torch.Tensor
    figures: torch.Tensor
    codes: torch.Tensor
    victims: torch.Tensor
    plan: torch.Tensor


def make_tables(num_tables: int, slots: int, positions_max: int, device: torch.device) -> Tables:
    """Return empty tables, whose lowest slot is taken first. Raises: ValueError."""
    check_range("num_tables", num_tables, 1, 1 << 20)
    check_range("slots", slots, 1, SLOTS_MAX)
    check_range("positions_max", positions_max, 1, POSITIONS_MAX)
    state = _ints((num_tables, kernels.STATE_WORDS.value), device, 0)
    state[:, kernels.STEP.value] = 1
    state[:, kernels.NUM_FREE.value] = slots
    lowest_last = torch.arange(slots - 1, -1, -1, dtype=torch.int32, device=device)
    return Tables(
        _ints((num_tables, positions_max), device, -1),
        _ints((num_tables, slots), device, -1),
        _ints((num_tables, slots), device, 0),
        lowest_last.repeat(num_tables, 1),
        state,
    )


def make_selection(queries: int, k: int, device: torch.device) -> Selection:
    """Return room for what Q queries select. Raises: ValueError."""
    check_range("k", k, 1, CHOSEN_MAX)
    size = (queries, k)
    return Selection(_ints(size, device), _ints(size, device), _ints((queries,), device))


def make_placement(lines: int, misses: int, device: torch.device) -> Placement:
    """Return room for the places of A lines of misses. Raises: ValueError."""
    check_range("misses", misses, 1, MISSES_MAX)
    size = (lines, misses)
    return Placement(
        places=_ints(size, device),
        load_positions=_ints(size, device),
        load_slots=_ints(size, device),
        scratch=_ints(size, device),
        figures=_ints((lines, 2), device),
        codes=_ints(size, device),
        victims=_ints(size, device),
        plan=_ints((lines, kernels.PLAN_WORDS.value), device),
    )


def begin_step(tables: Tables) -> None:
    """Start a step of all tables: nothing is in use any more, and no row is the step's own."""
    tables.state[:, kernels.STEP.value] += 1
    tables.state[:, kernels.FRESH_START.value : kernels.FRESH_END.value + 1] = 0


def admit(
    tables: Tables, starts: torch.Tensor, ends: torch.Tensor, *, block: int = WARP_BLOCK
) -> None:
    """Give slots to rows [start, end) of each table, which the step writes, the newest first.

    A launch for each of the 14 rows that a step can have. Rows that find no slot are read from
    scratch, as `assign` says. Defined by `residency_reference.Table.admit`.

    Args:
        starts, ends: [R] int32; at most 14 rows of a table, none where start >= end.
    Raises: ValueError; nothing has changed then.
    """
    _check_tables(tables)
    check_power("block", block)
    num_tables, device = len(tables.state), tables.state.device
    check_tensor("starts", starts, (num_tables,), torch.int32, device=device)
    check_tensor("ends", ends, (num_tables,), torch.int32, device=device)
    for turn in range(ADMITTED_MAX):
        upkeep_kernels.admit_row[(num_tables,)](
            turn, starts, ends, *tables, tables.positions_max, tables.slots,
            BLOCK=block, num_warps=1,
        )  # fmt: skip


def invalidate_from(tables: Tables, positions: torch.Tensor) -> None:
    """Empty the slots of each table's rows at a position of its own and beyond.

    Defined by `residency_reference.Table.invalidate_from`. Raises: ValueError.

    Args:
        positions: [R] int32; C or more empties none, 0 all.
    """
    _check_tables(tables)
    num_tables, device = len(tables.state), tables.state.device
    check_tensor("positions", positions, (num_tables,), torch.int32, device=device)
    upkeep_kernels.invalidate[(num_tables,)](
        positions, *tables, tables.positions_max, tables.slots, BLOCK=BLOCK
    )


def reset(tables: Tables, table: int) -> None:
    """Empty all slots of a table, for another request. Raises: IndexError."""
    num_tables = len(tables.state)
    if not 0 <= table < num_tables:
        raise IndexError(f"table is {table} but must be 0 to {num_tables - 1}")
    slots = tables.slots
    tables.cache_slots[table] = -1
    tables.tokens[table] = -1
    tables.stamps[table] = 0
    torch.arange(slots - 1, -1, -1, out=tables.free[table])
    words = tables.state[table]
    words[kernels.STEP.value] += 1
    words[kernels.NUM_FREE.value] = slots
    words[kernels.FRESH_START.value : kernels.FRESH_END.value + 1] = 0


def lim(
    tables: Tables,
    table_of: torch.Tensor,
    scores: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    out: Selection,
    *,
    block: int = BLOCK,
) -> None:
    """Select the best k of each query's scores and look them up; hits are in use from here on.

    Exact: the k-th largest key is found by its bits. Of equal scores the lower position is better;
    -0 equals 0; NaN counts as -inf. Defined by `residency_reference.Table.lim`.

    Args:
        table_of: [Q] int32, of each query its table; several may have one.
        scores: [Q, T] float32 or bfloat16, T at most C.
        lengths: [Q] int32, scores of each query, at most T.
        k: 1 to K of `out`; queries with fewer scores select all of them.
    Raises: ValueError; nothing has changed then.
    """
    device = tables.state.device
    _check_tables(tables)
    check_power("block", block)
    check_tensor("scores", scores, (None, None), torch.float32, torch.bfloat16, device=device)
    queries, row_tokens = scores.shape
    check_range("the length of a row of scores", row_tokens, 1, tables.positions_max)
    check_tensor("table_of", table_of, (queries,), torch.int32, device=device)
    check_tensor("lengths", lengths, (queries,), torch.int32, device=device)
    width = out.positions.shape[-1]
    for name, tensor in (("positions", out.positions), ("winners", out.winners)):
        check_tensor(name, tensor, (queries, width), torch.int32, device=device)
    check_tensor("counts", out.counts, (queries,), torch.int32, device=device)
    check_range("k", k, 1, min(width, CHOSEN_MAX))
    kernels.lim[(queries,)](
        scores, lengths, table_of, tables.cache_slots, tables.stamps, tables.state,
        out.positions, out.winners, out.counts,
        k, row_tokens, tables.positions_max, tables.slots, width, BLOCK=block,
    )  # fmt: skip


def assign(
    tables: Tables,
    table_of: torch.Tensor,
    misses: torch.Tensor,
    counts: torch.Tensor,
    out: Placement,
    *,
    block: int = BLOCK,
) -> None:
    """Give places to distinct misses: an empty slot, that of a victim, or a row of scratch.

    A victim is the next slot from the clock's hand on that neither this step uses nor a second
    chance saves. What has a slot by now keeps it; rows that the step itself writes go to scratch.
    Defined by `residency_reference.Table.assign`.

    Args:
        table_of: [A] int32, of each line its table; no table twice.
        misses: [A, M] int32, each line distinct and ascending.
        counts: [A] int32, misses of each line.
    Raises: ValueError; nothing has changed then.
    """
    device = tables.state.device
    _check_tables(tables)
    check_power("block", block)
    check_tensor("misses", misses, (None, None), torch.int32, device=device)
    lines, width = misses.shape
    check_range("the length of a line of misses", width, 1, MISSES_MAX)
    check_tensor("table_of", table_of, (lines,), torch.int32, device=device)
    check_tensor("counts", counts, (lines,), torch.int32, device=device)
    words = {"figures": 2, "plan": kernels.PLAN_WORDS.value}
    for name, tensor in out._asdict().items():
        size = (lines, words.get(name, width))
        check_tensor(name, tensor, size, torch.int32, device=device)
    books = (tables.cache_slots, tables.tokens, tables.stamps)
    sizes = (tables.positions_max, tables.slots, width)
    grid = (lines,)
    kernels.look_up[grid](
        misses, counts, table_of, tables.cache_slots, tables.stamps, tables.state,
        out.codes, *sizes, BLOCK=block,
    )  # fmt: skip
    kernels.find_victims[grid](
        out.codes, table_of, *books, tables.state, out.victims, out.plan, *sizes, BLOCK=block
    )
    kernels.place[grid](
        out.codes, out.victims, out.plan, table_of, *books, tables.free, tables.state,
        out.places, out.load_positions, out.load_slots, out.scratch, out.figures,
        *sizes, BLOCK=block,
    )  # fmt: skip


def _check_tables(tables: Tables) -> None:
    """Raise ValueError unless the tensors of tables fit each other."""
    device, num_tables = tables.state.device, tables.state.shape[0]
    check_range("slots", tables.slots, 1, SLOTS_MAX)
    check_range("positions_max", tables.positions_max, 1, POSITIONS_MAX)
    columns = {"cache_slots": tables.positions_max, "state": kernels.STATE_WORDS.value}
    for name, tensor in tables._asdict().items():
        size = (num_tables, columns.get(name, tables.slots))
        check_tensor(name, tensor, size, torch.int32, device=device)


def _ints(size: tuple[int, ...], device: torch.device, value: int = -1) -> torch.Tensor:
    return torch.full(size, value, dtype=torch.int32, device=device)
