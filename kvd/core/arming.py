"""Arming reads: what must be true of the reads that a `Written` names, and what is kept of each."""

from __future__ import annotations

from dataclasses import replace

from kvd.core import slot_events as se
from kvd.core.blocks import BlockTable
from kvd.core.errors import LocalError
from kvd.core.ids import ReadId, RequestKey, SlotRef
from kvd.core.pool_ops import pool_of
from kvd.core.state import Member, OutRead, OutTransfer, State


def check_reads(m: State, member: Member, event: se.Written) -> None:
    """Whether a tenancy's reads can be armed: names new, their pool blocks the engine's own,
    room for their transfers.

    Raises: LocalError(limit_reached | frame_malformed | block_not_reserved).
    """
    fresh = {s.read.transfer for s in event.reads if s.read.transfer not in m.outgoing}
    if fresh:
        running = sum(1 for transfer in m.outgoing.values() if transfer.open)
        m.settings.limits.check("transfers", running + len(fresh), "transfers")
    named: set[ReadId] = set()
    for spec in event.reads:
        read = spec.read
        if read.attempt or read.layer != event.layer or spec.end <= read.start or read in named:
            raise LocalError("frame_malformed", detail=f"read {read} does not fit its layer")
        if by_rows(m, read) is not None:
            raise LocalError("frame_malformed", detail=f"read {read} is open already")
        named.add(read)
        if spec.pool_blocks:
            _check_pool_blocks(m, member.ref.engine, spec)


def _check_pool_blocks(m: State, engine: str, spec: se.ReadSpec) -> None:
    """Whether rows may be read from these blocks instead: one for each part of the range, and
    none that the engine does not have."""
    table = pool_of(m)
    size = table.shape.block_tokens
    if len(spec.pool_blocks) != -(-spec.end // size) - spec.read.start // size:
        raise LocalError("frame_malformed", detail=f"pool blocks of {spec.read} do not fit it")
    for block in spec.pool_blocks:
        pins = table.pins.get(block, ())
        if not any(isinstance(pin, RequestKey) and pin.engine == engine for pin in pins):
            raise LocalError("block_not_reserved", block=block, request="?", engine=engine)


def without_failed(m: State, event: se.Written) -> se.Written:
    """The event without reads of transfers that have failed: those end, and no others."""
    kept = tuple([spec for spec in event.reads if not _has_failed(m, spec.read.transfer)])
    if len(kept) == len(event.reads):
        return event
    m.count("reads_of_failed_transfers")
    return replace(event, reads=kept)


def _has_failed(m: State, name: str) -> bool:
    transfer = m.outgoing.get(name)
    return transfer is not None and bool(transfer.failed)


def arm(m: State, member: Member, ref: SlotRef, layer: int, spec: se.ReadSpec) -> None:
    """Remember what an offer must say; its hold is on the slot already."""
    name = spec.read.transfer
    transfer = m.outgoing.get(name)
    if transfer is None:
        forget_ended(m, m.settings.keep_ended)
        transfer = m.outgoing[name] = OutTransfer(name, member.ref.engine, spec.peer)
    key = (spec.read.layer, spec.read.start)
    lives: tuple[int, ...] = ()
    if spec.pool_blocks:
        lives = tuple(pool_of(m).lives[block] for block in spec.pool_blocks)
    transfer.open[key] = OutRead(spec, spec.read, ref, layer, member.shard, lives)
    transfer.tokens = max(transfer.tokens, spec.end)


def is_in_pool(table: BlockTable, found: OutRead) -> bool:
    """Whether the rows lie in the blocks that were named when the read was armed.

    Between that and now nothing pinned these blocks: they may have had other owners since, or be
    written anew by a later chunk.
    """
    spec, size = found.spec, table.shape.block_tokens
    first = spec.read.start // size
    return all(
        table.holds_rows(
            block, life, found.layer, found.shard, min(size, spec.end - (first + at) * size)
        )
        for at, (block, life) in enumerate(zip(spec.pool_blocks, found.lives, strict=True))
    )


def forget_ended(m: State, keep: int) -> None:
    """Bound the books: the oldest transfers without open reads go first."""
    over = [name for name, t in m.outgoing.items() if not t.open]
    for name in over[: max(0, len(over) - keep)]:
        del m.outgoing[name]


def by_rows(m: State, read: ReadId) -> OutRead | None:
    """The open read of these rows, whatever its present attempt."""
    transfer = m.outgoing.get(read.transfer)
    return transfer.open.get((read.layer, read.start)) if transfer is not None else None
