"""Before anything is allocated: what does not fit is refused with the number that does."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.errors import LocalError
from kvd.core.units import GIB, KIB, MIB, TIB, parse_size
from kvd.memory.memory_info import CgroupLimit, HugePagePool, MemoryInfo
from kvd.memory.preflight import HugePagesMode, check_fits, check_memory, hugepages_short

NO_HUGE_PAGES = HugePagePool(2 * MIB, 0, 0, None)


def host(
    *,
    available: int = 32 * GIB,
    cgroup: CgroupLimit | None = None,
    pool: HugePagePool | None = NO_HUGE_PAGES,
    shmem_thp: str = "never",
) -> MemoryInfo:
    """Make a host of 64 GiB."""
    return MemoryInfo(
        mem_total=64 * GIB,
        mem_available=available,
        cgroup=cgroup,
        huge_pages=() if pool is None else (pool,),
        default_huge_page=0 if pool is None else pool.page_size,
        shmem_thp=shmem_thp,
        thp_size=2 * MIB,
    )


def refusal(
    info: MemoryInfo, need: int, mode: HugePagesMode = "off", headroom: int = 512 * MIB
) -> LocalError:
    """Check, which must be refused."""
    with pytest.raises(LocalError) as caught:
        check_fits("pool", need, mode, info, headroom)
    return caught.value


@pytest.mark.parametrize("need", [0, -1])
def test_size_that_is_no_size(need: int) -> None:
    with pytest.raises(ValueError, match=f"need_bytes must be positive, got {need}"):
        check_fits("pool", need, "off", host(), 0)


def test_pool_larger_than_the_host() -> None:
    error = refusal(host(), 64 * GIB)
    assert str(error) == (
        "memory_short: pool needs 64GiB and 512MiB of headroom but only 32GiB is available "
        "(MemAvailable of 64GiB). Set pool.size to at most 31.5GiB, or free memory first."
    )


def test_pool_larger_than_its_control_group() -> None:
    limit = CgroupLimit("/sys/fs/cgroup/kvd/memory.max", 4 * GIB, GIB + 1)
    error = refusal(host(cgroup=limit), 3 * GIB)
    assert error.what == (
        "pool needs 3GiB and 512MiB of headroom but only 3071MiB is available "
        "(/sys/fs/cgroup/kvd/memory.max is 4GiB, 1GiB used)."
    )
    assert error.remedy == "Set pool.size to at most 2559MiB, or free memory first."


def test_control_group_that_is_looser_than_the_host_does_not_count() -> None:
    limit = CgroupLimit("/sys/fs/cgroup/memory.max", 60 * GIB, 0)
    assert "MemAvailable" in refusal(host(cgroup=limit), 40 * GIB).what


def test_host_with_less_than_the_headroom() -> None:
    error = refusal(host(available=100 * MIB), MIB)
    assert error.remedy == "Free memory first, or lower pool.headroom (512MiB)."


def test_decode_region_names_its_own_setting() -> None:
    with pytest.raises(LocalError) as caught:
        check_fits("region d0", 1 << 60, "off", host(), 0, setting="the region")
    assert caught.value.what.startswith("region d0 needs 1048576TiB and 0B of headroom")
    assert caught.value.remedy.startswith("Set the region to at most 32GiB")


def test_second_daemon_is_noticed_while_populating() -> None:
    check_memory("pool", 8 * GIB, host(available=9 * GIB), GIB)
    with pytest.raises(LocalError) as caught:
        check_memory("pool", 8 * GIB, host(available=6 * GIB), GIB, populated=4 * GIB)
    assert caught.value.remedy.startswith("Set pool.size to at most 9GiB")


@pytest.mark.parametrize(
    ("total", "free", "want"), [(0, 0, 512), (100, 100, 512), (1000, 10, 1502), (600, 511, 601)]
)
def test_huge_pages_required_and_short(total: int, free: int, want: int) -> None:
    info = host(pool=HugePagePool(2 * MIB, total, free, None))
    error = refusal(info, GIB, "require")
    assert error.code == "hugepages_short"
    assert error.what == f"pool needs 512 huge pages of 2MiB but {free} are free."
    assert f"`echo {want} > /proc/sys/vm/nr_hugepages`" in error.remedy
    assert f"vm.nr_hugepages = {want} in /etc/sysctl.d/60-kvd.conf" in error.remedy


def test_remedy_for_another_page_size_uses_its_own_file() -> None:
    info = host(pool=HugePagePool(512 * MIB, 1, 0, None))
    error = refusal(info, GIB, "require")
    assert error.what == "pool needs 2 huge pages of 512MiB but 0 are free."
    assert "echo 3 > /sys/kernel/mm/hugepages/hugepages-524288kB/nr_hugepages" in error.remedy


def test_huge_pages_that_the_host_could_not_reserve() -> None:
    info = host(pool=HugePagePool(2 * MIB, 512, 512, None))
    error = refusal(info, 40 * GIB, "require")
    assert error.remedy == (
        "Set pool.size to at most 32.5GiB: the host has no memory for more huge pages."
    )
    info = host(available=0, pool=HugePagePool(2 * MIB, 0, 0, None))
    assert refusal(info, GIB, "require").remedy == "The host has no memory for more huge pages."


def test_huge_pages_that_the_control_group_forbids() -> None:
    limit = CgroupLimit("/sys/fs/cgroup/hugetlb.2MB.max", 0, 0)
    info = host(pool=HugePagePool(2 * MIB, 1000, 1000, limit))
    error = refusal(info, GIB, "require")
    assert error.what == "pool needs 512 huge pages of 2MiB but 0 are free."
    assert error.remedy == "Raise /sys/fs/cgroup/hugetlb.2MB.max (now 0B)."


def test_kernel_without_huge_pages() -> None:
    error = refusal(host(pool=None), GIB, "require")
    assert error.what == "pool needs some huge pages of any size but 0 are free."
    assert 'use huge_pages = "off"' in error.remedy


@pytest.mark.parametrize("mode", ["require", "prefer"])
def test_huge_pages_that_are_free_are_used(mode: HugePagesMode) -> None:
    info = host(available=MIB, pool=HugePagePool(2 * MIB, 600, 512, None))
    plan = check_fits("pool", GIB - 1, mode, info, 512 * MIB)
    assert (plan.kind, plan.page_size, plan.size, plan.asked) == ("hugetlb", 2 * MIB, GIB, GIB - 1)
    assert plan.required == (mode == "require")


def test_prefer_falls_back_and_says_why() -> None:
    plan = check_fits("pool", GIB, "prefer", host(), 512 * MIB, page_size=4 * KIB)
    assert (plan.kind, plan.page_size, plan.size, plan.required) == ("base", 4 * KIB, GIB, False)
    assert "pool needs 512 huge pages of 2MiB but 0 are free" in plan.reason
    assert "echo 512 > /proc/sys/vm/nr_hugepages" in plan.reason


@pytest.mark.parametrize("setting", ["always", "within_size", "advise", "force"])
def test_prefer_falls_back_to_transparent_huge_pages(setting: str) -> None:
    plan = check_fits("pool", GIB, "prefer", host(shmem_thp=setting), 0)
    assert plan.kind == "thp"
    assert "Transparent huge pages are used instead." in plan.reason
    assert check_fits("pool", GIB, "off", host(shmem_thp=setting), 0).kind == "base"


@pytest.mark.parametrize("setting", ["never", "deny", ""])
def test_prefer_without_transparent_huge_pages(setting: str) -> None:
    assert check_fits("pool", GIB, "prefer", host(shmem_thp=setting), 0).kind == "base"


def test_prefer_with_neither_pages_nor_memory_is_refused() -> None:
    assert refusal(host(), 64 * GIB, "prefer").code == "memory_short"


def test_off_ignores_free_huge_pages() -> None:
    info = host(pool=HugePagePool(2 * MIB, 600, 600, None))
    plan = check_fits("pool", GIB, "off", info, 0)
    assert (plan.kind, plan.reason) == ("base", "huge pages are off")


def test_base_pages_may_be_larger_than_4_kib() -> None:
    plan = check_fits("pool", GIB + 1, "off", host(), 0, page_size=64 * KIB)
    assert (plan.size, plan.page_size) == (GIB + 64 * KIB, 64 * KIB)


def test_shortage_met_at_mmap_always_asks_for_more_pages() -> None:
    pool = HugePagePool(2 * MIB, 512, 512, None)  # free again by the time it is looked at
    assert "echo 513 >" in hugepages_short("pool", GIB, pool).remedy


@given(
    need=st.integers(1, 4 * TIB),
    available=st.integers(0, 4 * TIB),
    headroom=st.integers(0, TIB),
    group=st.none() | st.tuples(st.integers(0, 4 * TIB), st.integers(0, 4 * TIB)),
)
def test_the_size_named_in_the_remedy_fits(
    need: int, available: int, headroom: int, group: tuple[int, int] | None
) -> None:
    limit = None if group is None else CgroupLimit("/memory.max", *group)
    info = host(available=available, cgroup=limit)
    try:
        plan = check_fits("pool", need, "off", info, headroom)
    except LocalError as error:
        remedy = error.remedy
    else:
        assert plan.size + headroom <= available
        assert limit is None or plan.size + headroom <= limit.free
        return
    named = re.match(r"Set pool\.size to at most (\S+),", remedy)
    if named is None:
        assert "lower pool.headroom" in remedy
    else:
        assert parse_size(named[1]) < need
        check_fits("pool", parse_size(named[1]), "off", info, headroom)
