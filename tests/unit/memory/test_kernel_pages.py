"""Locked regions: kept from the swap space, or refused with the limit that forbids it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.core.units import KIB, MIB
from kvd.memory.region import MemfdRegion, make_region

ROOT = Path(__file__).parents[3]

# Without the right to lock more than the limit says; what is refused is printed.
REFUSED = """
import os, resource
from kvd.core.errors import LocalError
from kvd.memory.region import make_region
from tests.unit.memory.powers import IPC_LOCK, give_up
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
give_up(IPC_LOCK)
try:
    make_region("pool", 1 << 20, "off", 0, lock=True)
except LocalError as error:
    print(error)
    print([name for name in os.listdir("/proc/self/fd")
           if os.path.exists(f"/proc/self/fd/{name}")
           and "memfd:kvd" in os.readlink(f"/proc/self/fd/{name}")])
"""


def locked_kib(region: MemfdRegion) -> int:
    """What the kernel has locked of a region's mapping."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith(f"{region.mapping.address:x}-"):
            inside = True
        elif inside and line.startswith("Locked:"):
            return int(line.split()[1])
    raise AssertionError("smaps does not list the region")


def test_limit_that_is_too_low_is_named_and_nothing_is_left() -> None:
    done = subprocess.run(
        (sys.executable, "-c", REFUSED), cwd=ROOT, capture_output=True, text=True, check=True
    )
    said, left = done.stdout.splitlines()
    assert said == (
        "memory_short: pool needs 1MiB of locked memory but only 64KiB is available (ulimit -l). "
        "Set LimitMEMLOCK=infinity in the unit (or ulimit -l), or pool.lock = false."
    )
    assert left == "[]"


def test_pages_are_locked_as_they_are_populated(memfds: Callable[[], list[str]]) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    size = MIB if os.geteuid() == 0 or soft == resource.RLIM_INFINITY else 16 * KIB
    region = make_region("pool", size, "off", 0, lock=True)
    assert locked_kib(region) == 0
    list(region.populate_steps(size))
    assert locked_kib(region) == size // KIB
    assert region.snapshot().locked
    region.close()
    assert memfds() == []


@pytest.mark.usefixtures("huge_pages")
def test_huge_pages_count_as_locked() -> None:
    region = make_region("pool", 2 * MIB, "require", 0, lock=True)
    assert region.planned_snapshot().locked
    region.close()


def test_regions_are_not_locked_unless_asked() -> None:
    region = make_region("pool", MIB, "off", 0)
    list(region.populate_steps(MIB))
    assert (locked_kib(region), region.snapshot().locked) == (0, False)
    region.close()
