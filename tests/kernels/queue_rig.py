"""What the tests of CopyQueue copy: short spans, and a copy that can be caught while it runs."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

from kvd_kernels.host import CopyQueue, Mapping

MakeRegion = Callable[..., Mapping]

SIZE = 1 << 16
LONG = 8 << 20
# The first word comes first and the last word last; what lies between is copied many times over, so
# that a test can look at a copy that has begun and not ended.
LONG_COPY = array("Q", [0, 0, 8] + [8, 8, LONG - 16] * 100 + [LONG - 8, LONG - 8, 8])
ATTEMPTS = 50  # at catching a copy that runs, however late this thread gets its turns


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def words(*values: int) -> array[int]:
    return array("I", values)


def span(dst: int, src: int, nbytes: int) -> array[int]:
    return array("Q", [dst, src, nbytes])


class LongCopy:
    """A copy that takes some 50 ms, and whether it has begun and ended."""

    def __init__(self, make_region: MakeRegion) -> None:
        self.src, self.dst = make_region(LONG, b"\1" * LONG), make_region(LONG)

    def begin(self, queue: CopyQueue) -> int:
        """Submit it; return once it has begun."""
        self.dst.store_u64(0, 0)
        self.dst.store_u64(LONG - 8, 0)
        ticket = queue.submit(self.dst, self.src, LONG_COPY)
        while not self.dst.load_u64(0):
            pass
        return ticket

    @property
    def runs(self) -> bool:
        return not self.dst.load_u64(LONG - 8)
