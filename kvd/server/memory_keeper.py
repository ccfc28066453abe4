"""The node's host memory: pool data and headers, decode regions; made and freed off the loop.

Everything that touches many pages runs in one worker thread; the loop only sees progress and ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from kvd.config.model import Config
from kvd.core.effects import FormatPool, WriteHeader
from kvd.core.errors import KvdError, LocalError
from kvd.core.events import RegionMade, RegionSpec
from kvd.core.ids import MemberRef
from kvd.memory.inheritance import (
    META,
    POOL,
    RECORD,
    SUMS,
    Inheritance,
    Wanted,
    inherit,
    once_given_back,
)
from kvd.memory.layout_v1 import MetaTable, Superblock, meta_bytes
from kvd.memory.memory_info import MemoryInfo, read_memory_info
from kvd.memory.node_record import RECORD_BYTES, NodeRecord, RecordFile
from kvd.memory.numa import choose_placement
from kvd.memory.owners.base import MemoryOwner, NoOwner, kept_member, kept_region
from kvd.memory.owners.choose import find_another, find_owner
from kvd.memory.preflight import check_fits, check_memory
from kvd.memory.region import MemfdRegion, RegionSnapshot, make_region
from kvd.memory.sum_area import FLAG_SUMS
from kvd.server.sum_keeper import SumKeeper


class MemoryKeeper:
    """Owns every region of this kvd; what must survive it is kept by the owner, too."""

    def __init__(self, config: Config) -> None:
        """Nothing is allocated before `make_pool`."""
        self._config = config
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvd-memory")
        self._stopping = threading.Event()
        self.owner: MemoryOwner = NoOwner()
        self._hold_socket = Path()
        self.note = ""
        """What became of the memory of an earlier life, and of the owner that was asked for."""
        self.inherited: Inheritance | None = None
        """What was taken over; its pidfds are for whoever watches these members."""
        self._data: MemfdRegion | None = None
        self._meta_region: MemfdRegion | None = None
        self._record_region: MemfdRegion | None = None
        self._record: RecordFile | None = None
        self._meta: MetaTable | None = None
        self._is_fresh = True
        self._guards_last_life = False
        """A start that is refused must not cost what the last life left."""
        self.sums = SumKeeper(config.pool.checksums)
        self._regions: dict[str, MemfdRegion] = {}
        self._snapshots: dict[MemfdRegion, RegionSnapshot] = {}

    # The pool ---------------------------------------------------------------------------------

    async def make_pool(self, hold_socket: Path) -> None:
        """Take the pool over from an earlier life, or make a new one; not yet populated.

        Raises: LocalError(memory_short | hugepages_short | owner_unavailable); nothing is
            allocated then.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._worker, self._make_pool, hold_socket)

    def lose_owner(self) -> None:
        """The owner is gone: what it kept lives on here alone."""
        self.owner.close()
        self.owner = NoOwner()
        self.note = "the owner of the memory is gone; another one is looked for"

    async def renew_owner(self, pidfds: dict[str, int]) -> None:
        """Find an owner again and give it everything.

        Args: pidfds: of the members, by the name that they are kept under; the caller's.
        Raises: LocalError(owner_unavailable).
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._worker, self._renew_owner, pidfds)

    def _renew_owner(self, pidfds: dict[str, int]) -> None:
        """Runs in the worker thread."""
        pool = self._config.pool
        own = (self._data, self._meta_region, self._record_region)
        kept = {region.name: region.fd for region in own if region is not None} | pidfds
        kept |= {kept_region(name): region.fd for name, region in self._regions.items()}
        if self.sums.area is not None:
            kept[SUMS] = self.sums.fd
        owner = find_another(pool.owner, self._hold_socket, pool.hold_ttl, kept)
        self.owner, self.note = owner, ""

    def _make_pool(self, hold_socket: Path) -> None:
        """Runs in the worker thread: a holder may have to be started."""
        pool = self._config.pool
        choose_placement(POOL, pool.numa_node, read_memory_info())  # before anything is touched
        self._hold_socket = hold_socket
        self.owner, unkept = find_owner(pool.owner, hold_socket, pool.hold_ttl)
        wanted = Wanted(pool.size, pool.block_count_max, pool.huge_pages)
        kept = self.owner.take()
        names = set(kept)
        self._guards_last_life = bool(names)
        room = once_given_back(read_memory_info(), kept[POOL]) if POOL in kept else None
        self.inherited, self.note = inherit(kept, wanted, self.owner.survives)
        self.note = self.note or unkept
        used: set[str] = set()
        if self.inherited is not None:
            used = self._take_over(self.inherited)
        elif room is not None:
            self._check_room(room)
        for name in names - used:
            self.owner.drop(name)
        if self.inherited is not None:
            return
        self.owner.confirm()  # what was dropped is free by now
        self._guards_last_life = False
        self._data = make_region(
            POOL,
            pool.size,
            pool.huge_pages,
            pool.headroom,
            survives=self.owner.survives,
            numa_node=pool.numa_node,
            lock=pool.lock,
        )
        # Headers for the most blocks there can be.
        self._meta_region = self._make_small(META, meta_bytes(self._most_blocks()))
        self._record_region = self._make_small(RECORD, RECORD_BYTES)
        self._record = RecordFile(self._record_region.mapping)
        for region in (self._data, self._meta_region, self._record_region):
            self.owner.keep(region.name, region.fd)
        self.owner.confirm()

    def _check_room(self, info: MemoryInfo) -> None:
        """Refuse a pool that could not be had even once the last one is given up: that one stays.

        Raises: LocalError(memory_short | hugepages_short).
        """
        pool = self._config.pool
        try:
            placement = choose_placement(POOL, pool.numa_node, info)
            check_fits(POOL, pool.size, pool.huge_pages, info, pool.headroom, placement=placement)
        except LocalError as error:
            fix = error.context.get("fix", "")
            error.context["fix"] = f"{fix} The pool of the last life of kvd is kept meanwhile."
            raise

    def _make_small(self, name: str, num_bytes: int) -> MemfdRegion:
        """Pages come as they are written; they must fit beside what the pool has yet to take."""
        left = 0
        if self._data is not None and not self._data.uses_huge_pages:
            left = self._data.size - self._data.populated
        return make_region(name, num_bytes, "off", left, survives=self.owner.survives)

    def _take_over(self, found: Inheritance) -> set[str]:
        """Returns the names under which what is used is kept."""
        self._data, self._meta_region = found.data, found.meta
        self._record_region, self._record = found.record_region, found.record
        self._meta, self._is_fresh = found.table, False
        self._regions.update(found.regions)
        self._settle(found.data, self._config.pool.numa_node)
        for region in found.regions.values():
            self._settle(region, self._config.regions.numa_node)
            self._snapshots[region] = region.snapshot()
        names = {POOL, META, RECORD, *found.pidfds, *map(kept_region, found.regions)}
        if self.sums.adopt(found):
            self.owner.keep(SUMS, self.sums.fd)
            names.add(SUMS)
        if self.sums.note:
            self.note = f"{self.note}; {self.sums.note}"
        return names

    def _settle(self, region: MemfdRegion, numa_node: str) -> None:
        """As configured now; what cannot be had is said, and no reason to lose the content."""
        try:
            placement = choose_placement(region.name, numa_node, read_memory_info())
            region.settle(placement, lock=self._config.pool.lock)
        except LocalError as error:
            self.note = f"{self.note}; {error.what}"

    def _most_blocks(self) -> int:
        return min(self._config.pool.block_count_max, self._config.pool.size // 64 + 1)

    def write_record(self, record: NodeRecord) -> None:
        """Record what the next life must know of this one beside the blocks.

        Raises: ValueError: it is too large.
        """
        if self._record is not None:
            self._record.write(record)

    @property
    def pool(self) -> MemfdRegion | None:
        """The pool's data region."""
        return self._data

    @property
    def populated(self) -> int:
        """Bytes of the pool's data that are resident."""
        return self._data.populated if self._data is not None else 0

    async def populate_pool(self) -> None:
        """Make the pool resident.

        Raises: LocalError(memory_short | hugepages_short) when the host cannot give it.
        """
        loop = asyncio.get_running_loop()
        region = self._data
        if region is not None:
            await loop.run_in_executor(self._worker, self._populate, region, "pool.size")

    def _populate(self, region: MemfdRegion, setting: str) -> None:
        """Runs in the worker thread."""
        headroom = self._config.pool.headroom

        def still_fits(left: int) -> None:
            check_memory(
                region.name,
                left,
                region.placement.narrow(read_memory_info()),
                headroom,
                setting=setting,
                populated=region.populated,
            )

        guard = None if region.uses_huge_pages else still_fits
        for _ in region.populate_steps(self._config.pool.populate_step, guard):
            if self._stopping.is_set():
                return
        self._snapshots[region] = region.snapshot()
        if region is self._data:
            self._guards_last_life = False  # from here on a stop is a stop

    # Headers ----------------------------------------------------------------------------------

    def format_pool(self, effect: FormatPool) -> None:
        """Headers for a new layout; memory that was never written needs no zeros."""
        assert self._data is not None
        assert self._meta_region is not None
        block = Superblock(effect.stride, effect.total, self._data.size, effect.digest)
        mapping = self._meta_region.mapping
        self._meta = MetaTable.format(mapping, block, fresh=self._is_fresh)
        self._is_fresh = False
        if self.sums.format(effect, self._worker.submit):
            self._keep(SUMS, self.sums.fd)
        elif self.sums.note:
            self.note = self.sums.note

    def mark_filling(self, blocks: tuple[int, ...]) -> None:
        """Record that blocks are being filled."""
        if self._meta is not None:
            for block in blocks:
                self._meta.begin_fill(block)

    def clear_headers(self, blocks: tuple[int, ...]) -> None:
        """Record that blocks hold nothing."""
        if self._meta is not None:
            for block in blocks:
                self._meta.free(block)

    def write_header(self, effect: WriteHeader) -> None:
        """Record that a block is ready."""
        if self._meta is not None:
            flags = FLAG_SUMS if self.sums.area is not None else 0
            self._meta.commit(
                effect.block, effect.namespace, effect.block_hash, effect.tokens, flags
            )

    # Decode regions ---------------------------------------------------------------------------

    def make_decode_region(
        self, name: str, spec: RegionSpec, done: Callable[[RegionMade], None]
    ) -> None:
        """Make and populate a decode region in the worker; `done` is called on the loop."""

        def made(future: asyncio.Future[None]) -> None:
            if future.cancelled():
                return
            try:
                future.result()
            except KvdError as error:
                done(RegionMade(name, error.code, tuple(error.context.items())))
            else:
                done(RegionMade(name))

        work = self._worker.submit(self._make_decode_region, name, spec)
        asyncio.wrap_future(work).add_done_callback(made)

    def _make_decode_region(self, name: str, spec: RegionSpec) -> None:
        region = make_region(
            _file_name(name),
            spec.num_bytes,
            self._config.regions.huge_pages,
            self._config.pool.headroom,
            setting="regions.size_max",
            survives=self.owner.survives,
            numa_node=self._config.regions.numa_node,
            lock=self._config.pool.lock,
        )
        try:
            self._populate(region, "regions.size_max")
        except KvdError:
            region.close()
            raise
        self.owner.keep(kept_region(name), region.fd)
        self._regions[name] = region

    def region(self, name: str) -> MemfdRegion | None:
        """A decode region that is ready."""
        return self._regions.get(name)

    def free_decode_region(self, name: str) -> None:
        """Give a region back; the worker waits for copies into it."""
        region = self._regions.pop(name, None)
        if region is not None:
            self._snapshots.pop(region, None)
            self._worker.submit(self._free_region, name, region)

    def _free_region(self, name: str, region: MemfdRegion) -> None:
        self.owner.drop(kept_region(name))
        region.close()

    # Members ----------------------------------------------------------------------------------

    def keep_member(self, ref: MemberRef, pidfd: int) -> None:
        """Let the next life of kvd be able to tell whether this process has ended."""
        self._keep(kept_member(ref), pidfd)

    def _keep(self, name: str, fd: int) -> None:
        try:
            self.owner.keep(name, fd)
        except LocalError:
            self.lose_owner()  # whoever watches it finds another, which gets this one, too

    def drop_member(self, ref: MemberRef) -> None:
        """The process has ended, or touches nothing more."""
        self.owner.drop(kept_member(ref))

    # All --------------------------------------------------------------------------------------

    def run(self, work: Callable[[], None]) -> None:
        """Run something slow (unmapping) in the worker."""
        self._worker.submit(work)

    def snapshots(self) -> list[RegionSnapshot]:
        """What every region is, without asking the kernel again."""
        regions = [self._data, self._meta_region, self._record_region, *self._regions.values()]
        return [self._snapshot(region) for region in regions if region is not None]

    def _snapshot(self, region: MemfdRegion) -> RegionSnapshot:
        known = self._snapshots.get(region)
        if known is None:
            known = region.planned_snapshot()
            self._snapshots[region] = known
        return replace(known, populated=region.populated)

    def stop(self) -> None:
        """Let a population under way end early."""
        self._stopping.set()

    def close(self, *, keep: bool) -> None:
        """Give everything back; waits for what the worker is doing.

        Args: keep: kvd did not stop as asked; its next life is to find everything.
        """
        self._stopping.set()
        self._worker.shutdown(wait=True)
        owned = [self._data, self._meta_region, self._record_region, *self._regions.values()]
        for region in owned:
            if region is not None:
                region.close()
        self.sums.close()
        self._data = self._meta_region = self._record_region = self._meta = None
        self._regions.clear()
        if not keep and not self._guards_last_life:
            self.owner.release()
        self.owner.close()


def _file_name(region: str) -> str:
    """The region's name with the characters that a memfd name may have."""
    kept = "".join(char if char.isalnum() else "-" for char in region if char.isascii())
    return f"region-{kept}"[:200]
