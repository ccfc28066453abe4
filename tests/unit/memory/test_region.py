"""Regions: a failure leaves nothing, the pages are what was promised, nobody can cut them short."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.core.errors import LocalError
from kvd.core.units import GIB, KIB, MIB
from kvd.memory import region as region_module
from kvd.memory.memory_info import HugePagePool, MemoryInfo, read_memory_info
from kvd.memory.preflight import PagePlan, check_fits
from kvd.memory.region import MemfdRegion, make_region
from kvd_kernels.host import Mapping

ROOT = Path(__file__).parents[3]
PAGE = os.sysconf("SC_PAGE_SIZE")

Memfds = Callable[[], list[str]]


def base_plan(size: int) -> PagePlan:
    """Plan ordinary pages."""
    return PagePlan(size, "base", PAGE, size, False, "test")


def huge_plan(num_pages: int, *, required: bool = True) -> PagePlan:
    """Plan huge pages of the kernel's pool."""
    size = num_pages * 2 * MIB
    return PagePlan(size, "hugetlb", 2 * MIB, size, required, "test")


@pytest.fixture
def region() -> Iterator[MemfdRegion]:
    """Give a region of 1 MiB of ordinary pages."""
    made = MemfdRegion.create("pool", base_plan(MIB))
    yield made
    made.close()


class BrokenMapping:
    """Stands in for Mapping where the kernel refuses to map, or to populate after a while."""

    def __init__(self, fail_at: str, error: int) -> None:
        self.fail_at = fail_at
        self.error = error

    def __call__(self, fd: int, length: int, *, writable: bool) -> BrokenMapping:
        if self.fail_at == "map":
            raise OSError(self.error, os.strerror(self.error))
        self.mapping = Mapping(fd, length, writable=writable)
        return self

    @property
    def address(self) -> int:
        return self.mapping.address

    @property
    def size(self) -> int:
        return self.mapping.size

    def smaps_page_kb(self) -> int:
        return 4 if self.fail_at == "page size" else self.mapping.smaps_page_kb()

    def populate(self, offset: int, length: int) -> str:
        if offset > 0:
            raise OSError(self.error, os.strerror(self.error))
        return self.mapping.populate(offset, length)

    def close(self) -> None:
        self.mapping.close()


@pytest.mark.parametrize(
    "name", ["", "../../etc/passwd", "a/b", "a\0b", "-", "pool 1", "ä", "x" * 201]
)
def test_name_that_could_be_a_path_or_break_a_listing(name: str, memfds: Memfds) -> None:
    with pytest.raises(ValueError, match=r"must have 1 to 200 letters, digits or \._-"):
        MemfdRegion.create(name, base_plan(MIB))
    assert memfds() == []


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EAGAIN, errno.EPERM])
def test_kernel_refuses_the_mapping(
    error: int, memfds: Memfds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_module, "Mapping", BrokenMapping("map", error))
    with pytest.raises(LocalError) as caught:
        MemfdRegion.create("pool", base_plan(MIB))
    assert caught.value.code == "memory_short"
    assert "pool needs 1MiB but only a part is available (the kernel refused: " in caught.value.what
    assert memfds() == []


def test_file_size_that_a_limit_forbids(memfds: Memfds) -> None:
    with pytest.raises(LocalError) as caught:
        MemfdRegion.create("pool", base_plan((1 << 63) - PAGE))
    assert caught.value.code == "memory_short"
    assert memfds() == []


@pytest.mark.usefixtures("huge_pages")
def test_huge_pages_gone_since_the_plan(memfds: Memfds) -> None:
    with pytest.raises(LocalError) as caught:
        MemfdRegion.create("pool", huge_plan(1 << 24))
    assert caught.value.code == "hugepages_short"
    assert caught.value.context["need"] == str(1 << 24)
    assert "> /proc/sys/vm/nr_hugepages`" in caught.value.remedy
    assert memfds() == []


def test_smaller_pages_than_planned_are_an_error(
    huge_pages: int, memfds: Memfds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_module, "Mapping", BrokenMapping("page size", 0))
    with pytest.raises(LocalError) as caught:
        MemfdRegion.create("pool", huge_plan(huge_pages))
    assert caught.value.code == "hugepages_short"
    assert "The kernel gave pages of 4KiB" in caught.value.remedy
    assert memfds() == []


def test_memory_that_ends_while_populating(memfds: Memfds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "Mapping", BrokenMapping("populate", errno.ENOMEM))
    made = MemfdRegion.create("pool", base_plan(MIB))
    steps = made.populate_steps(256 * KIB)
    assert next(steps) == 256 * KIB
    with pytest.raises(LocalError) as caught:
        next(steps)
    assert caught.value.code == "memory_short"
    assert caught.value.context["need"] == "768KiB"
    assert made.populated == 256 * KIB
    made.close()
    assert memfds() == []


def test_second_daemon_takes_the_memory_while_populating(region: MemfdRegion) -> None:
    asked = []

    def guard(remaining: int) -> None:
        asked.append(remaining)
        if len(asked) == 3:
            raise LocalError("memory_short", region="pool")

    steps = region.populate_steps(256 * KIB, guard)
    with pytest.raises(LocalError):
        list(steps)
    assert asked == [MIB, 768 * KIB, 512 * KIB]
    assert region.populated == 512 * KIB


def test_step_that_is_no_step(region: MemfdRegion) -> None:
    with pytest.raises(ValueError, match="step_bytes must be positive, got 0"):
        list(region.populate_steps(0))


def test_closed_region_is_refused_everywhere(region: MemfdRegion, memfds: Memfds) -> None:
    steps = region.populate_steps(256 * KIB)
    next(steps)
    region.close()
    region.close()
    assert list(steps) == []
    for call in (region.readonly_fd, region.snapshot):
        with pytest.raises(ValueError, match="region pool is closed"):
            call()
    assert memfds() == []


def test_view_that_is_alive_stops_close_and_changes_nothing(region: MemfdRegion) -> None:
    view = region.mapping.view(0, 16)
    with pytest.raises(BufferError):
        region.close()
    assert region.snapshot().got == MIB
    view.release()


def test_nobody_can_cut_the_file_short(region: MemfdRegion) -> None:
    fd = os.dup(region.fd)
    for size in (MIB - PAGE, MIB + PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(region.fd)
    os.close(fd)


def test_readonly_fd_cannot_be_mapped_for_writing(region: MemfdRegion) -> None:
    region.mapping.write_bytes(0, b"bytes")
    fd = region.readonly_fd()
    assert not os.get_inheritable(fd)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, MIB, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError):
        os.pwrite(fd, b"x", 0)
    with mmap.mmap(fd, MIB, prot=mmap.PROT_READ) as mapped:
        assert mapped[:5] == b"bytes"
    os.close(fd)


def test_populating_keeps_contents_and_reports_every_step(region: MemfdRegion) -> None:
    region.mapping.write_bytes(700_000, b"kept")
    assert list(region.populate_steps(300_000)) == [303_104, 606_208, 909_312, MIB]
    assert region.mapping.read_bytes(700_000, 4) == b"kept"
    snapshot = region.snapshot()
    assert (snapshot.asked, snapshot.got, snapshot.populated) == (MIB, MIB, MIB)
    assert (snapshot.provider, snapshot.page_kind, snapshot.page_size) == ("memfd", "base", PAGE)
    assert snapshot.survives == ("engine",)
    assert os.fstat(region.fd).st_blocks * 512 == MIB
    assert list(region.populate_steps(300_000)) == []


def test_nothing_is_resident_before_populating(region: MemfdRegion) -> None:
    assert os.fstat(region.fd).st_blocks == 0
    assert region.populated == 0


def test_close_waits_for_the_step_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    made = MemfdRegion.create("pool", base_plan(MIB))
    entered, leave, closed = threading.Event(), threading.Event(), threading.Event()

    class SlowMapping:
        def populate(self, offset: int, length: int) -> str:
            entered.set()
            assert leave.wait(10)
            assert not closed.is_set()
            return "madvise"

        def close(self) -> None:
            closed.set()

    mapping = made.mapping
    monkeypatch.setattr(made, "_mapping", SlowMapping())
    worker = threading.Thread(target=lambda: list(made.populate_steps(MIB)))
    closer = threading.Thread(target=made.close)
    worker.start()
    assert entered.wait(10)
    closer.start()
    assert not closed.is_set()
    leave.set()
    worker.join(10)
    closer.join(10)
    assert closed.is_set()
    assert made.populated == MIB
    mapping.close()


def test_offsets_beyond_4_gib_without_real_memory() -> None:
    made = MemfdRegion.create("pool", base_plan(5 * GIB + PAGE))
    made.mapping.write_bytes(5 * GIB, b"far")
    made.mapping.write_bytes(GIB, b"near")  # where a 32-bit offset would land
    assert made.mapping.read_bytes(5 * GIB, 3) == b"far"
    assert made.snapshot().got == 5 * GIB + PAGE
    assert os.fstat(made.fd).st_blocks * 512 <= 64 * KIB
    made.close()


def test_killed_process_leaves_no_file_behind() -> None:
    code = (
        "import sys; from kvd.memory.preflight import PagePlan; "
        "from kvd.memory.region import MemfdRegion; "
        "r = MemfdRegion.create('pool', PagePlan(1 << 24, 'base', 4096, 1 << 24, False, '')); "
        "s = r.populate_steps(1 << 20); next(s); print('ready', flush=True); sys.stdin.read()"
    )
    before = sorted(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        during = sorted(os.listdir("/dev/shm"))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not [name for name in during if name not in before and "kvd" in name]
    assert not [name for name in os.listdir("/dev/shm") if name not in before and "kvd" in name]


def test_required_huge_pages_for_real(huge_pages: int, memfds: Memfds) -> None:
    info = read_memory_info()
    plan = check_fits("pool", huge_pages * 2 * MIB - 1, "require", info, 512 * MIB)
    made = MemfdRegion.create("pool", plan)
    assert list(made.populate_steps(MIB)) == [(step + 1) * 2 * MIB for step in range(huge_pages)]
    made.mapping.write_bytes(0, b"huge")
    snapshot = made.snapshot()
    assert (snapshot.page_kind, snapshot.page_size) == ("hugetlb", 2 * MIB)
    assert snapshot.huge == snapshot.populated == huge_pages * 2 * MIB
    pool = read_memory_info().pool_of(2 * MIB)
    assert pool is not None
    assert made.size == plan.size == snapshot.asked + 1
    made.close()
    assert memfds() == []


def test_required_huge_pages_are_refused_when_too_few(huge_pages: int) -> None:
    pool = read_memory_info().pool_of(2 * MIB)
    assert pool is not None
    need = (pool.free + 1) * 2 * MIB
    with pytest.raises(LocalError) as caught:
        make_region("pool", need, "require", 0)
    assert caught.value.code == "hugepages_short"
    assert f"echo {pool.total + 1} >" in caught.value.remedy
    made = make_region("pool", need, "prefer", 0)
    assert made.snapshot().page_size == PAGE
    assert f"echo {pool.total + 1} >" in made.snapshot().reason
    made.close()


def test_preferred_huge_pages_taken_by_somebody_else_in_between(memfds: Memfds) -> None:
    real = read_memory_info()

    def optimist() -> MemoryInfo:
        pool = HugePagePool(2 * MIB, 1 << 24, 1 << 24, None)
        return replace(real, huge_pages=(pool,), default_huge_page=2 * MIB)

    need = (1 << 20) * 2 * MIB  # more than any host that runs this can have
    with pytest.raises(LocalError) as caught:
        make_region("pool", need, "require", 0, read_info=optimist)
    assert caught.value.code == "hugepages_short"
    with pytest.raises(LocalError) as caught:
        make_region("pool", need, "prefer", 0, read_info=optimist)
    assert caught.value.code == "memory_short"
    assert memfds() == []


def test_preferred_huge_pages_gone_fall_back_to_ordinary_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = read_memory_info()

    def optimist() -> MemoryInfo:
        pool = HugePagePool(2 * MIB, 64, 64, None)
        return replace(real, huge_pages=(pool,), default_huge_page=2 * MIB)

    def no_huge_file(name: str, flags: int) -> int:
        if flags & os.MFD_HUGETLB:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return plain(name, flags)

    plain = os.memfd_create
    monkeypatch.setattr(os, "memfd_create", no_huge_file)
    made = make_region("pool", MIB + 1, "prefer", 0, read_info=optimist)
    snapshot = made.snapshot()
    assert (snapshot.page_size, snapshot.asked) == (PAGE, MIB + 1)
    assert snapshot.reason.startswith("hugepages_short: pool needs")
    made.close()
    with pytest.raises(LocalError):
        make_region("pool", MIB, "require", 0, read_info=optimist)


def test_transparent_huge_pages_are_asked_for() -> None:
    made = MemfdRegion.create("pool", replace(base_plan(4 * MIB), kind="thp"))
    smaps = Path("/proc/self/smaps").read_text()
    (part,) = smaps.split("memfd:kvd-pool")[1:]
    flags = part.partition("VmFlags:")[2].partition("\n")[0]
    assert " hg" in flags
    made.close()
