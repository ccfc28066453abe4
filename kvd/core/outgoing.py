"""Reads that this kvd's engines offer: offers, grants, redirection to the pool, and their end.

While a read's hold is on its slot, the release rule decides about it. Once the save is done it may
be *redirected*: the slot is free and the same rows are read from the pool blocks instead, under a
hold of the same kind that is kept here and pins the span. Doubt, truth and fences work alike.
"""

from __future__ import annotations

from kvd.core import events as ev
from kvd.core import results as res
from kvd.core import slot_events as se
from kvd.core.arming import by_rows, is_in_pool
from kvd.core.effects import Effect, Refuse, Reply, SendGrant, SendOffer, SendQuery, SendRevoke
from kvd.core.errors import PeerError
from kvd.core.holds import (
    Ask,
    Doubt,
    Hold,
    HoldKind,
    Phase,
    Truth,
    age,
    doubt_further,
    granted,
    limit_of,
    offered,
    quarantined,
    still_running,
)
from kvd.core.ids import ReadId, SlotRef
from kvd.core.pool_ops import poison_mismatch
from kvd.core.state import OutRead, OutTransfer, State
from kvd.core.transfer_types import Offer, Source, SourceKind

# Offers ------------------------------------------------------------------------------------------


def offer(m: State, read: ReadId, now: int, out: list[Effect]) -> None:
    """Offer a read, from the slot or from the pool, whichever holds it now.

    Of a transfer that has failed meanwhile nothing is offered again: the hold goes at once, not
    when its reader declines or the offer's deadline passes.
    """
    found = by_rows(m, read)
    if found is None:
        return
    found.read = read
    if m.outgoing[read.transfer].failed:
        decline(m, found.ref, read, now, out)
    else:
        out.append(SendOffer(found.spec.peer, Offer(read, found.spec.end, _source(found))))


def grant(m: State, read: ReadId, executor: str, claim: int, out: list[Effect]) -> None:
    """The reader may touch memory from now on."""
    found = _find(m, read)
    assert found is not None, "a granted hold without its read"
    out.append(SendGrant(executor, read, claim, _source(found)))


# The end of a read -------------------------------------------------------------------------------


def redirect(m: State, read: ReadId, now: int, out: list[Effect]) -> None:
    """The slot's hold was lifted in this step: pin the pool span and offer that."""
    found = by_rows(m, read)
    assert found is not None, "a redirected hold without its read"
    blocks = found.spec.pool_blocks
    table = m.pool.blocks if m.pool is not None else None
    if table is None or not blocks or not is_in_pool(table, found):
        failed(m, read, "not_in_pool", now, out)
        return
    for block in blocks:
        table.pin_span(block, found.layer, read)
    found.read = read
    found.hold = offered(read, now, m.rules.timing)
    m.count("reads_redirected")
    m.story.record(now, (read, *(f"block{b}" for b in blocks)), "redirected", found.hold)
    offer(m, read, now, out)


def finished(m: State, read: ReadId, out: list[Effect]) -> None:
    """The rows have arrived."""
    transfer = m.outgoing.get(read.transfer)
    if transfer is not None and transfer.open.pop((read.layer, read.start), None) is not None:
        transfer.done += 1
        m.count("reads_finished")
        _answer_waiters(m, transfer, out)


def failed(m: State, read: ReadId, why: str, now: int, out: list[Effect]) -> None:
    """The rows will not come: the transfer fails, and nothing else does."""
    transfer = m.outgoing.get(read.transfer)
    if transfer is None:
        return
    found = transfer.open.pop((read.layer, read.start), None)
    if found is not None:
        m.count(f"reads_failed_{why}")
        to = found.hold.executor if found.hold is not None else ""
        out.append(SendRevoke(to or found.spec.peer, found.read, why))
    fail_transfer(m, read.transfer, why, now, out)


def fail_transfer(m: State, name: str, why: str, now: int, out: list[Effect]) -> None:
    """A transfer cannot be completed: revoke what nobody has claimed, let the rest end."""
    transfer = m.outgoing.get(name)
    if transfer is None:
        return
    if not transfer.failed:
        transfer.failed = why
        m.count("transfers_failed")
        m.story.record(now, (name,), "failed", why)
        for found in list(transfer.open.values()):
            decline(m, found.ref, found.read, now, out)
    _answer_waiters(m, transfer, out)


def dropped(m: State, transfer: OutTransfer, now: int, out: list[Effect]) -> None:
    """The producing engine gives up: the reader is told at once, not by its deadline."""
    if not transfer.failed:
        any_read = ReadId(transfer.transfer, -1, 0, 0)
        out.append(SendRevoke(transfer.peer, any_read, "dropped"))
        fail_transfer(m, transfer.transfer, "dropped", now, out)


def producer_gone(m: State, engine: str, now: int, out: list[Effect]) -> None:
    """The producing engine died: whoever still waits for rows of it is told at once."""
    for transfer in list(m.outgoing.values()):
        if transfer.engine == engine and not transfer.failed:
            any_read = ReadId(transfer.transfer, -1, 0, 0)
            out.append(SendRevoke(transfer.peer, any_read, "producer_gone"))
            fail_transfer(m, transfer.transfer, "producer_gone", now, out)


def decline(m: State, ref: SlotRef, read: ReadId, now: int, out: list[Effect]) -> None:
    """Nobody will claim this offer: drop it wherever its hold is, if it was never granted."""
    from kvd.core import slot_ops  # the two modules drive each other through the machine

    found = _find(m, read)
    if found is None or found.ref != ref:
        return
    if found.hold is None:
        slot_ops.feed(m, se.ReadDeclined(ref, read), now, out)
    elif found.hold.phase is Phase.OFFERED:
        _lift(m, found)
        failed(m, read, "declined", now, out)


# Reads of the pool -------------------------------------------------------------------------------


def pool_claimed(m: State, event: se.ReadClaimed, now: int, out: list[Effect]) -> bool:
    """A claim of a redirected read. Returns whether there is such a read."""
    found = _find(m, event.read)
    if found is None or found.hold is None or found.ref != event.ref:
        return False
    hold = found.hold
    if hold.phase is Phase.RUNNING and hold.executor != event.executor:
        m.count("ignored_other_reader")
        return True
    if hold.doubt is not Doubt.NONE:
        # As for a slot: "never started" may be on its way, and would lift what is granted now.
        m.count("ignored_in_doubt")
        return True
    if hold.phase is Phase.OFFERED:
        found.hold = granted(hold, event.executor, now, m.rules.timing)
    grant(m, event.read, event.executor, event.claim, out)
    return True


def pool_ended(m: State, event: se.ReadEnded, now: int, out: list[Effect]) -> bool:
    """The end of a redirected read. Returns whether there is such a read."""
    found = _find(m, event.read)
    if found is None or found.hold is None or found.ref != event.ref:
        return False
    hold = found.hold
    if hold.phase is Phase.OFFERED or hold.executor != event.executor:
        m.count("ignored_not_granted")
        return True
    _end(m, found, event.ok, now, out)
    return True


def report_bad_sums(m: State, e: ev.EndCame, now: int) -> None:
    """Poison the pool blocks that a reader found damaged, if it was granted this very read."""
    found = _find(m, e.read)
    if found is None or found.hold is None or found.ref != e.ref:
        return
    if found.hold.executor != e.executor:
        return
    for bad in e.bad:
        if bad.block in found.spec.pool_blocks:
            poison_mismatch(m, bad, (found.layer, found.shard), e.executor, now)


def _end(m: State, found: OutRead, ok: bool, now: int, out: list[Effect]) -> None:
    read = found.read
    _lift(m, found)
    if ok and not found.poisoned:
        finished(m, read, out)
    elif found.poisoned or read.attempt + 1 >= m.rules.timing.read_attempts:
        failed(m, read, "poisoned" if found.poisoned else "read_failed", now, out)
    else:
        redirect(m, _rename(found), now, out)


def _rename(found: OutRead) -> ReadId:
    found.read = found.read.next_attempt()
    return found.read


def _lift(m: State, found: OutRead) -> None:
    """Drop the hold of a redirected read together with the pins on its span."""
    assert m.pool is not None
    for block in found.spec.pool_blocks:
        m.pool.blocks.unpin_span(block, found.layer, found.read)
    found.hold = None


def pool_answered(
    m: State, e: ev.ReadAnswered, names: tuple[str, ...], now: int, out: list[Effect]
) -> bool:
    """The executor's truth about a redirected read. Returns whether there is such a read."""
    found = _find(m, e.read)
    if found is None or found.hold is None or found.ref != e.ref:
        return False
    hold = found.hold
    if hold.doubt is Doubt.NONE or hold.executor not in names:
        m.count("ignored_not_asked")
    elif e.truth is Truth.RUNNING:
        found.hold = still_running(hold, now, limit_of(HoldKind.READ, m.rules.timing))
    elif e.truth is not Truth.UNKNOWN:
        _end(m, found, e.truth is Truth.ENDED_OK, now, out)
    elif e.fence:
        pool_fenced(m, e.ref, e.read, now, out)
    elif hold.doubt is Doubt.SUSPECT:
        found.hold = doubt_further(hold, now, m.rules.timing)
        out.append(SendQuery(hold.executor, e.ref, e.read, True))
    return True


def pool_fenced(m: State, ref: SlotRef, read: ReadId, now: int, out: list[Effect]) -> bool:
    """A redirected read is provably stopped. Returns whether there is such a read."""
    found = _find(m, read)
    if found is None or found.hold is None or found.ref != ref:
        return False
    if found.hold.doubt >= Doubt.FENCING:
        _stop(m, found, now, out)
    return True


def pool_unfenceable(m: State, ref: SlotRef, read: ReadId, now: int, out: list[Effect]) -> bool:
    """Nobody can prove that a redirected read has stopped. Returns whether there is such one."""
    found = _find(m, read)
    if found is None or found.hold is None or found.ref != ref:
        return False
    if found.hold.doubt is Doubt.FENCING:
        found.hold = quarantined(found.hold, now, m.rules.timing)
        m.count("quarantines")
        fail_transfer(m, read.transfer, "reader_quarantined", now, out)
    return True


def _stop(m: State, found: OutRead, now: int, out: list[Effect]) -> None:
    read = found.read
    _lift(m, found)
    failed(m, read, "reader_gone", now, out)


def executor_lost(m: State, executor: str, now: int, out: list[Effect]) -> None:
    """A process is proven dead: its redirected reads have stopped."""
    for transfer in list(m.outgoing.values()):
        for found in list(transfer.open.values()):
            if found.hold is not None and found.hold.executor == executor:
                _stop(m, found, now, out)


def tick(m: State, now: int, out: list[Effect]) -> None:
    """Let time pass for every redirected read."""
    for transfer in list(m.outgoing.values()):
        for found in list(transfer.open.values()):
            if found.hold is not None:
                found.hold, ask = age(found.hold, now, m.rules.timing)
                if ask is not None:
                    _ask(m, found, found.hold, ask, now, out)


def _ask(m: State, found: OutRead, hold: Hold, ask: Ask, now: int, out: list[Effect]) -> None:
    if ask is Ask.REVOKE:
        _lift(m, found)
        failed(m, found.read, "not_claimed", now, out)
    elif ask is Ask.OFFER:
        offer(m, found.read, now, out)
    else:
        out.append(SendQuery(hold.executor, found.ref, found.read, ask is Ask.FENCE))


# Waiting -----------------------------------------------------------------------------------------


def _answer_waiters(m: State, transfer: OutTransfer, out: list[Effect]) -> None:
    """Whoever waits learns the end: at once when it failed, else when no read is open."""
    if transfer.open and not transfer.failed:
        return
    kept = []
    for waiter in m.waiters:
        if waiter.transfer == transfer.transfer and waiter.engine == transfer.engine:
            out.append(outcome(transfer, waiter.reply))
        else:
            kept.append(waiter)
    m.waiters[:] = kept


def outcome(transfer: OutTransfer, reply: int) -> Effect:
    """The answer about a transfer that is over on the producer's side."""
    if transfer.failed:
        return Refuse(
            reply,
            PeerError("transfer_failed", transfer=transfer.transfer, detail=transfer.failed),
        )
    return Reply(reply, res.TransferOver(transfer.tokens))


def _find(m: State, read: ReadId) -> OutRead | None:
    """The open read of exactly this name."""
    found = by_rows(m, read)
    return found if found is not None and found.read == read else None


def _source(found: OutRead) -> Source:
    if found.hold is None:
        return Source(found.ref, SourceKind.SLOT, found.spec.device_blocks)
    return Source(found.ref, SourceKind.POOL, found.spec.pool_blocks, found.shard)
