"""Regions for the tests of the native host module."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvd_kernels.host import Mapping

MakeRegion = Callable[..., Mapping]
MakeMemfd = Callable[..., int]


@pytest.fixture
def make_memfd() -> Iterator[MakeMemfd]:
    """Make memfds of a given size; they are closed at the end of the test."""
    with ExitStack() as stack:

        def make(size: int, flags: int = os.MFD_CLOEXEC) -> int:
            fd = os.memfd_create("test", flags)
            stack.callback(os.close, fd)
            os.ftruncate(fd, size)
            return fd

        yield make


@pytest.fixture
def make_region(make_memfd: MakeMemfd) -> MakeRegion:
    """Make a mapping of a new memfd, filled with `content` from its start."""

    def make(size: int, content: bytes = b"", *, writable: bool = True) -> Mapping:
        fd = make_memfd(size)
        os.pwrite(fd, content, 0)
        return Mapping(fd, size, writable=writable)

    return make
