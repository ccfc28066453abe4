"""Decide, before a byte is allocated, which pages a region gets and whether it fits.

A sparse file of any size can be made, so a region that is too large would fail late, deep in
populating, or take the host down. Hence: compare first, refuse with the number that fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from kvd.core.errors import LocalError
from kvd.core.units import MIB, align_down, align_up, format_size
from kvd.memory.memory_info import CgroupLimit, HugePagePool, MemoryInfo
from kvd.memory.numa import ANYWHERE, Placement

HugePagesMode: TypeAlias = Literal["require", "prefer", "off"]
PageKind: TypeAlias = Literal["hugetlb", "thp", "base"]

BASE_PAGE: Final = 4096
"""Least size of a page; the real one may be larger (64 KiB on some aarch64 kernels)."""

_THP_FOR_SHARED: Final = ("always", "within_size", "advise", "force")


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Which pages a region is to be made of.

    asked:     bytes before rounding.
    kind:      hugetlb (from the kernel's pool), thp (transparent huge pages, as available) or base.
    page_size: bytes; the region's size is a multiple of it.
    size:      bytes, what was asked rounded up to whole pages.
    required:  getting smaller pages than planned is an error.
    reason:    one sentence for the status: why these pages.
    placement: on which NUMA nodes they are to be.
    """

    asked: int
    kind: PageKind
    page_size: int
    size: int
    required: bool
    reason: str
    placement: Placement = ANYWHERE


def check_fits(
    region: str,
    need_bytes: int,
    huge_pages: HugePagesMode,
    info: MemoryInfo,
    headroom: int,
    *,
    setting: str = "pool.size",
    page_size: int = BASE_PAGE,
    placement: Placement = ANYWHERE,
) -> PagePlan:
    """Choose the pages of a region and check that the host can give them.

    Args:
        region: name for messages, e.g. "pool".
        need_bytes: size asked for, positive.
        huge_pages: pool.huge_pages or regions.huge_pages.
        info: the host at this moment.
        headroom: bytes that must stay available; huge pages are set aside already, so that it
            counts for other pages only.
        setting: what the remedy tells to change.
        page_size: the base page of the host.
        placement: bound to a NUMA node, only what that node has counts.

    Raises:
        LocalError(hugepages_short): required, and too few are free.
        LocalError(memory_short): other pages, and memory or a control group is short.
    """
    if need_bytes <= 0:
        raise ValueError(f"need_bytes must be positive, got {need_bytes}")
    info = placement.narrow(info)
    why = "huge pages are off"
    if huge_pages != "off":
        short = _huge_page_shortage(region, need_bytes, info, headroom, setting)
        if short is None:
            huge = info.default_huge_page
            return PagePlan(
                asked=need_bytes,
                kind="hugetlb",
                page_size=huge,
                size=align_up(need_bytes, huge),
                required=huge_pages == "require",
                reason=f"{huge_pages}: pages of {format_size(huge)} from the kernel's pool",
                placement=placement,
            )
        if huge_pages == "require":
            raise short
        why = f"prefer: {short.what} {short.remedy}"
    size = align_up(need_bytes, page_size)
    check_memory(region, size, info, headroom, setting=setting)
    kind: PageKind = "base"
    if huge_pages == "prefer" and info.shmem_thp in _THP_FOR_SHARED:
        kind, why = "thp", f"{why} Transparent huge pages are used instead."
    return PagePlan(need_bytes, kind, page_size, size, False, why, placement)


def check_memory(
    region: str,
    need_bytes: int,
    info: MemoryInfo,
    headroom: int,
    *,
    setting: str = "pool.size",
    populated: int = 0,
) -> None:
    """Check that so much ordinary memory can be taken and headroom is left.

    Also asked again while a region is populated: another daemon may have started meanwhile.

    Args:
        need_bytes: still to be taken.
        info: the host at this moment, or one NUMA node of it (`Placement.narrow`).
        populated: bytes that the region has taken already.

    Raises: LocalError(memory_short): names the tightest limit and the largest size that fits.
    """
    free, limit = _tightest(info)
    if need_bytes + headroom <= free:
        return
    largest = max(0, align_down(populated + free - headroom, MIB))
    if largest:
        fix = f"Set {setting} to at most {format_size(largest)}, or free memory first."
    else:
        fix = f"Free memory first, or lower pool.headroom ({format_size(headroom)})."
    if info.node is not None:
        fix = f"{fix} Other NUMA nodes are not used: see {setting.partition('.')[0]}.numa_node."
    raise LocalError(
        "memory_short",
        region=region,
        need=f"{_rounded(need_bytes)} and {_rounded(headroom)} of headroom",
        free=_rounded(free),
        limit=limit,
        fix=fix,
    )


def hugepages_short(region: str, need_bytes: int, pool: HugePagePool) -> LocalError:
    """Make the refusal of a region whose huge pages are not there, with the command that helps."""
    need = align_up(need_bytes, pool.page_size) // pool.page_size
    total = pool.total + max(1, need - pool.free)
    command = _reserve_command(pool, total)
    return _short_error(region, need, pool.free, _page_text(pool), command)


def _huge_page_shortage(
    region: str, need_bytes: int, info: MemoryInfo, headroom: int, setting: str
) -> LocalError | None:
    """Return the refusal when huge pages cannot hold the region, None when they can."""
    page_size = info.default_huge_page
    pool = info.pool_of(page_size)
    if pool is None:
        fix = 'This kernel has no huge pages: use huge_pages = "off".'
        return _short_error(region, "some", 0, "any size", fix)
    shown = _page_text(pool)
    need = align_up(need_bytes, page_size) // page_size
    if pool.cgroup is not None and need * page_size > pool.cgroup.free:
        allowed = pool.cgroup.free // page_size
        fix = f"Raise {pool.cgroup.path} (now {_rounded(pool.cgroup.limit)})."
        return _short_error(region, need, min(allowed, pool.free), shown, fix)
    if need <= pool.free:
        return None
    missing = (need - pool.free) * page_size
    if missing + headroom > info.mem_available:
        # Telling to reserve what the host has not would send the operator round in circles.
        fits = pool.free * page_size + max(0, info.mem_available - headroom)
        largest = align_down(fits, page_size)
        remedy = f"Set {setting} to at most {format_size(largest)}: " if largest else ""
        whose = "the host" if info.node is None else f"NUMA node {info.node}"
        fix = f"{remedy}{whose} has no memory for more huge pages."
        return _short_error(region, need, pool.free, shown, fix[0].upper() + fix[1:])
    return hugepages_short(region, need_bytes, pool)


def _short_error(region: str, need: object, free: int, page_size: str, fix: str) -> LocalError:
    return LocalError(
        "hugepages_short",
        region=region,
        need=need,
        free=free,
        page_size=page_size,
        fix=fix,
    )


def _page_text(pool: HugePagePool) -> str:
    """The size of a page, and its node where that counts."""
    on_node = "" if pool.node is None else f" on NUMA node {pool.node}"
    return f"{format_size(pool.page_size)}{on_node}"


def _reserve_command(pool: HugePagePool, total: int) -> str:
    name = f"hugepages-{pool.page_size // 1024}kB"
    if pool.node is not None:
        where = f"/sys/devices/system/node/node{pool.node}/hugepages/{name}/nr_hugepages"
        return f"Run `echo {total} > {where}` as root, at each boot."
    if pool.page_size == 2 * MIB:
        return (
            f"Run `echo {total} > /proc/sys/vm/nr_hugepages` as root, and to keep it set "
            f"vm.nr_hugepages = {total} in /etc/sysctl.d/60-kvd.conf."
        )
    return f"Run `echo {total} > /sys/kernel/mm/hugepages/{name}/nr_hugepages` as root."


def _tightest(info: MemoryInfo) -> tuple[int, str]:
    """Return the bytes that can be taken and the limit that says so."""
    host = f"MemAvailable of {_rounded(info.mem_total)}"
    if info.node is not None:
        host = f"on NUMA node {info.node}, which has {_rounded(info.mem_total)}"
    if info.cgroup is not None and info.cgroup.free < info.mem_available:
        return info.cgroup.free, _cgroup_text(info.cgroup)
    return info.mem_available, host


def _cgroup_text(limit: CgroupLimit) -> str:
    return f"{limit.path} is {_rounded(limit.limit)}, {_rounded(limit.usage)} used"


def _rounded(num_bytes: int) -> str:
    """Write a measured size for people, exact to the MiB."""
    return format_size(align_down(num_bytes, MIB) if num_bytes >= MIB else num_bytes)
