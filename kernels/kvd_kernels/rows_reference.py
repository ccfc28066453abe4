"""The definition of each row operation, in numpy.

Tests compare `kvd_kernels.rows` with this file; where the two differ, this file is right. It is
written to be read, not to be fast. Classes take what the native ones take, but for how it runs.

Symbols: B requests of a batch, P query positions of each, H heads, R elements of a row, L of its
value, K selected rows, M misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvd_kernels.rows import FIRST_MISS, NOTHING, HoleError, Part

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Octets = NDArray[np.uint8]

TOLERANCE: Final = 2e-5
"""Overlapped attention differs from ordered attention by at most this share of the largest absolute
value among the selected rows: sums of float32 formed in another order, K up to 4096."""

FP8_SCALE_BYTES: Final = 4


def bytes_of(memory: Any) -> Octets:
    """Return a flat view of a buffer's bytes."""
    return np.frombuffer(memory, np.uint8)


@dataclass(frozen=True)
class BlockTables:
    """tables: [requests, blocks] int32; written_rows: [requests, layers] int64; rows, for
    debugging: [requests, layers, tokens_max] uint8, 1 where a row was written.
    """

    tables: Ints
    written_rows: NDArray[np.int64]
    block_tokens: int
    num_blocks: int
    rows: Octets | None = None

    @property
    def tokens_max(self) -> int:
        """Positions that a line of the tables can name."""
        return int(self.tables.shape[1]) * self.block_tokens

    def check(self, request: int, layer: int) -> None:
        """Raise IndexError for a request or layer that there is none of."""
        requests, layers = self.written_rows.shape
        if not 0 <= request < requests:
            raise IndexError(f"request is {request} but must be 0 to {requests - 1}")
        if not 0 <= layer < layers:
            raise IndexError(f"layer is {layer} but must be 0 to {layers - 1}")

    def written(self, request: int, layer: int) -> int:
        """Return how many leading rows of a layer were written."""
        self.check(request, layer)
        return max(0, int(self.written_rows[request, layer]))

    def mark_written(self, request: int, layer: int, tokens: int) -> None:
        """Raise the watermark of a layer to `tokens`."""
        self.check(request, layer)
        if not 0 <= tokens <= self.tokens_max:
            raise ValueError(f"tokens is {tokens} but must be 0 to {self.tokens_max}")
        self.written_rows[request, layer] = max(self.written_rows[request, layer], tokens)

    def truncate(self, request: int, tokens: int) -> None:
        """Lower the watermarks of all layers to `tokens`."""
        self.check(request, 0)
        if not 0 <= tokens <= self.tokens_max:
            raise ValueError(f"tokens is {tokens} but must be 0 to {self.tokens_max}")
        self.written_rows[request] = np.minimum(self.written_rows[request], tokens)
        if self.rows is not None:
            self.rows[request, :, tokens:] = 0

    def is_tracked(self, request: int, layer: int, position: int) -> bool:
        """Whether a row below the watermark was written, as far as rows are tracked."""
        return self.rows is None or bool(self.rows[request, layer, position])

    def locate(self, request: int, position: int) -> tuple[int, int]:
        """Return a position's block and its row in the block. Raises: IndexError."""
        if not 0 <= position < self.tokens_max:
            raise IndexError(f"position {position} is outside the {self.tokens_max} tokens")
        block = int(self.tables[request, position // self.block_tokens])
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"position {position} is in block {block} of {self.num_blocks}")
        return block, position % self.block_tokens


class RowCopier:
    """Moves rows; positions, slots and sources are arguments here instead of a list."""

    def __init__(
        self, tables: BlockTables, parts: Sequence[Part], num_slots: int, scratch_rows: int = 0
    ) -> None:
        self.tables = tables
        self.parts = tuple(parts)
        self.num_slots = num_slots
        self.slots_end = num_slots + scratch_rows

    def region_row(self, part: Part, layer: int, block: int, row: int) -> Octets:
        """Return a view of a row's part in the region."""
        at = part.offset + layer * part.layer_stride + block * part.block_stride
        at += row * part.row_bytes
        return bytes_of(part.region)[at : at + part.row_bytes]

    def hot_row(self, part: Part, request: int, layer: int, slot: int) -> Octets:
        """Return a view of a slot's part, in the hot buffer or behind it in the scratch tile."""
        at = request * part.hot_request_stride
        if slot < self.num_slots:
            at += part.hot_offset + layer * part.hot_layer_stride + slot * part.slot_stride
        else:
            at += part.scratch_offset + (slot - self.num_slots) * part.slot_stride
        return bytes_of(part.hot)[at : at + part.row_bytes]

    def check_slot(self, slot: int) -> None:
        """Raise IndexError for a slot that there is none of."""
        if not 0 <= slot < self.slots_end:
            raise IndexError(f"slot {slot} is none of {self.slots_end}")

    def plan_reads(
        self, positions: Sequence[int], slots: Sequence[int], request: int, layer: int
    ) -> list[tuple[int, int, int]]:
        """Return block, row and slot of each row to read; nothing has moved.

        Raises: HoleError, IndexError.
        """
        end = self.tables.written(request, layer)
        places = []
        for position, slot in zip(positions, slots, strict=True):
            if position < 0:
                continue
            if position >= end:
                raise HoleError(f"position {position} was never written: {end} rows are")
            block, row = self.tables.locate(request, position)
            if not self.tables.is_tracked(request, layer, position):
                raise HoleError(f"position {position} was never written")
            self.check_slot(slot)
            places.append((block, row, slot))
        return places

    def gather(
        self, positions: Sequence[int], slots: Sequence[int], request: int, layer: int
    ) -> int:
        """Copy rows from the region to their slots; return the bytes moved."""
        places = self.plan_reads(positions, slots, request, layer)
        for block, row, slot in places:
            for part in self.parts:
                source = self.region_row(part, layer, block, row)
                self.hot_row(part, request, layer, slot)[:] = source
        return len(places) * sum(part.row_bytes for part in self.parts)

    def append(
        self,
        positions: Sequence[int],
        slots: Sequence[int],
        sources: Sequence[Octets],
        request: int,
        layer: int,
    ) -> int:
        """Copy device rows to the region and to their slots; return the bytes of the former.

        sources: for each part [N, row_bytes]. A position below 0 is no row, a slot below 0 none.
        """
        end = self.tables.written(request, layer)
        places = []
        for number, (position, slot) in enumerate(zip(positions, slots, strict=True)):
            if position < 0:
                continue
            if position > end:
                raise HoleError(f"position {position} would be written past a gap: {end} rows are")
            block, row = self.tables.locate(request, position)
            if slot >= 0:
                self.check_slot(slot)
            end = max(end, position + 1)
            places.append((number, block, row, slot))
        for number, block, row, slot in places:
            for part, source in zip(self.parts, sources, strict=True):
                self.region_row(part, layer, block, row)[:] = source[number]
                if slot >= 0:
                    self.hot_row(part, request, layer, slot)[:] = source[number]
            if self.tables.rows is not None:
                self.tables.rows[request, layer, positions[number]] = 1
        self.tables.mark_written(request, layer, end)
        return len(places) * sum(part.row_bytes for part in self.parts)


# --- elements -------------------------------------------------------------------------------------


def widen_bfloat16(rows: Octets) -> Floats:
    """Return bf16 elements as floats: the upper halves of their words."""
    halves = np.ascontiguousarray(rows).view(np.uint16)
    return (halves.astype(np.uint32) << 16).view(np.float32)


def widen_fp8(rows: Octets) -> Floats:
    """Return fp8 elements (E4M3 without infinities, bias 7) as floats."""
    sign = np.where(rows & 0x80, -1.0, 1.0)
    exponent, mantissa = (rows >> 3 & 0xF).astype(np.int32), rows & 0x7
    normal = (1 + mantissa / 8) * np.exp2(exponent - 7.0)
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    return np.where(rows & 0x7F == 0x7F, np.nan, sign * size).astype(np.float32)


def widen(rows: Octets, element: str) -> Floats:
    """Return rows [N, row_bytes] of float32 or bfloat16 as floats [N, R]."""
    if element == "bfloat16":
        return widen_bfloat16(rows)
    return np.ascontiguousarray(rows).view(np.float32)


# --- attention ------------------------------------------------------------------------------------


@dataclass
class Softmax:
    """The online softmax of one query: what is known of the rows attended to so far.

    top: [H] largest scaled score. sums: [H] of exp(score - top). mixed: [H, L], rows weighted so.
    """

    top: Floats
    sums: Floats
    mixed: Floats

    def add(self, query: Floats, rows: Floats, scale: float) -> None:
        """Attend to rows [N, R] with a query [H, R]."""
        if not len(rows):
            return
        scores = query @ rows.T * np.float32(scale)
        top = np.maximum(self.top, scores.max(axis=1))
        keep = np.where(np.isneginf(self.top), np.float32(0), np.exp(self.top - top))
        weights = np.exp(scores - top[:, None])
        self.sums = keep * self.sums + weights.sum(axis=1)
        self.mixed = keep[:, None] * self.mixed + weights @ rows[:, : self.mixed.shape[1]]
        self.top = top

    def result(self) -> Floats:
        """Return the weighted mean of the rows, zeros when there was none."""
        safe = np.where(self.sums == 0, np.float32(1), self.sums)
        return (self.mixed / safe[:, None]).astype(np.float32)


@dataclass(frozen=True)
class SparseAttention:
    """copy_sfa. queries: [B, P, H, R]; places: [B, P, K]; items: [B, 3] of request, query
    positions, misses; positions and slots: [B, M] of the misses; output: [B, P, H, L].
    """

    copier: RowCopier
    queries: Floats
    places: Ints
    items: Ints
    positions: Ints
    slots: Ints
    output: Floats
    element: str
    scale: float

    def attend(self, layer: int, batch: int, *, ordered: bool = False) -> None:
        """Attend for items [0, batch) in one layer, filling output.

        Raises: HoleError, IndexError, ValueError; nothing has changed then.
        """
        for number in range(batch):
            self._check(number, layer, batch)
        for number in range(batch):
            (self._attend_ordered if ordered else self._attend_overlapped)(number, layer)

    def _attend_ordered(self, number: int, layer: int) -> None:
        """Copy all misses, then attend to the rows in the order of the selection."""
        request, queries, _ = (int(field) for field in self.items[number])
        self._copy(number, layer)
        for query in range(queries):
            softmax = self._begin()
            slots = [self._slot(number, place) for place in self._selected(number, query)]
            softmax.add(self.queries[number, query], self._rows(request, layer, slots), self.scale)
            self.output[number, query] = softmax.result()

    def _attend_overlapped(self, number: int, layer: int) -> None:
        """Attend to the rows that are there, then to the misses, when they are copied."""
        request, queries, _ = (int(field) for field in self.items[number])
        softmaxes = [self._begin() for _ in range(queries)]
        for query, softmax in enumerate(softmaxes):
            slots = [place for place in self._selected(number, query) if place >= 0]
            softmax.add(self.queries[number, query], self._rows(request, layer, slots), self.scale)
        self._copy(number, layer)
        for query, softmax in enumerate(softmaxes):
            missing = [place for place in self._selected(number, query) if place <= FIRST_MISS]
            slots = [self._slot(number, place) for place in missing]
            softmax.add(self.queries[number, query], self._rows(request, layer, slots), self.scale)
            self.output[number, query] = softmax.result()

    def _begin(self) -> Softmax:
        heads, latent = self.output.shape[2:]
        lowest = np.full(heads, -np.inf, np.float32)
        return Softmax(lowest, np.zeros(heads, np.float32), np.zeros((heads, latent), np.float32))

    def _selected(self, number: int, query: int) -> list[int]:
        return [int(place) for place in self.places[number, query] if place != NOTHING]

    def _slot(self, number: int, place: int) -> int:
        return place if place >= 0 else int(self.slots[number, FIRST_MISS - place])

    def _misses(self, number: int) -> tuple[list[int], list[int]]:
        count = int(self.items[number, 2])
        return self.positions[number, :count].tolist(), self.slots[number, :count].tolist()

    def _copy(self, number: int, layer: int) -> None:
        positions, slots = self._misses(number)
        self.copier.gather(positions, slots, int(self.items[number, 0]), layer)

    def _rows(self, request: int, layer: int, slots: Sequence[int]) -> Floats:
        """Return rows [N, R]: their parts one after another."""
        parts = self.copier.parts
        size = sum(part.row_bytes for part in parts)
        rows = np.empty((len(slots), size), np.uint8)
        for number, slot in enumerate(slots):
            pieces = [self.copier.hot_row(part, request, layer, slot) for part in parts]
            rows[number] = np.concatenate(pieces)
        return widen(rows, self.element)

    def _check(self, number: int, layer: int, batch: int) -> None:
        request, queries, misses = (int(field) for field in self.items[number])
        self.copier.tables.check(request, layer)
        if not (0 <= queries <= self.places.shape[1] and 0 <= misses <= self.positions.shape[1]):
            raise ValueError(f"item {number} has {queries} query positions and {misses} misses")
        if (self.items[:batch, 0] == request).sum() != 1:
            raise ValueError(f"request {request} is in the batch twice")
        positions, slots = self._misses(number)
        if len(self.copier.plan_reads(positions, slots, request, layer)) != misses:
            raise ValueError(f"item {number} has a miss without a position")
        if len(set(slots)) != misses:
            raise ValueError(f"item {number} gives one slot to two misses")
        for place in self.places[number, :queries].ravel().tolist():
            if place >= 0:
                self.copier.check_slot(place)
                if place in slots:
                    raise ValueError(f"place {place} is a slot that a miss is copied to")
            elif place != NOTHING and FIRST_MISS - place >= misses:
                raise IndexError(f"place {place} is no miss of {misses}")


# --- index scores ---------------------------------------------------------------------------------


def index_keys(
    tables: BlockTables, layer_keys: Octets, block_stride: int, row_bytes: int, element: str,
    request: int, tokens: int,
) -> Floats:  # fmt: skip
    """Return the keys at positions [0, tokens) of a request, [tokens, D].

    layer_keys: bytes of one layer, from row 0 of block 0 on.
    """
    rows = np.empty((tokens, row_bytes), np.uint8)
    for position in range(tokens):
        block, row = tables.locate(request, position)
        at = block * block_stride + row * row_bytes
        rows[position] = layer_keys[at : at + row_bytes]
    if element != "fp8":
        return widen(rows, element)
    scale = np.ascontiguousarray(rows[:, -FP8_SCALE_BYTES:]).view(np.float32)
    return widen_fp8(rows[:, :-FP8_SCALE_BYTES]) * scale


def index_scores(queries: Floats, weights: Floats, keys: Floats) -> Floats:
    """Return how much one query wants each key: sum over heads of weight * relu(query . key).

    queries: [H, D]; weights: [H]; keys: [S, D]. Returns [S].
    """
    scores: Floats = weights @ np.maximum(queries @ keys.T, np.float32(0))
    return scores


def check_scores(
    tables: BlockTables, scores: Floats, query: int, request: int, layer: int, tokens: int
) -> None:
    """Raise what `IndexScorer.score` raises: IndexError, ValueError, HoleError."""
    if not 0 <= query < len(scores):
        raise IndexError(f"query is {query} but must be 0 to {len(scores) - 1}")
    written = tables.written(request, layer)
    if not 0 <= tokens <= scores.shape[1]:
        raise ValueError(f"tokens is {tokens} but must be 0 to {scores.shape[1]}")
    if tokens > written:
        raise HoleError(f"position {written} was never written, {tokens} were asked for")
    for position in range(tokens):
        tables.locate(request, position)
        if not tables.is_tracked(request, layer, position):
            raise HoleError(f"position {position} was never written")
