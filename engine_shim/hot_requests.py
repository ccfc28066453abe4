"""One request with a hot buffer: its rows, its loads, and the books of each group of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine_shim.hot_loads import RequestLoads
from engine_shim.hot_meter import GroupFigures, GroupMeter
from engine_shim.hot_residency import ABSENT, HotStatistics, Residency
from engine_shim.hot_rows import WrittenRows


@dataclass(slots=True, eq=False)
class HotRequest:
    """books: for each group; [] without a buffer. steps: for each group the rows of its step.

    past: for each group what was counted in earlier buffers. before: what the books of this one had
    counted for others. beside: for each group what native operations counted beside the books.
    meters: for each group, of its own steps.
    unread: for each group the layers of its step that have not attended: what the books say of them
    is a promise; of steps by native operations alone, see `hot_steps`.
    """

    name: str
    blocks: list[int]
    written: WrittenRows
    num_groups: int
    loads: RequestLoads = field(init=False)
    buffer: int = ABSENT
    books: list[Residency] = field(default_factory=list)
    steps: list[range] = field(default_factory=list)
    before: list[HotStatistics] = field(default_factory=list)
    past: list[HotStatistics] = field(init=False)
    beside: list[HotStatistics] = field(init=False)
    unread: list[set[int]] = field(default_factory=list)
    meters: list[GroupMeter] = field(init=False)

    def __post_init__(self) -> None:
        """Nothing was counted yet."""
        self.past = [HotStatistics() for _ in range(self.num_groups)]
        self.beside = list(self.past)
        self.meters = [GroupMeter() for _ in range(self.num_groups)]

    def take(self, buffer: int, books: list[Residency]) -> None:
        """Take a buffer over; nothing of whoever had it before stays in its books."""
        for one in books:
            one.reset()
        self.buffer, self.books = buffer, books
        self.before = [one.statistics() for one in books]
        self.steps = [range(0) for _ in books]
        self.unread = [set() for _ in books]

    def give_up(self) -> None:
        """Be without a buffer; what was counted stays."""
        self.past = list(self.rows())
        self.beside = [HotStatistics() for _ in self.past]
        self.buffer, self.books, self.steps, self.unread = ABSENT, [], [], []

    def rows(self) -> tuple[HotStatistics, ...]:
        """What became of its rows, by group."""
        past = [one + beside for one, beside in zip(self.past, self.beside, strict=True)]
        if not self.books:
            return tuple(past)
        kept = zip(past, self.books, self.before, strict=True)
        return tuple(one + (books.statistics() - before) for one, books, before in kept)

    def figures(self) -> tuple[GroupFigures, ...]:
        """The same with times, by group."""
        return tuple(
            meter.figures(rows) for meter, rows in zip(self.meters, self.rows(), strict=True)
        )

    def require(
        self,
        layers: Sequence[int],
        group: int,
        given: Sequence[Sequence[int]],
        every_row: bool,
    ) -> None:
        """Check that what is selected can be read: the step's own rows in the first layer of the
        group, where they are written already, all others in every layer.

        every_row: look at each row, not at the last one alone. Raises: HoleError.
        """
        first, *others = layers
        own = self.steps[group].start
        if every_row:
            wanted = sorted({it for positions in given for it in positions if it >= 0})
        else:
            # The last one is enough: the watermarks of all layers reach `own` since begin_step.
            last = max((max(positions, default=-1) for positions in given), default=-1)
            wanted = [last] if last >= 0 else []
        self.written.require(first, wanted)
        for layer in others:
            self.written.require(layer, [it for it in wanted if it < own])
