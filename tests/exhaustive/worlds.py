"""Which worlds are explored: every count of readers (0 to 4) and savers (0 to 2).

A world with everything in doubt at once grows with the power of its parties, so large worlds
bound how many holds are in doubt together; that is no loss while a transition treats each hold
alone, and the small worlds, explored to the end, show that it does.
"""

from __future__ import annotations

from functools import cache

from tests.exhaustive.alphabet import World
from tests.exhaustive.classes import ClassEdge, class_edge
from tests.exhaustive.laws import broken_laws
from tests.exhaustive.space import Edge, Walk, walk

QUICK = (
    World(0, 1, questions=2),
    World(1, 0, attempts=2, questions=2),
    World(1, 1, doubts_max=1),
    World(1, 2, doubts_max=0),
    World(2, 1, doubts_max=0),
)
"""Small enough to be tried on many versions of the code."""

MAPPED = (
    World(0, 0, questions=2),
    World(0, 1, questions=2),
    World(0, 2, questions=2),
    World(1, 0, attempts=2, questions=2),
    World(1, 1),
    World(1, 2, doubts_max=1),
    World(2, 1, doubts_max=1),
)
"""These show every edge between classes of states; the deep run checks that no other has more."""

LARGE = (
    World(1, 1, attempts=2, doubts_max=1),
    World(2, 0, attempts=2, doubts_max=1),
    World(1, 2, attempts=2, doubts_max=0),
    World(2, 0, executors=2, doubts_max=1),
    World(2, 1, attempts=2, doubts_max=0),
    World(2, 2, doubts_max=0),
    World(3, 0, doubts_max=1),
    World(3, 1, doubts_max=0),
    World(3, 2, doubts_max=0),
    World(4, 0, doubts_max=0),
    World(4, 1, doubts_max=0),
    World(4, 2, doubts_max=0),
)

DEEP = (
    World(1, 1, attempts=2),
    World(1, 2, attempts=2),
    World(2, 1, attempts=2, executors=2, doubts_max=2),
    World(2, 2, doubts_max=2),
    World(3, 2, attempts=2, doubts_max=0),
    World(4, 0, doubts_max=4),
    World(4, 1, doubts_max=2),
    World(4, 2, doubts_max=1),
    World(4, 2, attempts=2, doubts_max=0),
)
"""Explored with KVD_TEST_DEPTH from 2 on; some minutes."""


@cache
def mapped() -> tuple[tuple[Walk, ...], frozenset[ClassEdge]]:
    """Explore `MAPPED`, once in a process; what was seen, and the edges between classes."""
    edges: set[ClassEdge] = set()

    def note(edge: Edge) -> None:
        edges.add(class_edge(edge.before, edge.event, edge.after, edge.effects))

    return tuple(walk(world, note) for world in MAPPED), frozenset(edges)


@cache
def quick(world: World) -> tuple[Walk, tuple[str, ...]]:
    """Explore one of `QUICK`, once in a process; what was seen, and the laws that were broken."""
    broken: list[str] = []

    def judge(edge: Edge) -> None:
        broken.extend(f"{law}\n  {edge}" for law in broken_laws(edge))

    return walk(world, judge), tuple(broken[:3])
