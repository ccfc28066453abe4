"""What the host can give: free memory, control-group limits, huge pages, NUMA nodes.

Everything is read below a root directory, so that tests can show any machine. A file that is
missing or unreadable means "no such limit", never an error: containers hide many of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from kvd.core.units import KIB

# cgroup v1 writes "no limit" as the largest page-aligned signed 64-bit number.
_NO_LIMIT: Final = 1 << 62
_NODES_MAX: Final = 1024  # what a kernel can be built for


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    """A limit that a control group sets; bytes.

    path:  the file that holds the limit.
    usage: what the group uses, page cache that the kernel can drop not counted.
    """

    path: str
    limit: int
    usage: int

    @property
    def free(self) -> int:
        """Bytes left, never negative."""
        return max(0, self.limit - self.usage)


@dataclass(frozen=True, slots=True)
class HugePagePool:
    """The kernel's pool of huge pages of one size.

    page_size: bytes.
    total:     pages in the pool, including those lent beyond it (surplus).
    free:      pages that can still be had: free and not promised to another mapping.
    cgroup:    tightest control-group limit on such pages (bytes), None without one.
    node:      the NUMA node whose part of the pool this is, None for the whole pool.
    """

    page_size: int
    total: int
    free: int
    cgroup: CgroupLimit | None
    node: int | None = None


@dataclass(frozen=True, slots=True)
class NumaNode:
    """The memory of one NUMA node that this process may use; bytes.

    available:  free, or page cache that the kernel drops first. The kernel tells no MemAvailable
                of a node, and this is less than that would be.
    huge_pages: the node's part of each pool.
    """

    number: int
    total: int
    available: int
    huge_pages: tuple[HugePagePool, ...]


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """What the host can give at this moment; bytes.

    default_huge_page: size of a huge page unless asked otherwise, 0 without huge pages.
    shmem_thp:         /sys/.../shmem_enabled: whether shared memory gets transparent huge pages:
                       always, within_size, advise, never, deny, force or "" (unknown).
    thp_size:          size of a transparent huge page, 0 when unknown.
    nodes:             NUMA nodes with memory for this process; none where the kernel tells none.
    node:              the one node that all of this is about, None for the whole host.
    """

    mem_total: int
    mem_available: int
    cgroup: CgroupLimit | None
    huge_pages: tuple[HugePagePool, ...]
    default_huge_page: int
    shmem_thp: str
    thp_size: int
    nodes: tuple[NumaNode, ...] = ()
    node: int | None = None

    def on_node(self, number: int) -> MemoryInfo:
        """Return what one of `nodes` can give: limits of the whole host go on to count.

        Unchanged when that node has gone meanwhile: mapping its pages says so.
        """
        found = next((node for node in self.nodes if node.number == number), None)
        if found is None:
            return self
        return replace(
            self,
            mem_total=found.total,
            mem_available=min(found.available, self.mem_available),
            huge_pages=found.huge_pages,
            node=number,
        )

    def pool_of(self, page_size: int) -> HugePagePool | None:
        """Return the pool of huge pages of a size, None when the kernel has none."""
        return next((pool for pool in self.huge_pages if pool.page_size == page_size), None)


def read_memory_info(root: Path = Path("/")) -> MemoryInfo:
    """Read the present state of the host.

    Args: root: directory that holds `proc` and `sys`; another one only in tests.
    """
    meminfo = _read_meminfo(root / "proc/meminfo")
    groups = _Cgroups(root)
    thp = root / "sys/kernel/mm/transparent_hugepage"
    pools = tuple(_read_pools(root, groups))
    return MemoryInfo(
        mem_total=meminfo.get("MemTotal", 0),
        mem_available=meminfo.get("MemAvailable", meminfo.get("MemFree", 0)),
        cgroup=groups.memory_limit(),
        huge_pages=pools,
        default_huge_page=meminfo.get("Hugepagesize", 0),
        shmem_thp=_chosen(_read(thp / "shmem_enabled")),
        thp_size=_read_int(thp / "hpage_pmd_size") or 0,
        nodes=tuple(_read_nodes(root, pools)),
    )


def _read_meminfo(path: Path) -> dict[str, int]:
    """Return the sizes of a meminfo file in bytes; counts (HugePages_*) are left out."""
    found = {}
    for line in _read(path).splitlines():
        name, _, rest = line.partition(":")
        name = name.split()[-1] if name.strip() else ""  # the file of a node: "Node 0 MemFree"
        parts = rest.split()
        if len(parts) == 2 and parts[0].isdecimal() and parts[1] == "kB":
            found[name] = int(parts[0]) * KIB
    return found


def _read_pools(root: Path, groups: _Cgroups) -> Iterator[HugePagePool]:
    base = root / "sys/kernel/mm/hugepages"
    sizes = []
    for directory in base.glob("hugepages-*kB"):
        digits = directory.name.removeprefix("hugepages-").removesuffix("kB")
        if digits.isdecimal():
            sizes.append((int(digits) * KIB, directory))
    for page_size, directory in sorted(sizes):
        free = _read_int(directory / "free_hugepages") or 0
        reserved = _read_int(directory / "resv_hugepages") or 0
        yield HugePagePool(
            page_size=page_size,
            total=_read_int(directory / "nr_hugepages") or 0,
            free=max(0, free - reserved),
            cgroup=groups.huge_page_limit(page_size),
        )


def _read_nodes(root: Path, pools: tuple[HugePagePool, ...]) -> Iterator[NumaNode]:
    """Yield the nodes that have memory and that the cpuset of this process allows."""
    base = root / "sys/devices/system/node"
    status = _read(root / "proc/self/status")
    _, told, rest = status.partition("Mems_allowed_list:")
    allowed = _read_list(rest.partition("\n")[0]) if told else None
    for number in _read_list(_read(base / "has_memory") or _read(base / "online")):
        if allowed is not None and number not in allowed:
            continue
        directory = base / f"node{number}"
        sizes = _read_meminfo(directory / "meminfo")
        droppable = sizes.get("Inactive(file)", 0) + sizes.get("SReclaimable", 0) // 2
        yield NumaNode(
            number=number,
            total=sizes.get("MemTotal", 0),
            available=sizes.get("MemFree", 0) + droppable,
            huge_pages=tuple(_pool_on(directory, number, pool) for pool in pools),
        )


def _pool_on(directory: Path, number: int, whole: HugePagePool) -> HugePagePool:
    """Return a node's part of a pool.

    Promised pages are counted for the whole host only: they may be any of the free ones.
    """
    own = directory / f"hugepages/hugepages-{whole.page_size // KIB}kB"
    free = min(_read_int(own / "free_hugepages") or 0, whole.free)
    total = _read_int(own / "nr_hugepages") or 0
    return replace(whole, total=total, free=free, node=number)


def _read_list(text: str) -> list[int]:
    """Return the numbers of a kernel list: `0-2,5` -> 0, 1, 2, 5; [] for anything else."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return []
        found.extend(range(int(first), min(int(last or first), int(first) + _NODES_MAX) + 1))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() and len(text) <= 20 else None


def _chosen(text: str) -> str:
    """Return the bracketed word of a sysfs choice: `always [never]` -> never."""
    return text.partition("[")[2].partition("]")[0]


class _Cgroups:
    """The control groups of this process, from the innermost outwards, both hierarchies."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._mounts = tuple(_cgroup_mounts(root))
        self._member = dict(_cgroup_membership(root))

    def memory_limit(self) -> CgroupLimit | None:
        """Return the limit on memory that leaves least free, None without any."""
        found = []
        for directory in self._levels("memory"):
            for name, usage in (
                ("memory.max", "memory.current"),
                ("memory.high", "memory.current"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            ):
                limit = self._limit(directory / name, directory / usage)
                if limit is not None:
                    cache = _droppable_cache(directory)
                    found.append(CgroupLimit(limit.path, limit.limit, max(0, limit.usage - cache)))
        return min(found, key=lambda limit: limit.free, default=None)

    def huge_page_limit(self, page_size: int) -> CgroupLimit | None:
        """Return the limit on huge pages of a size that leaves least free, None without any."""
        label = _huge_page_label(page_size)
        found = []
        for directory in self._levels("hugetlb"):
            for name, usage in (
                (f"hugetlb.{label}.max", f"hugetlb.{label}.current"),
                (f"hugetlb.{label}.rsvd.max", f"hugetlb.{label}.rsvd.current"),
                (f"hugetlb.{label}.limit_in_bytes", f"hugetlb.{label}.usage_in_bytes"),
            ):
                limit = self._limit(directory / name, directory / usage)
                if limit is not None:
                    found.append(limit)
        return min(found, key=lambda limit: limit.free, default=None)

    def _limit(self, limit_file: Path, usage_file: Path) -> CgroupLimit | None:
        limit, usage = _read_int(limit_file), _read_int(usage_file)
        if limit is None or limit >= _NO_LIMIT:
            return None
        shown = "/" + limit_file.relative_to(self._root).as_posix()
        return CgroupLimit(shown, limit, usage or 0)

    def _levels(self, controller: str) -> Iterator[Path]:
        """Yield the directories whose limits of a controller bind this process."""
        for kind, mount_root, mount_point in self._mounts:
            if kind not in (controller, ""):
                continue
            inner = _below(self._member.get(kind, "/"), mount_root)
            base = self._root / mount_point.lstrip("/")
            directory = base / inner
            # A container may name a group that it cannot see: then only the mount itself counts.
            while directory != base and base in directory.parents:
                yield directory
                directory = directory.parent
            yield base


def _cgroup_mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (controller or "" for v2, root of the mount, mount point)."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or len(tail) < 3:
            continue
        if tail[0] == "cgroup2":
            yield "", fields[3], fields[4]
        elif tail[0] == "cgroup":
            for controller in {"memory", "hugetlb"} & set(tail[2].split(",")):
                yield controller, fields[3], fields[4]


def _cgroup_membership(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (controller or "" for v2, path of this process's group)."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield "", path
        else:
            for controller in controllers.split(","):
                yield controller, path


def _below(path: str, mount_root: str) -> PurePosixPath:
    """Return a group's path as seen from a mount that shows only a part of the hierarchy."""
    group = PurePosixPath(path)
    if ".." in group.parts:
        return PurePosixPath()
    for ancestor in (mount_root, "/"):
        if group.is_relative_to(ancestor):
            return group.relative_to(ancestor)
    return PurePosixPath()


def _droppable_cache(directory: Path) -> int:
    """Return the bytes of page cache in a group that the kernel drops before it fails anybody."""
    wanted = {"total_inactive_file": 0, "inactive_file": 0}
    for line in _read(directory / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in wanted and value.isdecimal():
            wanted[name] = int(value)
    return wanted["total_inactive_file"] or wanted["inactive_file"]


def _huge_page_label(page_size: int) -> str:
    """Return the size as control groups spell it: 64KB, 2MB, 1GB."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (KIB, "KB")):
        if page_size >= unit:
            return f"{page_size // unit}{name}"
    return f"{page_size}B"
