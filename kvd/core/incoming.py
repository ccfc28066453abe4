"""Transfers that arrive for this kvd's decode engines: claim, copy, report, answer.

The engine names the destination first (`TransferExpected`); offers for transfers that nobody
expects yet are left alone, the producer offers again. A read is claimed under a number, and only a
grant with that number starts its copy: a late grant of a claim that was given up starts nothing.
What was granted is copied to its end whatever happens to the transfer; until then the destination
blocks stay taken (R11).
"""

from __future__ import annotations

from kvd.core import events as ev
from kvd.core import results as res
from kvd.core.effects import (
    Effect,
    Refuse,
    Reply,
    SendAnswer,
    SendClaim,
    SendDecline,
    SendReadEnded,
    StartCopy,
)
from kvd.core.errors import LocalError, PeerError
from kvd.core.holds import Truth
from kvd.core.ids import ReadId
from kvd.core.regions import busy_blocks, free_dropped, owned
from kvd.core.state import InRead, InTransfer, State


def expected(m: State, e: ev.TransferExpected, now: int, out: list[Effect]) -> None:
    """Register the destination of a transfer.

    Raises: LocalError(region_unknown | destination_busy | limit_reached | frame_malformed).
    """
    m.member(e.ref)
    region = owned(m, e.region, e.ref.engine)
    spec = region.spec
    known = m.incoming.get(e.transfer)
    if known is not None:
        if (known.engine, known.blocks, known.tokens) != (e.ref.engine, e.blocks, e.tokens):
            raise LocalError("frame_malformed", detail=f"transfer {e.transfer} is taken")
        out.append(Reply(e.reply, res.Done()))
        return
    m.settings.limits.check("transfers", open_transfers(m) + 1, "transfers")
    need = -(-e.tokens // spec.block_tokens)
    if e.tokens < 1 or len(e.blocks) < need or e.num_layers > spec.num_layers:
        raise LocalError("frame_malformed", detail="the destination does not hold the transfer")
    if any(not 0 <= block < spec.num_blocks for block in e.blocks):
        raise LocalError("frame_malformed", detail="a destination block is outside the region")
    busy = busy_blocks(m, e.region).intersection(e.blocks)
    if busy:
        raise LocalError("destination_busy", block=min(busy), region=e.region)
    received: list[dict[int, int]] = [{} for _ in range(e.num_layers)]
    m.incoming[e.transfer] = InTransfer(
        e.transfer, e.ref.engine, e.region, e.blocks, e.tokens, e.deadline, received
    )
    m.story.record(now, (e.transfer, e.ref), e, "expected")
    out.append(Reply(e.reply, res.Done()))


def open_transfers(m: State) -> int:
    """Transfers that are not over yet."""
    return sum(1 for transfer in m.incoming.values() if not transfer.is_over)


# Offers and grants ----------------------------------------------------------------------------


def offer_came(m: State, e: ev.OfferCame, now: int, out: list[Effect]) -> None:
    """Claim what is offered, decline what nobody wants any more, ignore what is not expected."""
    offer = e.offer
    read = offer.read
    transfer = m.incoming.get(read.transfer)
    if transfer is None:
        m.count("offers_not_expected")
        return
    known = transfer.reads.get(read)
    if known is not None and known.phase != "claimed":
        if known.phase == "ended":
            out.append(SendReadEnded(e.peer, offer.source.ref, read, known.ok))
        return
    good = 0 <= read.layer < len(transfer.received) and 0 <= read.start < offer.end
    if transfer.is_over or not good or offer.end > transfer.tokens:
        m.count("offers_declined")
        out.append(SendDecline(e.peer, offer.source.ref, read))
        if not good or offer.end > transfer.tokens:
            fail(m, transfer, "offer_outside", now, out)
        return
    if known is None or known.peer != e.peer:
        claim = m.next_claim
        m.next_claim += 1
        ask_at = now + m.rules.timing.interval
        known = InRead(read, e.peer, offer.source.ref, offer.end, claim, ask_at)
        transfer.reads[read] = known
        m.story.record(now, (read,), e, "claimed")
    out.append(SendClaim(known.peer, known.ref, read, known.claim))


def grant_came(m: State, e: ev.GrantCame, now: int, out: list[Effect]) -> None:
    """Start the copy of a claim that is still wanted; give back a grant that is not."""
    transfer, known = _find(m, e.read)
    if transfer is None or known is None or known.claim != e.claim or known.peer != e.peer:
        m.count("grants_not_claimed")
        return
    if known.phase != "claimed":
        m.count("grants_repeated")
        if known.phase == "ended":
            out.append(SendReadEnded(e.peer, known.ref, e.read, known.ok))
        return
    if transfer.is_over:
        # Its destination may belong to somebody else by now.
        known.phase = "ended"
        known.ok = not transfer.failed
        out.append(SendReadEnded(e.peer, known.ref, e.read, known.ok))
        return
    known.phase = "copying"
    known.source = e.source
    blocks = _destination(m, transfer, known)
    m.story.record(now, (e.read,), e, "copying")
    out.append(StartCopy(e.peer, e.read, known.end, e.source, transfer.region, blocks))


def _destination(m: State, transfer: InTransfer, read: InRead) -> tuple[int, ...]:
    """Region blocks that rows [start, end) land in, first block first."""
    size = m.regions[transfer.region].spec.block_tokens
    return transfer.blocks[read.read.start // size : -(-read.end // size)]


def revoke_came(m: State, e: ev.RevokeCame, now: int, out: list[Effect]) -> None:
    """The producer has nothing to read under this name; anything but `gone` fails the transfer."""
    transfer, known = _find(m, e.read)
    if known is not None and known.peer == e.peer and known.phase == "claimed":
        assert transfer is not None
        del transfer.reads[e.read]
    transfer = m.incoming.get(e.read.transfer)
    if e.why != "gone" and transfer is not None and _is_party(transfer, e.peer, known):
        fail(m, transfer, e.why, now, out)


def _is_party(transfer: InTransfer, peer: str, known: InRead | None) -> bool:
    """Whether this peer has anything to do with the transfer."""
    if known is not None and known.peer == peer:
        return True
    return not transfer.reads or any(read.peer == peer for read in transfer.reads.values())


# Copies ---------------------------------------------------------------------------------------


def copy_ended(m: State, e: ev.CopyEnded, now: int, out: list[Effect]) -> None:
    """Report the end of a copy, and count its rows when it went well."""
    transfer, known = _find(m, e.read)
    if transfer is None or known is None or known.phase != "copying":
        m.count("copies_unknown")
        return
    known.phase = "ended"
    known.ok = e.ok
    m.count("copies_ok" if e.ok else "copies_failed")
    m.story.record(now, (e.read,), e, "ended")
    out.append(SendReadEnded(known.peer, known.ref, e.read, e.ok, e.bad))
    if e.bad:
        m.counters["checksum_mismatches"] += len(e.bad)
    if e.ok and not transfer.failed:
        _merge(transfer.received[e.read.layer], e.read.start, known.end)
    if not e.ok and e.read.attempt + 1 >= m.rules.timing.read_attempts:
        fail(m, transfer, e.detail or "copy_failed", now, out)
    elif transfer.is_over:
        _close(m, transfer, out)
    free_dropped(m, out)


def _merge(ranges: dict[int, int], start: int, end: int) -> None:
    """Add [start, end) to disjoint ranges {start: end}, joining what touches."""
    for have_start in sorted(ranges):
        have_end = ranges[have_start]
        if have_start <= end and start <= have_end:
            del ranges[have_start]
            start, end = min(start, have_start), max(end, have_end)
    ranges[start] = end


def query_came(m: State, e: ev.QueryCame, out: list[Effect]) -> None:
    """Say what became of a read. Whoever is told that it does not run may rely on it:

    a claim without grant is given up here, so that its late grant starts nothing. A fence request
    is answered only when nothing runs. Of a transfer that is known every running read is known;
    the truth is unknown only for a transfer of an earlier life, or one that is forgotten.
    """
    transfer = m.incoming.get(e.read.transfer)
    known = _latest(transfer, e.read) if transfer is not None else None
    truth = Truth.UNKNOWN if transfer is None else Truth.NEVER_STARTED
    if known is not None and known.phase == "copying":
        if e.fence:
            return
        truth = Truth.RUNNING
    elif known is not None and known.phase == "ended":
        truth = Truth.ENDED_OK if known.ok else Truth.ENDED_FAILED
    elif known is not None:
        assert transfer is not None
        del transfer.reads[known.read]
    out.append(SendAnswer(e.peer, e.ref, e.read, truth, e.fence))


def _latest(transfer: InTransfer, read: ReadId) -> InRead | None:
    """The latest attempt at the same rows, from the asked one on.

    A member that announces a read to a new kvd knows the rows, not the attempt.
    """
    found: InRead | None = None
    for other in transfer.reads.values():
        same = (other.read.layer, other.read.start) == (read.layer, read.start)
        if same and other.read.attempt >= read.attempt:
            found = other if found is None or other.read.attempt > found.read.attempt else found
    return found


# The end of a transfer ------------------------------------------------------------------------


def dropped(m: State, e: ev.TransferDropped, now: int, out: list[Effect]) -> None:
    """The engine gives up. Its destination blocks are free once no copy writes them.

    Raises: LocalError(destination_busy) while copies run; the transfer is failed all the same.
    """
    transfer = m.incoming.get(e.transfer)
    if transfer is not None and transfer.engine == e.ref.engine:
        if not transfer.is_over:
            fail(m, transfer, "dropped", now, out)
        if any(read.phase == "copying" for read in transfer.reads.values()):
            raise LocalError("destination_busy", block=transfer.blocks[0], region=transfer.region)
    out.append(Reply(e.reply, res.Done()))


def fail(m: State, transfer: InTransfer, why: str, now: int, out: list[Effect]) -> None:
    """The transfer will not complete: decline what is not granted, answer who waits."""
    if transfer.is_over:
        return
    transfer.failed = why
    m.count("transfers_failed")
    m.story.record(now, (transfer.transfer,), "failed", why)
    _close(m, transfer, out)


def _close(m: State, transfer: InTransfer, out: list[Effect]) -> None:
    """The transfer is over: no claim of it may be granted any more, and who waits is told."""
    for read in [r for r in transfer.reads.values() if r.phase == "claimed"]:
        del transfer.reads[read.read]
        out.append(SendDecline(read.peer, read.ref, read.read))
    _answer_waiters(m, transfer, out)


def peer_lost(m: State, e: ev.PeerLost, now: int, out: list[Effect]) -> None:
    """A producer's kvd is gone: claims to it are void; what is copying ends by itself.

    The transfer stays open until its deadline: a restarted kvd offers the same rows again.
    """
    for transfer in m.incoming.values():
        for read in [r for r in transfer.reads.values() if r.peer == e.peer]:
            if read.phase == "claimed":
                del transfer.reads[read.read]
    m.story.record(now, (e.peer,), e, "claims dropped")


def drop_engine_transfers(m: State, engine: str, out: list[Effect]) -> None:
    """The decode engine is gone: its transfers fail; running copies end by themselves."""
    for transfer in m.incoming.values():
        if transfer.engine == engine and not transfer.is_over:
            fail(m, transfer, "decode_engine_gone", 0, out)


def drop_region_transfers(m: State, region: str, now: int, out: list[Effect]) -> None:
    """The region is given back: what is not copying into it never will."""
    for transfer in m.incoming.values():
        if transfer.region == region and not transfer.is_over:
            fail(m, transfer, "region_dropped", now, out)


def tick(m: State, now: int, out: list[Effect]) -> None:
    """Fail what is late, claim again what was not answered, forget what is long over."""
    for transfer in m.incoming.values():
        if transfer.is_over:
            continue
        if transfer.deadline <= now:
            fail(m, transfer, "deadline", now, out)
            continue
        for read in transfer.reads.values():
            if read.phase == "claimed" and read.ask_at <= now:
                read.ask_at = now + m.rules.timing.interval
                out.append(SendClaim(read.peer, read.ref, read.read, read.claim))
    over = [
        name
        for name, t in m.incoming.items()
        if t.is_over and all(r.phase == "ended" for r in t.reads.values())
    ]
    for name in over[: max(0, len(over) - m.settings.keep_ended)]:
        del m.incoming[name]


def _answer_waiters(m: State, transfer: InTransfer, out: list[Effect]) -> None:
    kept = []
    for waiter in m.waiters:
        if waiter.transfer == transfer.transfer and waiter.engine == transfer.engine:
            out.append(outcome(transfer, waiter.reply))
        else:
            kept.append(waiter)
    m.waiters[:] = kept


def outcome(transfer: InTransfer, reply: int) -> Effect:
    """The answer about a transfer that is over on the consumer's side."""
    if transfer.failed:
        return Refuse(
            reply,
            PeerError("transfer_failed", transfer=transfer.transfer, detail=transfer.failed),
        )
    return Reply(reply, res.TransferOver(transfer.tokens))


def _find(m: State, read: ReadId) -> tuple[InTransfer | None, InRead | None]:
    transfer = m.incoming.get(read.transfer)
    return transfer, transfer.reads.get(read) if transfer is not None else None
