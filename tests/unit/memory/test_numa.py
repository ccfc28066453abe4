"""NUMA nodes: other machines from fixture roots, the real calls on this one's nodes."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.errors import LocalError
from kvd.core.units import GIB, KIB, MIB
from kvd.memory import numa
from kvd.memory.memory_info import MemoryInfo, read_memory_info
from kvd.memory.numa import ANYWHERE, SAMPLES, Placement, bytes_by_node, choose_placement, place
from kvd.memory.preflight import check_fits, check_memory
from kvd.memory.region import MemfdRegion, make_region
from kvd_kernels.host import Mapping
from tests.capabilities import lacking
from tests.unit.memory.machines import machine, two_nodes

PAGE = os.sysconf("SC_PAGE_SIZE")


class Span:
    """Stands in for a mapping that nobody touches."""

    address = 1 << 40
    size = 64 * MIB

    def __init__(self) -> None:
        self.mapped: list[int] = []

    def populate(self, offset: int, length: int) -> str:
        self.mapped.append(offset)
        return "madvise"


class FakeKernel:
    """Stands in for the system calls: each answers with an errno, pages are where `where` says."""

    def __init__(self, code: int = 0, where: Callable[[int], int] = lambda page: 0) -> None:
        self.code = code
        self.where = where
        self.bound: list[tuple[int, int]] = []

    def __call__(self, which: int, *arguments: object) -> int:
        if which == 0:
            _, _, mode, words, bits, _ = arguments
            assert isinstance(mode, int)
            assert isinstance(bits, int)
            mask = sum(word << 64 * i for i, word in enumerate(words))  # type: ignore[arg-type, var-annotated]
            assert mask.bit_length() < bits
            self.bound.append((mode, mask))
        else:
            _, count, addresses, _, status, _ = arguments
            for i in range(count):  # type: ignore[call-overload]
                page = (addresses[i] - Span.address) // PAGE  # type: ignore[index]
                status[i] = self.where(page)  # type: ignore[index]
        return self.code


def refusal(asked: str, info: MemoryInfo) -> LocalError:
    """Choose a placement, which must be refused."""
    with pytest.raises(LocalError) as caught:
        choose_placement("pool", asked, info)
    assert caught.value.code == "numa_unusable"
    return caught.value


def test_node_that_does_not_exist(tmp_path: Path) -> None:
    error = refusal("7", two_nodes(tmp_path))
    assert str(error) == (
        "numa_unusable: pool is to be on NUMA node 7, but kvd may use memory of the NUMA nodes 0, "
        '2. Set numa_node to one of these, to "interleave" or to "any".'
    )


def test_node_without_memory(tmp_path: Path) -> None:
    """Node 1 of the fixture is online and has processors only."""
    assert "NUMA nodes 0, 2." in refusal("1", two_nodes(tmp_path)).what


def test_node_that_the_cpuset_forbids(tmp_path: Path) -> None:
    info = two_nodes(tmp_path, allowed="2-3")
    assert [node.number for node in info.nodes] == [2]
    assert "kvd may use memory of NUMA node 2 only." in refusal("0", info).what


@pytest.mark.parametrize("asked", ["0", "interleave"])
def test_kernel_without_numa(asked: str, tmp_path: Path) -> None:
    machine(tmp_path, "", "", {})
    error = refusal(asked, read_memory_info(tmp_path))
    assert error.what.endswith("but this kernel tells of no NUMA nodes.")
    assert choose_placement("pool", "any", read_memory_info(tmp_path)) == ANYWHERE


@pytest.mark.parametrize("online", ["", "x", "x-0", "-1", "0,,2", "3-x"])
def test_list_of_nodes_that_is_garbage(online: str, tmp_path: Path) -> None:
    machine(tmp_path, "", "", {"sys/devices/system/node/has_memory": f"{online}\n"})
    assert read_memory_info(tmp_path).nodes == ()


def test_each_node_has_its_own_memory_and_pages(tmp_path: Path) -> None:
    first, second = two_nodes(tmp_path).nodes
    assert (first.number, first.total, first.available) == (0, 32 * GIB, 20 * GIB)
    assert (second.number, second.total, second.available) == (2, 32 * GIB, 5 * GIB)
    (pool,) = second.huge_pages
    # 60 of 100 are free on it, but of the 80 free ones of the host 50 are promised to somebody.
    assert (pool.node, pool.total, pool.free) == (2, 100, 30)


def test_bound_region_gets_what_its_node_has(tmp_path: Path) -> None:
    info = two_nodes(tmp_path)
    on_second = choose_placement("pool", "2", info)
    assert on_second == Placement("2", (2,))
    assert check_fits("pool", 4 * GIB, "off", info, GIB, placement=on_second).placement == on_second
    with pytest.raises(LocalError) as caught:
        check_fits("pool", 8 * GIB, "off", info, GIB, placement=on_second)
    assert str(caught.value) == (
        "memory_short: pool needs 8GiB and 1GiB of headroom but only 5GiB is available (on NUMA "
        "node 2, which has 32GiB). Set pool.size to at most 4GiB, or free memory first. Other NUMA "
        "nodes are not used: see pool.numa_node."
    )
    assert check_fits("pool", 8 * GIB, "off", info, GIB).size == 8 * GIB
    everywhere = choose_placement("pool", "interleave", info)
    assert everywhere.nodes == (0, 2)
    assert check_fits("pool", 8 * GIB, "off", info, GIB, placement=everywhere).size == 8 * GIB


def test_huge_pages_of_other_nodes_do_not_count(tmp_path: Path) -> None:
    info = two_nodes(tmp_path)
    on_second = choose_placement("pool", "2", info)
    plan = check_fits("pool", 60 * MIB, "require", info, 0, placement=on_second)
    assert (plan.kind, plan.size) == ("hugetlb", 60 * MIB)
    with pytest.raises(LocalError) as caught:
        check_fits("pool", 62 * MIB, "require", info, 0, placement=on_second)
    assert str(caught.value) == (
        "hugepages_short: pool needs 31 huge pages of 2MiB on NUMA node 2 but 30 are free. Run "
        "`echo 101 > /sys/devices/system/node/node2/hugepages/hugepages-2048kB/nr_hugepages` as "
        "root, at each boot."
    )
    with pytest.raises(LocalError, match="NUMA node 2 has no memory for more huge pages"):
        check_fits("pool", 20 * GIB, "require", info, 0, placement=on_second)
    plan = check_fits("pool", 62 * MIB, "prefer", info, 0, placement=on_second)
    assert plan.kind == "base"
    assert "on NUMA node 2 but 30 are free" in plan.reason


def test_host_and_control_group_still_bind_a_node(tmp_path: Path) -> None:
    info = two_nodes(tmp_path, host_available=3 * GIB)
    assert info.on_node(0).mem_available == 3 * GIB
    with pytest.raises(LocalError, match="3GiB is available"):
        check_memory("pool", 4 * GIB, ANYWHERE.narrow(info), 0)


def test_node_that_went_offline_is_no_crash(tmp_path: Path) -> None:
    info = two_nodes(tmp_path)
    assert Placement("5", (5,)).narrow(info) == info


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.EPERM, "Let kvd call mbind (in a container: CAP_SYS_NICE), or"),
        (errno.ENOSYS, "Let kvd call mbind"),
        (errno.EINVAL, 'Set numa_node to "any".'),
    ],
)
def test_kernel_that_does_not_bind(code: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_call", FakeKernel(code))
    with pytest.raises(LocalError) as caught:
        place("pool", Span(), Placement("0", (0,)))
    assert f"the kernel refused ({os.strerror(code)})" in caught.value.what
    assert says in caught.value.remedy


def test_machine_whose_calls_have_unknown_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(LocalError, match="numa_unusable"):
        place("pool", Span(), Placement("0", (0,)))
    assert bytes_by_node(Span(), MIB, PAGE) == ()
    place("pool", Span(), ANYWHERE)


@pytest.mark.parametrize("nodes", [(0,), (2,), (63,), (64,), (130,)])
def test_mask_names_exactly_the_nodes(
    nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = FakeKernel()
    monkeypatch.setattr(numa, "_call", kernel)
    place("pool", Span(), Placement(str(nodes[0]), nodes))
    place("pool", Span(), Placement("interleave", (0, *nodes)))
    assert kernel.bound == [(2, 1 << nodes[0]), (3, 1 | 1 << nodes[0])]


def test_nodes_are_unknown_where_the_kernel_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_call", FakeKernel(errno.EPERM))
    assert bytes_by_node(Span(), MIB, PAGE) == ()
    monkeypatch.setattr(numa, "_call", FakeKernel(where=lambda page: -errno.EFAULT))
    assert bytes_by_node(Span(), MIB, PAGE) == ()
    assert bytes_by_node(Span(), 0, PAGE) == ()


@given(pages=st.integers(1, 3 * SAMPLES))
def test_interleaved_pages_are_seen_on_both_nodes(pages: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numa, "_call", FakeKernel(where=lambda page: page % 2))
        found = dict(bytes_by_node(Span(), pages * PAGE, PAGE))
    exact = {0: (pages + 1) // 2 * PAGE, 1: pages // 2 * PAGE}
    if pages <= SAMPLES:
        assert found == {node: count for node, count in exact.items() if count}
    else:
        assert all(abs(found[node] - exact[node]) < pages * PAGE // 5 for node in exact)


def test_pages_that_are_not_mapped_yet_are_mapped_and_asked_about_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    span = Span()
    absent = -errno.ENOENT
    where = lambda page: absent if page % 2 and not span.mapped else 1  # noqa: E731
    monkeypatch.setattr(numa, "_call", FakeKernel(where=where))
    assert bytes_by_node(span, 4 * PAGE, PAGE) == ((1, 4 * PAGE),)
    assert span.mapped == [PAGE, 3 * PAGE]


def test_pages_elsewhere_are_strays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_call", FakeKernel(where=lambda page: int(page >= 8)))
    found = bytes_by_node(Span(), 10 * PAGE, PAGE)
    assert found == ((0, 8 * PAGE), (1, 2 * PAGE))
    assert Placement("0", (0,)).strays(found) == 2 * PAGE
    assert Placement("interleave", (0, 1)).strays(found) == 0
    assert ANYWHERE.strays(found) == 0


# This machine -------------------------------------------------------------------------------------


def policy_of(mapping: Mapping) -> str:
    """The policy of a mapping as /proc/self/numa_maps has it."""
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        address, policy, *_ = line.split()
        if int(address, 16) == mapping.address:
            return policy
    raise AssertionError("numa_maps does not list the mapping")


@pytest.fixture
def node() -> int:
    """A NUMA node of this machine."""
    nodes = read_memory_info().nodes
    if not nodes:
        lacking("NUMA nodes (/sys/devices/system/node)", "mount -t sysfs sysfs /sys")
    return nodes[0].number


def test_the_kernel_takes_the_policy_and_pages_are_where_they_should(node: int) -> None:
    for asked, policy in ((str(node), f"bind:{node}"), ("interleave", "interleave:"), ("any", "")):
        region = make_region("pool", MIB, "off", 0, numa_node=asked)
        assert policy_of(region.mapping).startswith(policy)
        assert list(region.populate_steps(512 * KIB)) == [512 * KIB, MIB]
        found = region.snapshot()
        assert (found.node, found.stray) == (asked, 0)
        assert sum(count for _, count in found.nodes) == MIB
        if asked == str(node):
            assert found.nodes == ((node, MIB),)
        region.close()


def test_region_of_an_earlier_life_is_looked_at_like_any_other(node: int) -> None:
    first = make_region("pool", MIB, "off", 0)
    list(first.populate_steps(MIB))
    region = MemfdRegion.adopt("pool", os.dup(first.fd), MIB, survives=("engine",))
    first.close()
    region.settle(Placement(str(node), (node,)), lock=True)
    found = region.snapshot()
    assert (found.node, found.nodes, found.stray) == (str(node), ((node, MIB),), 0)
    assert found.locked
    assert policy_of(region.mapping) == f"bind:{node}"
    region.close()


@pytest.mark.usefixtures("huge_pages")
def test_huge_pages_come_from_the_node(node: int) -> None:
    region = make_region("pool", 4 * MIB, "require", 0, numa_node=str(node))
    assert policy_of(region.mapping) == f"bind:{node}"
    assert list(region.populate_steps(4 * MIB)) == [4 * MIB]
    assert region.snapshot().nodes == ((node, 4 * MIB),)
    region.close()


def test_wrong_node_leaves_nothing(memfds: Callable[[], list[str]]) -> None:
    with pytest.raises(LocalError, match="numa_unusable"):
        make_region("pool", MIB, "off", 0, numa_node="1023")
    assert memfds() == []


def test_the_kernel_itself_refuses_a_node_that_is_not_there(
    memfds: Callable[[], list[str]],
) -> None:
    """The nodes may have changed since they were read."""
    fd = os.memfd_create("numa", os.MFD_CLOEXEC)
    os.ftruncate(fd, MIB)
    mapping = Mapping(fd, MIB, writable=True)
    with pytest.raises(LocalError, match="the kernel refused"):
        place("pool", mapping, Placement("1000", (1000,)))
    mapping.close()
    os.close(fd)
    assert ctypes.sizeof(ctypes.c_ulong) == 8
    assert memfds() == []
