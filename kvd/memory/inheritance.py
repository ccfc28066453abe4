"""Taking over what an earlier life of the daemon left with the owner of its memory.

Everything is looked at before anything is used. What does not fit the configuration of this life,
or is not whole, is dropped with a sentence that says why; it is never used in part, with one
exception: a smaller pool keeps the blocks at its start, and gives the rest of the memory back.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Final

from kvd.core.adopted import AdoptedBlocks
from kvd.core.errors import LocalError
from kvd.core.units import format_size
from kvd.memory.adopt_scan import scan_ready
from kvd.memory.layout_v1 import MetaTable, Superblock, blocks_of
from kvd.memory.memory_info import MemoryInfo
from kvd.memory.node_record import NodeRecord, PoolRecord, RecordFile
from kvd.memory.owners.base import close_all
from kvd.memory.preflight import HugePagesMode
from kvd.memory.region import MemfdRegion

POOL: Final = "pool"
META: Final = "pool-meta"
RECORD: Final = "record"
SUMS: Final = "pool-sums"

TAKEN_OVER: Final = "taken over from the last life of kvd, as it was made"

_PUNCH_HOLE: Final = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


@dataclass(frozen=True, slots=True)
class Wanted:
    """What this life is configured to have.

    pool_bytes: size of the pool. block_max: most blocks.
    """

    pool_bytes: int
    block_max: int
    huge_pages: HugePagesMode


@dataclass(slots=True)
class Inheritance:
    """What is taken over; owned by whoever holds it, given back by `close`.

    table:   None when no engine had given the pool a layout.
    blocks:  what its headers say; None likewise.
    pidfds:  of members of the earlier life, by the name they are kept under.
    regions: decode regions by their name.
    sums_fd: the checksum area of that life, -1 for none.
    note:    for the log and the status: what was taken over, and what was not.
    """

    data: MemfdRegion
    meta: MemfdRegion
    record_region: MemfdRegion
    record: RecordFile
    table: MetaTable | None
    blocks: AdoptedBlocks | None = None
    pidfds: dict[str, int] = field(default_factory=dict)
    regions: dict[str, MemfdRegion] = field(default_factory=dict)
    note: str = ""
    sums_fd: int = -1

    def close(self) -> None:
        """Give everything back."""
        for region in (self.data, self.meta, self.record_region, *self.regions.values()):
            region.close()
        close_all(self.pidfds)
        if self.sums_fd >= 0:
            os.close(self.sums_fd)
            self.sums_fd = -1


def inherit(
    fds: dict[str, int], wanted: Wanted, survives: tuple[str, ...]
) -> tuple[Inheritance | None, str]:
    """Take over what was kept, if it is whole and fits.

    Args: fds: by name; all of them are the function's, whatever comes.
    Returns: what is taken over, None for a fresh start; and one sentence, '' if nothing was kept.
    """
    if POOL not in fds:
        close_all(fds)
        return None, ""
    try:
        found = _take(fds, wanted, survives)
    except (ValueError, OSError) as error:
        return None, f"the pool of the last life of kvd was dropped: {error}"
    except LocalError as error:
        return None, f"the pool of the last life of kvd was dropped: {error.what}"
    finally:
        close_all(fds)
    return found, found.note


def _take(fds: dict[str, int], wanted: Wanted, survives: tuple[str, ...]) -> Inheritance:
    """Take descriptors out of `fds` as they get another owner; on an error everything is closed."""
    with ExitStack() as undo:

        def adopt(name: str, kept_as: str, asked: int) -> MemfdRegion:
            if kept_as not in fds:
                raise ValueError(f"{kept_as} was not kept")
            reason = TAKEN_OVER
            if name == POOL and wanted.huge_pages == "prefer":
                reason = f"prefer: {TAKEN_OVER}"
            region = MemfdRegion.adopt(name, fds[kept_as], asked, survives=survives, reason=reason)
            del fds[kept_as]
            undo.callback(region.close)
            return region

        _check_pool(fds[POOL], wanted)
        data = adopt(POOL, POOL, wanted.pool_bytes)
        meta = adopt(META, META, 0)
        record_region = adopt(RECORD, RECORD, 0)
        record = RecordFile(record_region.mapping)
        last = record.last or NodeRecord()
        table, note = _open_table(data, meta, last, wanted)
        made = Inheritance(data, meta, record_region, record, table, note=note)
        for region in last.regions:
            if region.kept_as in fds:
                made.regions[region.name] = adopt(region.kept_as, region.kept_as, 0)
        for member in last.members:
            if member.kept_as in fds:
                made.pidfds[member.kept_as] = fds.pop(member.kept_as)
        if table is not None and last.pool is not None:
            made.blocks = _read_headers(meta, table, last.pool)
        made.sums_fd = fds.pop(SUMS, -1)
        undo.pop_all()
    return made


def _read_headers(meta: MemfdRegion, table: MetaTable, pool: PoolRecord) -> AdoptedBlocks:
    """What the headers say of every block; torn ones are freed."""
    digests = [digest for digest, _ in pool.namespaces]
    found = scan_ready(meta.mapping, digests, pool.block_tokens)
    for block in found.torn:
        table.free(block)
    return found


def _check_pool(fd: int, wanted: Wanted) -> None:
    status = os.fstat(fd)
    if wanted.pool_bytes > status.st_size:
        raise ValueError(
            f"pool.size is {format_size(wanted.pool_bytes)} now, it had "
            f"{format_size(status.st_size)}"
        )
    if wanted.huge_pages == "require" and status.st_blksize <= os.sysconf("SC_PAGE_SIZE"):
        raise ValueError("pool.huge_pages = require, and it was made of ordinary pages")


def _open_table(
    data: MemfdRegion, meta: MemfdRegion, record: NodeRecord, wanted: Wanted
) -> tuple[MetaTable | None, str]:
    """The headers, if they and the record speak of the same pool; as many as are wanted now."""
    taken = "the pool of the last life of kvd was taken over"
    pool = record.pool
    if pool is None:
        return None, f"{taken}; it had no layout{_free_tail(data)}"
    table = MetaTable(meta.mapping)
    was = table.superblock
    if (was.block_stride, was.layout_digest) != (pool.stride, pool.digest):
        raise ValueError("its headers and its record speak of different layouts")
    count = min(wanted.pool_bytes // was.block_stride, wanted.block_max, blocks_of(meta.size))
    if count < 1:
        raise ValueError(
            f"pool.size {format_size(wanted.pool_bytes)} holds no block of "
            f"{format_size(was.block_stride)}"
        )
    if count == was.block_count:
        return table, f"{taken}, {count} blocks{_free_tail(data)}"
    block = Superblock(was.block_stride, count, data.size, was.layout_digest)
    table = MetaTable.resize(meta.mapping, block)
    return table, f"{taken}, {count} blocks instead of {was.block_count}{_free_tail(data)}"


def _free_tail(data: MemfdRegion) -> str:
    """Give what lies behind the used part of the file back to the kernel; says so.

    The file keeps its length, so that nobody who has it mapped ends by SIGBUS.
    """
    status = os.fstat(data.fd)
    length = status.st_size - data.size
    if length <= 0 or status.st_blocks * 512 <= data.size:
        return ""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if libc.fallocate(data.fd, _PUNCH_HOLE, data.size, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return f"; it is smaller now, {format_size(length)} were given back"


def once_given_back(info: MemoryInfo, fd: int) -> MemoryInfo:
    """What the host could give if this memory file were gone."""
    status = os.fstat(fd)
    num_bytes = status.st_blocks * 512
    if status.st_blksize > os.sysconf("SC_PAGE_SIZE"):
        pages = num_bytes // status.st_blksize
        pools = tuple(
            replace(p, free=p.free + pages) if p.page_size == status.st_blksize else p
            for p in info.huge_pages
        )
        return replace(info, huge_pages=pools)
    cgroup = info.cgroup
    if cgroup is not None:
        cgroup = replace(cgroup, usage=max(0, cgroup.usage - num_bytes))
    return replace(info, mem_available=info.mem_available + num_bytes, cgroup=cgroup)
