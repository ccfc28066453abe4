"""Requests and blocks: look up, reserve, commit, unpin, abort, renew, poison.

Decided once for each engine, here, never by a rank. All calls are all-or-nothing unless they
answer one code for each item.
"""

from __future__ import annotations

from typing import Final

from kvd.core import events as ev
from kvd.core import results as res
from kvd.core.block_types import POISONED
from kvd.core.blocks import BlockState, BlockTable, CommitStatus
from kvd.core.effects import ClearHeaders, Effect, MarkFilling, MarkVoid, Reply, WriteHeader
from kvd.core.errors import LocalError
from kvd.core.ids import RequestKey
from kvd.core.prefix import HASH_BYTES
from kvd.core.record import record
from kvd.core.slot_events import BadSum
from kvd.core.state import Engine, Request, State

ROOM_BATCH: Final = 256
"""Blocks that one tick evicts at most: about a millisecond of everybody's time."""


def looked_up(m: State, e: ev.LookedUp, now: int, out: list[Effect]) -> None:
    """Answer the longest prefix hit and pin it for the request, on a lease."""
    engine = m.scheduler(e.ref)
    if len(e.hashes) % HASH_BYTES:
        raise LocalError("frame_malformed", detail="hashes are not a multiple of 32 bytes")
    if m.pool is None or engine.namespace < 0:
        out.append(Reply(e.reply, res.Found(())))
        return
    table = m.pool.blocks
    found = table.index.prefix(engine.namespace, e.hashes)
    m.counters["lookup_blocks_asked"] += len(e.hashes) // HASH_BYTES
    m.counters["lookup_blocks_hit"] += len(found)
    if found and e.pin:
        request = _request(m, engine, e.request)
        total = len(request.blocks) + len(found)
        try:
            m.settings.limits.check("blocks of a request", total, "blocks_per_request")
        except LocalError:
            _forget_if_empty(engine, request)
            raise
        pinned = table.pin_all(found, request.key)
        if request.blocks:
            # Asking twice is no second use.
            table.policy.found([block for block in found if block not in request.blocks])
            request.blocks.update(pinned)
        else:
            table.policy.found(found)
            request.blocks = dict[int, object](pinned)
            request.lease = now + m.settings.lookup_lease
    out.append(Reply(e.reply, res.Found(tuple(found))))


def reserved(m: State, e: ev.Reserved, now: int, out: list[Effect]) -> None:
    """Give a request private blocks; from now on it runs, and its pins have no lease."""
    engine = m.scheduler(e.ref)
    if m.pool is None or engine.namespace < 0:
        # Without a layout of its own its blocks could never be told from others'.
        raise LocalError("reserve_too_large", want=e.count, total=0)
    if e.count < 1:
        raise LocalError("frame_malformed", detail="count must be at least 1")
    request = _request(m, engine, e.request)
    limits = m.settings.limits
    try:
        limits.check("blocks of a request", len(request.blocks) + e.count, "blocks_per_request")
        taken = m.pool.blocks.reserve(request.key, e.count)
    except LocalError:
        _forget_if_empty(engine, request)
        raise
    request.blocks.update(dict.fromkeys(taken))
    request.lease = 0
    m.story.record(now, (request.key, *_block_keys(taken)), e, "reserved")
    flush(m, out)
    out.append(MarkFilling(tuple(taken)))
    out.append(Reply(e.reply, res.Taken(tuple(taken))))


def committed(m: State, e: ev.Committed, now: int, out: list[Effect]) -> None:
    """Give blocks their keys; one code for each item."""
    engine = m.scheduler(e.ref)
    m.settings.limits.check("items in a batch", len(e.items), "batch_items")
    table = pool_of(m)
    codes: list[str] = []
    for item in e.items:
        code = ""
        about = _about_commit(engine, table, item)
        if len(item.block_hash) != HASH_BYTES or not 0 < item.tokens <= table.shape.block_tokens:
            code = "frame_malformed"
        else:
            try:
                key = (engine.namespace, item.block_hash)
                status = table.commit(engine.name, item.block, key, item.tokens, item.request)
                m.count(f"commit_{status.name.lower()}")
                code = "duplicate" if status is CommitStatus.DUPLICATE else ""
            except LocalError as error:
                code = error.code
        m.story.record(now, about, item, code or "committed")
        codes.append(code)
    flush(m, out)
    out.append(Reply(e.reply, res.ItemStatuses(tuple(codes) if any(codes) else ())))


def _about_commit(engine: Engine, table: BlockTable, item: ev.CommitItem) -> tuple[object, ...]:
    """What a commit is told about: its block and the request, which names the engine, too."""
    block = f"block{item.block}"
    if item.request:
        request = engine.requests.get(item.request)
        key = request.key if request is not None else RequestKey(engine.name, item.request)
        return block, key
    fill = table.fills.get(item.block)
    if fill is not None and fill.owner.engine == engine.name:
        return block, fill.owner
    return block, engine.name


def request_ended(m: State, e: ev.RequestEnded, now: int, out: list[Effect]) -> None:
    """Drop a request's pins; ending what is not known is no error (it is named, not counted)."""
    engine = m.scheduler(e.ref)
    request = engine.requests.get(e.request)
    if request is not None:
        blocks = list(request.blocks) if e.blocks is None else list(e.blocks)
        drop_blocks(m, request, blocks, now, aborted=e.aborted)
        if e.blocks is None:
            del engine.requests[e.request]
            m.story.record(now, (request.key,), e, "ended")
        flush(m, out)
    out.append(Reply(e.reply, res.Done()))


def drop_blocks(
    m: State, request: Request, blocks: list[int], now: int, *, aborted: bool = False
) -> None:
    """Unpin blocks of a request; uncommitted ones are worthless without it.

    The last goes first: of a chain of blocks the tail is of no use without the head, so the tail
    must be evicted before it.
    """
    table = pool_of(m)
    for block in reversed(blocks):
        if block not in request.blocks:
            continue
        del request.blocks[block]
        if aborted and block in table.fills and table.fills[block].owner == request.key:
            table.poison(block)
        table.abandon(block, request.key, now, m.settings.orphan_grace)


def renewed(m: State, e: ev.Renewed, now: int, out: list[Effect]) -> None:
    """Keep a looked-up request's pins for another lease.

    Raises: LocalError(request_unknown).
    """
    engine = m.scheduler(e.ref)
    request = engine.requests.get(e.request)
    if request is None:
        raise LocalError("request_unknown", request=e.request, engine=engine.name)
    if request.lease:
        request.lease = now + m.settings.lookup_lease
    out.append(Reply(e.reply, res.Done()))


def blocks_poisoned(m: State, e: ev.BlocksPoisoned, now: int, out: list[Effect]) -> None:
    """The engine saw wrong bytes: nobody finds these blocks any more."""
    engine = m.engines[m.member(e.ref).ref.engine]
    m.settings.limits.check("items in a batch", len(e.blocks), "batch_items")
    table = pool_of(m)
    for block in e.blocks:
        owner_pins = any(
            isinstance(pin, RequestKey) and pin.engine == engine.name
            for pin in table.pins.get(block, ())
        )
        if owner_pins:
            poison_block(m, block, now, e)
    flush(m, out)
    out.append(Reply(e.reply, res.Done()))


def poison_block(m: State, block: int, now: int, cause: object) -> None:
    """Poison one block, and every open read that would deliver its bytes."""
    table = pool_of(m)
    table.poison(block)
    m.count("blocks_poisoned")
    m.story.record(now, (f"block{block}",), cause, "poisoned")
    for transfer in m.outgoing.values():
        for read in transfer.open.values():
            if read.hold is not None and block in read.spec.pool_blocks:
                read.poisoned = True


@record
class SumMismatch:
    """The bytes of a span are not those that were saved; checksums in hexadecimal."""

    block: int
    layer: int
    shard: int
    expected: str
    got: str


def poison_mismatch(m: State, bad: BadSum, span: tuple[int, int], finder: str, now: int) -> None:
    """Poison a block that was copied out with another checksum than it was copied in.

    Args: span: (layer, shard). finder: who copied it.
    """
    where = SumMismatch(bad.block, *span, f"{bad.expected:08x}", f"{bad.got:08x}")
    m.count("checksum_mismatches")
    m.story.record(now, (f"block{bad.block}", finder), where, "checksum_mismatch")
    poison_block(m, bad.block, now, where)


def expire(m: State, now: int, out: list[Effect]) -> None:
    """Unpin look-ups that were never followed by work, and blocks whose saves never came."""
    for engine in m.engines.values():
        late = [r for r in engine.requests.values() if r.lease and r.lease <= now]
        for request in late:
            m.count("leases_expired")
            m.story.record(now, (request.key,), "lease ended", "unpinned")
            drop_blocks(m, request, list(request.blocks), now)
            del engine.requests[request.key.request]
    if m.pool is not None:
        m.pool.blocks.expire_orphans(now)
        flush(m, out)


def make_room(m: State) -> None:
    """Above high water, evict a batch towards low water, so that a reserve seldom has to."""
    pool = m.pool
    if pool is None:
        return
    free = pool.blocks.counts[BlockState.RESET]
    if free < pool.free_low:
        pool.makes_room = True
    if not pool.makes_room:
        return
    batch = min(pool.free_high - free, ROOM_BATCH, len(pool.blocks.policy))
    if batch > 0:
        pool.blocks.evict(batch)
        m.counters["blocks_evicted_ahead"] += batch
    pool.makes_room = free + batch < pool.free_high


def flush(m: State, out: list[Effect]) -> None:
    """Turn what the block table did into header writes, in an order that is safe to be cut off.

    Cleared before written: a block that was evicted and became ready again in one step keeps its
    new header.
    """
    if m.pool is None:
        return
    table = m.pool.blocks
    changes = table.take_changes()
    m.counters["blocks_admitted"] += len(changes.ready)
    if changes.evicted or changes.freed:
        m.counters["blocks_evicted"] += len(changes.evicted)
        out.append(ClearHeaders((*changes.evicted, *changes.freed)))
    # Not free before its last writer and reader have gone: the next life of kvd must know that.
    kept = tuple([block for block in changes.poisoned if table.state[block] == POISONED])
    if kept:
        out.append(MarkVoid(kept))
    for block in changes.ready:
        if table.state[block] != BlockState.READY:
            continue
        namespace, block_hash = table.columns.key(block)
        digest = next(d for d, number in m.namespaces.items() if number == namespace)
        out.append(WriteHeader(block, digest, block_hash, table.columns.tokens[block]))


def pool_of(m: State) -> BlockTable:
    """The block table.

    Raises: LocalError(reserve_too_large) when no engine has given the pool a layout.
    """
    if m.pool is None:
        raise LocalError("reserve_too_large", want="?", total=0)
    return m.pool.blocks


def _request(m: State, engine: Engine, name: str) -> Request:
    """The request of that name, made when it is new.

    Raises: LocalError(limit_reached | request_ended).
    """
    request = engine.requests.get(name)
    if request is None:
        m.settings.limits.check("requests", len(engine.requests) + 1, "requests_per_engine")
        request = engine.requests[name] = Request(RequestKey(engine.name, name))
    if request.ended:
        raise LocalError("request_ended", request=name, detail=request.ended)
    return request


def _forget_if_empty(engine: Engine, request: Request) -> None:
    if not request.blocks:
        engine.requests.pop(request.key.request, None)


def _block_keys(blocks: list[int]) -> tuple[str, ...]:
    return tuple(f"block{block}" for block in blocks)
