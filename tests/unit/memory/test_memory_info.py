"""What the host can give: fixture machines with either kind of control groups, and this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.core.units import GIB, KIB, MIB
from kvd.memory.memory_info import CgroupLimit, read_memory_info
from tests.unit.memory.machines import machine, write

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V1_HUGETLB = "36 31 0:33 / /sys/fs/cgroup/hugetlb rw - cgroup cgroup rw,hugetlb\n"


def test_nothing_readable_means_nothing_available(tmp_path: Path) -> None:
    info = read_memory_info(tmp_path)
    assert (info.mem_total, info.mem_available, info.cgroup) == (0, 0, None)
    assert (info.huge_pages, info.default_huge_page, info.shmem_thp) == ((), 0, "")
    assert info.pool_of(2 * MIB) is None


def test_garbage_is_no_limit(tmp_path: Path) -> None:
    machine(
        tmp_path,
        "garbage\n1 2 3\n30 23 0:26 / - cgroup2\n" + V2_MOUNT,
        "garbage\n0::/a\n",
        {
            "sys/fs/cgroup/a/memory.max": "a lot\n",
            "sys/fs/cgroup/a/memory.high": "9" * 30,
            "sys/kernel/mm/hugepages/hugepages-xkB/nr_hugepages": "3",
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "x",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "nonsense",
        },
    )
    info = read_memory_info(tmp_path)
    assert info.cgroup is None
    assert info.shmem_thp == ""
    (pool,) = info.huge_pages
    assert (pool.total, pool.free) == (0, 0)


def test_meminfo_is_in_bytes_and_counts_are_left_out(tmp_path: Path) -> None:
    machine(tmp_path, "", "", {})
    info = read_memory_info(tmp_path)
    assert (info.mem_total, info.mem_available) == (64 * GIB, 32 * GIB)
    assert info.default_huge_page == 2 * MIB


def test_meminfo_without_available_falls_back_to_free(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 4096 kB\nMemFree: 1024 kB\n"})
    assert read_memory_info(tmp_path).mem_available == MIB


def test_v2_tightest_level_counts_not_the_innermost(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    machine(
        tmp_path,
        V2_MOUNT,
        "0::/pods/kvd\n",
        {
            f"{group}/pods/memory.max": f"{4 * GIB}\n",
            f"{group}/pods/memory.current": f"{3 * GIB}\n",
            f"{group}/pods/memory.stat": f"anon 5\nfile 6\ninactive_file {GIB}\n",
            f"{group}/pods/kvd/memory.max": "max\n",
            f"{group}/pods/kvd/memory.high": f"{10 * GIB}\n",
            f"{group}/pods/kvd/memory.current": f"{MIB}\n",
        },
    )
    info = read_memory_info(tmp_path)
    assert info.cgroup == CgroupLimit("/sys/fs/cgroup/pods/memory.max", 4 * GIB, 2 * GIB)
    assert info.cgroup.free == 2 * GIB


def test_v2_high_counts_like_max(tmp_path: Path) -> None:
    machine(
        tmp_path,
        V2_MOUNT,
        "0::/kvd\n",
        {
            "sys/fs/cgroup/kvd/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/kvd/memory.high": f"{6 * GIB}\n",
            "sys/fs/cgroup/kvd/memory.current": f"{7 * GIB}\n",
        },
    )
    info = read_memory_info(tmp_path)
    assert info.cgroup is not None
    assert info.cgroup.path == "/sys/fs/cgroup/kvd/memory.high"
    assert info.cgroup.free == 0


def test_v1_limit_and_unlimited(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    machine(
        tmp_path,
        V1_MOUNT,
        "4:memory,hugetlb:/kvd\n0::/\n",
        {
            f"{group}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{group}/memory.usage_in_bytes": "77\n",
            f"{group}/kvd/memory.limit_in_bytes": f"{2 * GIB}\n",
            f"{group}/kvd/memory.usage_in_bytes": f"{GIB}\n",
            f"{group}/kvd/memory.stat": f"inactive_file 5\ntotal_inactive_file {MIB}\n",
        },
    )
    info = read_memory_info(tmp_path)
    assert info.cgroup == CgroupLimit(
        "/sys/fs/cgroup/memory/kvd/memory.limit_in_bytes", 2 * GIB, GIB - MIB
    )


@pytest.mark.parametrize(
    ("mount_root", "member"),
    [
        ("/docker/abc", "/docker/abc"),  # no namespace: both name the group of the container
        ("/", "/"),  # a namespace of its own
        ("/docker/abc", "/elsewhere"),  # the group is not visible: the mount counts
        ("/", "/../outside"),  # likewise, as a namespace shows it
    ],
)
def test_limit_seen_from_inside_a_container(mount_root: str, member: str, tmp_path: Path) -> None:
    machine(
        tmp_path,
        f"30 23 0:26 {mount_root} /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
        f"0::{member}\n",
        {"sys/fs/cgroup/memory.max": f"{GIB}\n", "sys/fs/cgroup/memory.current": "4096\n"},
    )
    info = read_memory_info(tmp_path)
    assert info.cgroup == CgroupLimit("/sys/fs/cgroup/memory.max", GIB, 4 * KIB)


def test_huge_page_pools_and_their_control_group(tmp_path: Path) -> None:
    pools = "sys/kernel/mm/hugepages"
    group = "sys/fs/cgroup/hugetlb/kvd"
    machine(
        tmp_path,
        V1_HUGETLB,
        "7:hugetlb:/kvd\n",
        {
            f"{pools}/hugepages-1048576kB/nr_hugepages": "2\n",
            f"{pools}/hugepages-1048576kB/free_hugepages": "2\n",
            f"{pools}/hugepages-2048kB/nr_hugepages": "100\n",
            f"{pools}/hugepages-2048kB/free_hugepages": "60\n",
            f"{pools}/hugepages-2048kB/resv_hugepages": "25\n",
            f"{group}/hugetlb.2MB.limit_in_bytes": f"{20 * MIB}\n",
            f"{group}/hugetlb.2MB.usage_in_bytes": f"{4 * MIB}\n",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [advise] never\n",
            "sys/kernel/mm/transparent_hugepage/hpage_pmd_size": "2097152\n",
        },
    )
    info = read_memory_info(tmp_path)
    small, large = info.huge_pages
    assert (small.page_size, small.total, small.free) == (2 * MIB, 100, 35)
    assert small.cgroup is not None
    assert small.cgroup.free == 16 * MIB
    assert (large.page_size, large.total, large.free, large.cgroup) == (GIB, 2, 2, None)
    assert info.pool_of(2 * MIB) == small
    assert (info.shmem_thp, info.thp_size) == ("advise", 2 * MIB)


def test_this_machine_can_be_read() -> None:
    info = read_memory_info()
    assert 0 < info.mem_available <= info.mem_total
    assert info.cgroup is None or info.cgroup.limit > 0
    assert all(pool.page_size % (4 * KIB) == 0 for pool in info.huge_pages)
