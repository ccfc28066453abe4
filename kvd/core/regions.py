"""Decode regions: made on request, indexed by the engine's own block ids, freed when unread.

A region has no allocator: the engine allocates its block ids. Reusing a block is announced with a
generation; a block that an open read still writes into is refused until that read has ended (R11).
"""

from __future__ import annotations

from kvd.core import events as ev
from kvd.core import results as res
from kvd.core.effects import Effect, FreeRegion, MakeRegion, Refuse, Reply
from kvd.core.errors import KvdError, LocalError
from kvd.core.state import Region, State


def asked(m: State, e: ev.RegionAsked, out: list[Effect]) -> None:
    """Make a region, or answer at once when this engine has it with the same shape.

    Raises: LocalError(region_exists | memory_short | limit_reached | frame_malformed).
    """
    m.member(e.ref)
    spec = e.spec
    if min(spec.num_layers, spec.num_blocks, spec.block_tokens, spec.row_bytes) < 1:
        raise LocalError("frame_malformed", detail="a region's sizes must be at least 1")
    region = m.regions.get(e.region)
    if region is not None:
        if region.spec != spec or region.engine != e.ref.engine or region.dropped:
            raise LocalError("region_exists", region=e.region)
        if region.ready:
            out.append(Reply(e.reply, res.Done()))
        else:
            region.askers.append(e.reply)
        return
    m.settings.limits.check("regions", len(m.regions) + 1, "regions")
    used = sum(r.spec.num_bytes for r in m.regions.values())
    if used + spec.num_bytes > m.settings.region_bytes:
        raise LocalError(
            "memory_short",
            region=f"region {e.region}",
            need=f"{spec.num_bytes} bytes",
            free=f"{max(0, m.settings.region_bytes - used)} bytes",
            limit="regions.size_max",
            fix="Raise regions.size_max in kvd.toml, or lower the engine's block count.",
        )
    m.regions[e.region] = Region(e.region, e.ref.engine, spec, askers=[e.reply])
    out.append(MakeRegion(e.region, spec))


def made(m: State, e: ev.RegionMade, out: list[Effect]) -> None:
    """The region's memory is there, or could not be had."""
    region = m.regions.get(e.region)
    if region is None:
        out.append(FreeRegion(e.region))
        return
    if e.code:
        del m.regions[e.region]
        error = KvdError(e.code, **dict(e.context))
        out.extend(Refuse(reply, error) for reply in region.askers)
        return
    region.ready = True
    m.roster += 1
    out.extend(Reply(reply, res.Done()) for reply in region.askers)
    region.askers.clear()
    free_dropped(m, out)


def dropped(m: State, e: ev.RegionDropped, out: list[Effect]) -> None:
    """The engine gives its region back; it goes when no copy writes into it any more.

    The caller has failed the transfers into it: none may be granted memory that is gone, or the
    memory of the next region of that name.

    Raises: LocalError(region_unknown).
    """
    m.member(e.ref)
    region = owned(m, e.region, e.ref.engine)
    region.dropped = True
    out.append(Reply(e.reply, res.Done()))
    free_dropped(m, out)


def allocated(m: State, e: ev.BlocksAllocated, out: list[Effect]) -> None:
    """The engine reuses blocks: one code for each, `destination_busy` while a read may write.

    Raises: LocalError(region_unknown | limit_reached).
    """
    m.member(e.ref)
    region = owned(m, e.region, e.ref.engine)
    m.settings.limits.check("items in a batch", len(e.blocks), "batch_items")
    busy = busy_blocks(m, e.region)
    codes: list[str] = []
    for block, generation in e.blocks:
        if not 0 <= block < region.spec.num_blocks:
            codes.append("block_outside")
        elif block in busy:
            codes.append("destination_busy")
        elif generation <= region.generations.get(block, 0):
            codes.append("stale_generation")
        else:
            region.generations[block] = generation
            codes.append("")
    out.append(Reply(e.reply, res.ItemStatuses(tuple(codes) if any(codes) else ())))


def owned(m: State, name: str, engine: str) -> Region:
    """The engine's own live region.

    Raises: LocalError(region_unknown).
    """
    region = m.regions.get(name)
    if region is None or region.engine != engine or region.dropped:
        raise LocalError("region_unknown", region=name)
    return region


def busy_blocks(m: State, region: str) -> set[int]:
    """Blocks of a region that an open transfer, or a copy that has not ended, may still write."""
    busy: set[int] = set()
    for transfer in m.incoming.values():
        if transfer.region != region:
            continue
        copying = any(read.phase == "copying" for read in transfer.reads.values())
        if copying or not transfer.is_over:
            busy.update(transfer.blocks)
    return busy


def free_dropped(m: State, out: list[Effect]) -> None:
    """Give back dropped regions that no copy writes into any more."""
    for region in [r for r in m.regions.values() if r.dropped and r.ready]:
        copying = any(
            read.phase == "copying"
            for transfer in m.incoming.values()
            if transfer.region == region.name
            for read in transfer.reads.values()
        )
        if not copying:
            del m.regions[region.name]
            m.roster += 1
            out.append(FreeRegion(region.name))
