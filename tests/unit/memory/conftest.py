"""Huge pages and open files, for the tests of memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.capabilities import lacking

NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
HUGE_PAGES = 8
"""Huge pages that the fixture provides: 16 MiB, so that other tests on the host find theirs."""


def _count(name: str) -> int:
    return int((POOL / name).read_text())


def _missing(detail: str) -> NoReturn:
    lacking(f"{HUGE_PAGES} huge pages ({detail})", f"echo {HUGE_PAGES} > {NR_HUGEPAGES}")


@pytest.fixture
def huge_pages() -> Iterator[int]:
    """Have some 2 MiB pages free, reserving them where allowed; yields how many."""
    if not POOL.is_dir():
        _missing("this kernel has no 2 MiB pages")
    if _count("free_hugepages") - _count("resv_hugepages") >= HUGE_PAGES:
        yield HUGE_PAGES
        return
    before = _count("nr_hugepages")
    try:
        NR_HUGEPAGES.write_text(str(before + HUGE_PAGES))
    except OSError as error:
        _missing(f"cannot reserve huge pages ({error.strerror})")
    try:
        if _count("free_hugepages") - _count("resv_hugepages") < HUGE_PAGES:
            _missing("the host has no memory for huge pages")
        yield HUGE_PAGES
    finally:
        NR_HUGEPAGES.write_text(str(max(0, _count("nr_hugepages") - HUGE_PAGES)))


@pytest.fixture
def memfds() -> Callable[[], list[str]]:
    """Give a function that lists this process's open memfds and their mappings by name."""

    def listed() -> list[str]:
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                link = os.readlink(f"/proc/self/fd/{name}")
            except FileNotFoundError:
                continue  # the fd of the listing itself
            if "memfd:kvd" in link:
                found.append(link)
        maps = Path("/proc/self/maps").read_text().splitlines()
        return found + [line for line in maps if "memfd:kvd" in line]

    return listed
