"""The node's host memory: pool data and headers, decode regions; made and freed off the loop.

Everything that touches many pages runs in one worker thread; the loop only sees progress and ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kvd.config.model import Config
from kvd.core.effects import FormatPool, WriteHeader
from kvd.core.errors import KvdError
from kvd.core.events import RegionMade, RegionSpec
from kvd.memory.layout_v1 import MetaTable, Superblock, meta_bytes
from kvd.memory.memory_info import read_memory_info
from kvd.memory.preflight import check_memory
from kvd.memory.region import MemfdRegion, RegionSnapshot, make_region

SURVIVES = ("engine",)
"""Until something outside this process keeps the files, content ends with kvd."""


class MemoryKeeper:
    """Owns every region of this kvd."""

    def __init__(self, config: Config) -> None:
        """Nothing is allocated before `make_pool`."""
        self._config = config
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvd-memory")
        self._stopping = threading.Event()
        self._data: MemfdRegion | None = None
        self._meta_region: MemfdRegion | None = None
        self._fresh_meta: MemfdRegion | None = None
        self._meta: MetaTable | None = None
        self._regions: dict[str, MemfdRegion] = {}
        self._snapshots: dict[MemfdRegion, RegionSnapshot] = {}

    # The pool ---------------------------------------------------------------------------------

    def make_pool(self) -> None:
        """Make the pool's data region; refuses before anything is allocated.

        Raises: LocalError(memory_short | hugepages_short).
        """
        pool = self._config.pool
        self._data = make_region(
            "pool", pool.size, pool.huge_pages, pool.headroom, survives=SURVIVES
        )
        self._fresh_meta = self._make_meta()

    def _make_meta(self) -> MemfdRegion:
        """Headers for the most blocks there can be; pages come as they are written."""
        return make_region(
            "pool-meta", meta_bytes(self._most_blocks()), "off", 0, survives=SURVIVES
        )

    def _most_blocks(self) -> int:
        return min(self._config.pool.block_count_max, self._config.pool.size // 64 + 1)

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
                read_memory_info(),
                headroom,
                setting=setting,
                populated=region.populated,
            )

        guard = None if region.uses_huge_pages else still_fits
        for _ in region.populate_steps(self._config.pool.populate_step, guard):
            if self._stopping.is_set():
                return
        self._snapshots[region] = region.snapshot()

    # Headers ----------------------------------------------------------------------------------

    def format_pool(self, effect: FormatPool) -> None:
        """Headers for a new layout: memory that was never written, so nothing is zeroed here."""
        old = self._meta_region
        assert self._data is not None
        region = self._fresh_meta or self._make_meta()
        self._fresh_meta = None
        block = Superblock(effect.stride, effect.total, self._data.size, effect.digest)
        self._meta = MetaTable.format(region.mapping, block, fresh=True)
        self._meta_region = region
        if old is not None:
            self._snapshots.pop(old, None)
            self._worker.submit(old.close)

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
            self._meta.commit(effect.block, effect.namespace, effect.block_hash, effect.tokens)

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
            survives=SURVIVES,
        )
        try:
            self._populate(region, "regions.size_max")
        except KvdError:
            region.close()
            raise
        self._regions[name] = region

    def region(self, name: str) -> MemfdRegion | None:
        """A decode region that is ready."""
        return self._regions.get(name)

    def free_decode_region(self, name: str) -> None:
        """Give a region back; the worker waits for copies into it."""
        region = self._regions.pop(name, None)
        if region is not None:
            self._snapshots.pop(region, None)
            self._worker.submit(region.close)

    # All --------------------------------------------------------------------------------------

    def run(self, work: Callable[[], None]) -> None:
        """Run something slow (unmapping) in the worker."""
        self._worker.submit(work)

    def snapshots(self) -> list[RegionSnapshot]:
        """What every region is, without asking the kernel again."""
        regions = [self._data, self._meta_region, *self._regions.values()]
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

    def close(self) -> None:
        """Give everything back; waits for what the worker is doing."""
        self._stopping.set()
        self._worker.shutdown(wait=True)
        owned = [self._data, self._meta_region, self._fresh_meta, *self._regions.values()]
        for region in owned:
            if region is not None:
                region.close()
        self._data = self._meta_region = self._fresh_meta = self._meta = None
        self._regions.clear()


def _file_name(region: str) -> str:
    """The region's name with the characters that a memfd name may have."""
    kept = "".join(char if char.isalnum() else "-" for char in region if char.isascii())
    return f"region-{kept}"[:200]
