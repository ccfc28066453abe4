"""Regions of host memory made with memfd: no name anywhere, nothing to leave over.

Life: plan (`preflight`) -> create (file, seals, mapping; nothing allocated yet) -> populate in
steps, in a worker thread -> ready -> close. The file lives as long as any fd of it is open, in
whatever process; its mapping here ends at close.

Seals SHRINK and GROW are set before the fd can be handed out: nobody can cut the file short, which
would turn another process's reads into SIGBUS.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

from kvd.core.errors import LocalError
from kvd.core.units import KIB, align_up, format_size
from kvd.memory.kernel_pages import advise_huge, lock_pages, read_smaps
from kvd.memory.memory_info import HugePagePool, MemoryInfo, read_memory_info
from kvd.memory.numa import ANY, Placement, bytes_by_node, choose_placement, place
from kvd.memory.preflight import HugePagesMode, PageKind, PagePlan, check_fits, hugepages_short
from kvd_kernels.host import Mapping

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_HUGE_SHIFT: Final = 26  # MFD_HUGE_SHIFT: log2 of the page size goes above this bit
_NAME_BYTES_MAX: Final = 200  # memfd_create takes 249


@dataclass(frozen=True, slots=True)
class RegionSnapshot:
    """What a region is, at one moment; sizes in bytes.

    asked:     what the configuration or the engine asked for.
    got:       size of the file: asked, rounded up to whole pages.
    populated: resident so far, from the start.
    page_kind: hugetlb, thp or base, as planned.
    page_size: page size that the kernel reports for the mapping.
    huge:      bytes mapped with huge pages, as the kernel reports it.
    node:      NUMA node that was asked for: any, interleave or a number.
    nodes:     where the populated part is, as the kernel reports it: (node, bytes); () unknown.
    stray:     bytes of these that are on another node than was asked for.
    locked:    whether its pages are kept from the swap space.
    provider:  who owns the memory.
    survives:  whose death the content outlives.
    reason:    why these pages.
    """

    name: str
    provider: str
    asked: int
    got: int
    populated: int
    page_kind: PageKind
    page_size: int
    huge: int
    survives: tuple[str, ...]
    reason: str
    node: str = ANY
    nodes: tuple[tuple[int, int], ...] = ()
    stray: int = 0
    locked: bool = False


class MemfdRegion:
    """One memfd and its mapping; made by `create`."""

    def __init__(
        self, name: str, fd: int, mapping: Mapping, plan: PagePlan, survives: tuple[str, ...]
    ) -> None:
        self._name = name
        self._fd = fd
        self._mapping = mapping
        self._plan = plan
        self._survives = survives
        self._locked = False
        self._populated = 0
        # Held during each step of populating, so that close waits for the step's end.
        self._lock = threading.Lock()

    @classmethod
    def create(
        cls,
        name: str,
        plan: PagePlan,
        *,
        survives: tuple[str, ...] = ("engine",),
        lock: bool = False,
    ) -> MemfdRegion:
        """Make and map a region of plan.size bytes; its content is zero.

        Args:
            name: shown in /proc/PID/maps and the status; letters, digits and "._-" only.
            plan: from `preflight.check_fits`.
            survives: whose death the content outlives; a holder or fd store adds "daemon".
            lock: keep its pages from the swap space.

        Raises:
            LocalError(hugepages_short): the huge pages were taken since the plan was made.
            LocalError(memory_short): the file cannot be made, mapped or locked.
            LocalError(numa_unusable): its pages cannot be bound to their NUMA nodes.
            ValueError: bad name.
        Leaves: on an error nothing: no fd, no mapping.
        """
        _check_name(name)
        with ExitStack() as undo:
            fd = _make_file(name, plan)
            undo.callback(os.close, fd)
            try:
                os.ftruncate(fd, plan.size)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
                mapping = Mapping(fd, plan.size, writable=True)
            except OSError as error:
                raise _refusal(name, plan, plan.size, error) from error
            undo.callback(mapping.close)
            made = cls(name, fd, mapping, plan, survives)
            made.settle(plan.placement, lock=lock)
            if plan.kind == "thp":
                advise_huge(mapping)
            _check_pages(name, mapping, plan)
            undo.pop_all()
        return made

    @classmethod
    def adopt(
        cls, name: str, fd: int, asked: int, *, survives: tuple[str, ...], reason: str = ""
    ) -> MemfdRegion:
        """Map a region that an earlier life of the daemon made, content and all.

        Args:
            fd: of the memfd; owned by the region from now on, on an error by the caller.
            asked: bytes wanted now, 0 for what it has. Of a larger file the beginning is used.

        Raises: ValueError: no such file. LocalError(memory_short): it cannot be mapped.
        """
        _check_name(name)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            raise ValueError(f"what was kept as {name} is no memory")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError(f"what was kept as {name} is not sealed")
        kind: PageKind = "hugetlb" if status.st_blksize > os.sysconf("SC_PAGE_SIZE") else "base"
        size = min(status.st_size, align_up(asked or status.st_size, status.st_blksize))
        plan = PagePlan(asked or size, kind, status.st_blksize, size, False, reason)
        try:
            mapping = Mapping(fd, size, writable=True)
        except OSError as error:
            raise _refusal(name, plan, plan.size, error) from error
        made = cls(name, fd, mapping, plan, survives)
        # Resident already, as far as it was: only what an early death left out is populated.
        if status.st_blocks * 512 >= size:
            made._populated = size
        return made

    def settle(self, placement: Placement, *, lock: bool) -> None:
        """Say where pages that come from now on are to be, and whether none is ever swapped.

        Raises: LocalError(numa_unusable | memory_short): the kernel does not do it.
        """
        place(self._name, self._mapping, placement)
        self._plan = replace(self._plan, placement=placement)
        if lock and not self.uses_huge_pages:  # those are never swapped
            lock_pages(self._name, self._mapping, at_once=self._populated > 0)
        self._locked = lock

    @property
    def name(self) -> str:
        """The name given at create."""
        return self._name

    @property
    def fd(self) -> int:
        """The file, readable and writable; owned by the region, duplicated by sending it."""
        return self._fd

    @property
    def mapping(self) -> Mapping:
        """The mapping of the whole file; ends with the region."""
        return self._mapping

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._plan.size

    @property
    def page_size(self) -> int:
        """Bytes of one page, as planned."""
        return self._plan.page_size

    @property
    def populated(self) -> int:
        """Bytes resident so far, from the start; may be read from any thread."""
        return self._populated

    def populate_steps(
        self, step_bytes: int, before_step: Callable[[int], None] | None = None
    ) -> Iterator[int]:
        """Make the region resident step by step; yields the bytes resident after each.

        Runs in a worker thread; the interpreter lock is free during a step. Contents are kept.
        Ends early, without an error, when the region is closed in between.

        Args:
            step_bytes: positive; rounded up to whole pages.
            before_step: called with the bytes still to come; raises to stop (headroom).

        Raises:
            LocalError(hugepages_short), LocalError(memory_short): the host could not give them.
        """
        if step_bytes <= 0:
            raise ValueError(f"step_bytes must be positive, got {step_bytes}")
        step = align_up(step_bytes, self._plan.page_size)
        while (done := self._populated) < self.size:
            if before_step is not None:
                before_step(self.size - done)
            length = min(step, self.size - done)
            with self._lock:
                if self._fd < 0:
                    return
                try:
                    self._mapping.populate(done, length)
                except OSError as error:
                    raise _refusal(self._name, self._plan, self.size - done, error) from error
                self._populated = done + length
            yield self._populated

    def readonly_fd(self) -> int:
        """Open the file once more, for reading only; the caller closes the fd.

        A guard against accidents: the same user can reopen it for writing.
        """
        self._check_open()
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def snapshot(self) -> RegionSnapshot:
        """Return what the region is now; reads /proc/self/smaps (milliseconds when large)."""
        self._check_open()
        pages = read_smaps(self._mapping.address)
        huge = pages.get("ShmemPmdMapped", 0) + pages.get("Shared_Hugetlb", 0)
        nodes = bytes_by_node(self._mapping, self._populated, self._plan.page_size)
        return replace(
            self.planned_snapshot(),
            got=self._plan.size,
            page_size=pages.get("KernelPageSize", 0),
            huge=huge + pages.get("Private_Hugetlb", 0),
            nodes=nodes,
            stray=self.placement.strays(nodes),
        )

    @property
    def uses_huge_pages(self) -> bool:
        """Whether its pages come from the kernel's pool, which is reserved already."""
        return self._plan.kind == "hugetlb"

    @property
    def placement(self) -> Placement:
        """On which NUMA nodes its pages are to be."""
        return self._plan.placement

    def planned_snapshot(self) -> RegionSnapshot:
        """As `snapshot`, from the plan alone: the kernel is not asked."""
        return RegionSnapshot(
            name=self._name,
            provider="memfd",
            asked=self._plan.asked,
            got=self._plan.size,
            populated=self._populated,
            page_kind=self._plan.kind,
            page_size=self._plan.page_size,
            huge=0,
            survives=self._survives,
            reason=self._plan.reason,
            node=self.placement.asked,
            locked=self._locked,
        )

    def close(self) -> None:
        """Unmap and close; waits for copies and a step of populating under way. Idempotent.

        Raises: BufferError: views of the mapping are alive; nothing has changed.
        """
        with self._lock:
            if self._fd < 0:
                return
            self._mapping.close()
            os.close(self._fd)
            self._fd = -1

    def _check_open(self) -> None:
        if self._fd < 0:
            raise ValueError(f"region {self._name} is closed")


def make_region(
    name: str,
    need_bytes: int,
    huge_pages: HugePagesMode,
    headroom: int,
    *,
    setting: str = "pool.size",
    survives: tuple[str, ...] = ("engine",),
    numa_node: str = ANY,
    lock: bool = False,
    read_info: Callable[[], MemoryInfo] = read_memory_info,
) -> MemfdRegion:
    """Plan a region, check that it fits and create it; not yet populated.

    With `prefer`, huge pages that somebody else takes between plan and mapping are no error: the
    region is planned again on other pages, and its reason says so.

    Args and errors: as `preflight.check_fits`, `numa.choose_placement` and `MemfdRegion.create`.
    """
    page_size = os.sysconf("SC_PAGE_SIZE")
    here = read_info()
    placement = choose_placement(name, numa_node, here)

    def plan_for(mode: HugePagesMode, info: MemoryInfo) -> PagePlan:
        return check_fits(
            name,
            need_bytes,
            mode,
            info,
            headroom,
            setting=setting,
            page_size=page_size,
            placement=placement,
        )

    plan = plan_for(huge_pages, here)
    try:
        return MemfdRegion.create(name, plan, survives=survives, lock=lock)
    except LocalError as error:
        if plan.kind != "hugetlb" or plan.required or error.code != "hugepages_short":
            raise
        taken = replace(plan_for("prefer", _without_huge_pages(read_info())), reason=str(error))
    return MemfdRegion.create(name, taken, survives=survives, lock=lock)


def _without_huge_pages(info: MemoryInfo) -> MemoryInfo:
    def emptied(pools: tuple[HugePagePool, ...]) -> tuple[HugePagePool, ...]:
        return tuple(replace(pool, free=0) for pool in pools)

    nodes = tuple(replace(node, huge_pages=emptied(node.huge_pages)) for node in info.nodes)
    return replace(info, huge_pages=emptied(info.huge_pages), nodes=nodes)


def _check_name(name: str) -> None:
    allowed = name.replace("-", "").replace("_", "").replace(".", "")
    if not allowed.isascii() or not allowed.isalnum() or len(name) > _NAME_BYTES_MAX:
        raise ValueError(
            f"region name {name[:40]!r} must have 1 to {_NAME_BYTES_MAX} letters, digits or ._-"
        )


def _make_file(name: str, plan: PagePlan) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if plan.kind == "hugetlb":
        flags |= os.MFD_HUGETLB | (plan.page_size.bit_length() - 1) << _HUGE_SHIFT
    try:
        return os.memfd_create(f"kvd-{name}", flags)
    except OSError as error:
        raise _refusal(name, plan, plan.size, error) from error


def _refusal(name: str, plan: PagePlan, need: int, error: OSError) -> LocalError:
    """Turn an allocation that the kernel refused into an error with a remedy."""
    if plan.kind == "hugetlb" and error.errno in (errno.ENOMEM, errno.ENOSPC, errno.ENODEV):
        none = HugePagePool(plan.page_size, 0, 0, None)
        pool = plan.placement.narrow(read_memory_info()).pool_of(plan.page_size)
        return hugepages_short(name, need, pool or none)
    return LocalError(
        "memory_short",
        region=name,
        need=format_size(need),
        free="a part",
        limit=f"the kernel refused: {os.strerror(error.errno or errno.ENOMEM)}",
        fix="Free memory or choose a smaller size; check `ulimit -v -f` and the control group.",
    )


def _check_pages(name: str, mapping: Mapping, plan: PagePlan) -> None:
    """Compare the kernel's page size with the plan: a silent downgrade is an error."""
    got = mapping.smaps_page_kb() * KIB
    if plan.kind == "hugetlb" and got != plan.page_size:
        raise LocalError(
            "hugepages_short",
            region=name,
            need=plan.size // plan.page_size,
            page_size=format_size(plan.page_size),
            free=0,
            fix=f"The kernel gave pages of {format_size(got)}; check its huge page settings.",
        )
