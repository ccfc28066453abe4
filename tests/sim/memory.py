"""Memory that knows what it holds, and copies that know what they should see.

Every row holds one integer: what it is (`token_tag`), 0 for never written, or a negative number
that no tag equals, while a copy writes it and after such a copy has failed. An `Area` is the unit
in which the product promises exclusion: one slot, one span of a pool block, one layer of a region
block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.cover import Cover
    from tests.sim.node import Node

TORN = -1


class Violation(Exception):
    """A rule was broken. `rule` names it, the text says where."""

    def __init__(self, rule: str, text: str) -> None:
        self.rule = rule
        super().__init__(f"{rule}: {text}")


@dataclass(eq=False, slots=True)
class Area:
    """Rows of memory. `touches`: (copy, first row, end row, whether it writes)."""

    name: str
    rows: list[int]
    touches: list[tuple[Copy, int, int, bool]] = field(default_factory=list)
    freed: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [source_at, source_at + count) go to [target_at, ...)."""

    source: Area
    source_at: int
    target: Area
    target_at: int
    count: int


@dataclass(eq=False, slots=True)
class Copy:
    """One copy of a DMA engine, from its start to its end.

    executor: the process whose death stops it.
    guard:    the node that must hold what `cover` says.
    seen:     what each row of the sources was at the start, piece by piece.
    doubted:  nobody keeps its sources any more; whoever copies sees that at the end.
    """

    name: str
    executor: str
    pieces: tuple[Piece, ...]
    guard: Node | None = None
    cover: Cover | None = None
    seen: list[list[int]] = field(default_factory=list)
    live: bool = False
    doubted: bool = False


def area(name: str, num_rows: int) -> Area:
    """A new area that was never written."""
    return Area(name, [0] * num_rows)


class Dma:
    """Every copy in flight. A copy that breaks a rule raises `Violation` at once."""

    def __init__(self) -> None:
        self.live: dict[Copy, None] = {}
        self.started = 0

    def start(self, copy: Copy) -> None:
        """Begin: from now until its end the copy may touch all its rows at any time."""
        for piece in copy.pieces:
            end = piece.source_at + piece.count
            self._touch(copy, piece.source, piece.source_at, end, False)
            self._touch(copy, piece.target, piece.target_at, piece.target_at + piece.count, True)
        for piece in copy.pieces:
            copy.seen.append(piece.source.rows[piece.source_at : piece.source_at + piece.count])
        for piece in copy.pieces:
            at = piece.target_at
            piece.target.rows[at : at + piece.count] = [TORN] * piece.count
        copy.live = True
        self.live[copy] = None
        self.started += 1

    def end(self, copy: Copy, ok: bool) -> None:
        """The copy has ended; when it is well it must have seen one content throughout."""
        self._drop(copy)
        if not ok or copy.doubted:
            return
        for piece, seen in zip(copy.pieces, copy.seen, strict=True):
            now = piece.source.rows[piece.source_at : piece.source_at + piece.count]
            if now != seen:
                raise Violation("one content", f"{copy.name}: {piece.source.name} changed")
            piece.target.rows[piece.target_at : piece.target_at + piece.count] = seen

    def doubt(self, copy: Copy) -> None:
        """The owner of its sources died: they may be used for something else meanwhile."""
        copy.doubted = True
        for piece in copy.pieces:
            piece.source.touches = [t for t in piece.source.touches if t[0] is not copy]

    def stop_all(self, executor: str) -> None:
        """A process died: its copies stop where they are; their targets stay torn."""
        for copy in [copy for copy in self.live if copy.executor == executor]:
            self._drop(copy)

    def _drop(self, copy: Copy) -> None:
        copy.live = False
        del self.live[copy]
        for piece in copy.pieces:
            for place in (piece.source, piece.target):
                place.touches = [touch for touch in place.touches if touch[0] is not copy]

    def _touch(self, copy: Copy, place: Area, at: int, end: int, writes: bool) -> None:
        if place.freed:
            raise Violation("memory kept", f"{copy.name} touches {place.name}, which is freed")
        for other, first, last, writing in place.touches:
            if (writes or writing) and first < end and at < last and other is not copy:
                raise Violation("both ends", f"{copy.name} meets {other.name} in {place.name}")
        place.touches.append((copy, at, end, writes))


def write(place: Area, at: int, values: Sequence[int], whole: bool, who: str) -> None:
    """A process writes rows itself. `whole`: no copy may touch any row of the area meanwhile."""
    end = at + len(values)
    for copy, first, last, _ in place.touches:
        if whole or (first < end and at < last):
            raise Violation("no write under a copy", f"{who} writes {place.name} under {copy.name}")
    place.rows[at:end] = values


def must_be_quiet(place: Area, rule: str, who: str) -> None:
    """Raise Violation when a copy touches the area."""
    if place.touches:
        raise Violation(rule, f"{who}: {place.touches[0][0].name} still touches {place.name}")


def free(place: Area, who: str) -> None:
    """Give memory back; no copy may touch it then or later."""
    must_be_quiet(place, "memory kept", who)
    place.freed = True
