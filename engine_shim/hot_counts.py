"""What hot buffers tell of themselves: counts, figures, and what is wrong with their books."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine_shim.hot_lending import BufferLender
from engine_shim.hot_meter import GroupFigures, together
from engine_shim.hot_requests import HotRequest
from engine_shim.hot_residency import HotStatistics, total
from engine_shim.hot_rows import HoleError
from engine_shim.hot_types import HotFigures, HotHandle


class HotCounts:
    """Part of `HotBuffers`: its requests, and what is counted of them."""

    def __init__(self, lender: BufferLender, num_groups: int) -> None:
        self._lender = lender
        self._requests: dict[int, HotRequest] = {}
        self._past = [GroupFigures() for _ in range(num_groups)]
        self._load_failures = self._holes = 0

    def statistics(self) -> HotFigures:
        """Return the counts so far."""
        groups = self._past
        for request in self._requests.values():
            groups = list(map(together, groups, request.figures()))
        rows = total(group.rows for group in groups)
        lender = self._lender
        counts = (lender.num_free, lender.num_parked, self._load_failures, self._holes)
        return HotFigures(rows, *counts, tuple(groups))

    def rows_of(self, handle: HotHandle) -> tuple[HotStatistics, ...]:
        """Return what became of a request's rows, by group."""
        return self._find(handle).rows()

    def figures_of(self, handle: HotHandle) -> tuple[GroupFigures, ...]:
        """Return the same with times, by group."""
        return self._find(handle).figures()

    def check(self) -> list[str]:
        """Return what is wrong with any request's books; [] when nothing is."""
        return [
            f"request {request.name}: {wrong}"
            for request in self._requests.values()
            for books in request.books
            for wrong in books.check()
        ]

    def _find(self, handle: HotHandle) -> HotRequest:
        found = self._requests.get(handle.epoch)
        if found is None:
            raise ValueError(f"{handle} is closed; open the request again")
        return found

    @contextmanager
    def counting_holes(self) -> Iterator[None]:
        """Count a HoleError that passes."""
        try:
            yield
        except HoleError:
            self._holes += 1
            raise
