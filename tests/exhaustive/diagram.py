"""Make `docs/release-states.md` from the exploration: `python -m tests.exhaustive.diagram`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.exhaustive.classes import MEANINGS, ClassEdge, StateClass
from tests.exhaustive.worlds import MAPPED, mapped

DOCUMENT = Path(__file__).parents[2] / "docs" / "release-states.md"
LABEL_EVENTS = 2

HEAD = """\
# States of a slot

Made by `python -m tests.exhaustive.diagram` from every event in every reachable state of
`kvd.core.release`; a test compares. Change the rule, then make it anew.

A slot stores no state, only *holds*: named parties that may still touch its memory. What people
call its state is what the holds amount to:

| state | meaning |
|---|---|
"""

DIAGRAM = """
## What leads from one to another

Events that leave the state as it is are not drawn. Where more than two events lead the same way,
the table below names them. Time (`Ticked`) leads to *free* only where nothing but offers was left:
a read that was never granted touches nothing.

```mermaid
stateDiagram-v2
    [*] --> free
"""

TABLE = """
## Every event in every state

`-> x, y`: acted on, and the slot is then x or y (it may hold other parties still). What is in
parentheses is the reason with which the event is ignored when it does not fit the holds: nothing
changes then. An event of another epoch or incarnation is always ignored (`stale_epoch`,
`future_epoch`, `stale_incarnation`).

"""

COUNTS = """
## How it was explored

Time is abstracted: a deadline is past or not. States that differ in names only count once.
`tests/exhaustive/worlds.py` lists further worlds, with up to 4 readers and 2 savers.

| world | states | events tried |
|---|---|---|
"""


def render() -> str:
    """The whole document."""
    walks, edges = mapped()
    parts = [HEAD]
    parts += [f"| {state.value} | {MEANINGS[state]} |\n" for state in StateClass]
    parts += [DIAGRAM, *_arrows(edges), "```\n", TABLE, *_table(edges), COUNTS]
    parts += [
        f"| {world} | {len(walk.states)} | {walk.edges} |\n"
        for world, walk in zip(MAPPED, walks, strict=True)
    ]
    states = sum(len(walk.states) for walk in walks)
    parts.append(f"| together | {states} | {sum(walk.edges for walk in walks)} |\n")
    return "".join(parts)


def _arrows(edges: Iterable[ClassEdge]) -> Iterable[str]:
    events: dict[tuple[StateClass, StateClass], set[str]] = defaultdict(set)
    for edge in edges:
        if edge.before is not edge.after:
            events[edge.before, edge.after].add(edge.event)
    order = list(StateClass)
    for before, after in sorted(events, key=lambda pair: [order.index(state) for state in pair]):
        names = sorted(events[before, after])
        more = len(names) - LABEL_EVENTS
        label = ", ".join(names[:LABEL_EVENTS]) + (f" and {more} more" if more > 0 else "")
        yield f"    {before.value} --> {after.value}: {label}\n"


def _table(edges: Iterable[ClassEdge]) -> Iterable[str]:
    cells: dict[tuple[str, StateClass], list[ClassEdge]] = defaultdict(list)
    for edge in edges:
        cells[edge.event, edge.before].append(edge)
    yield "| event | " + " | ".join(state.value for state in StateClass) + " |\n"
    yield "|---" * (len(StateClass) + 1) + "|\n"
    for event in sorted({event for event, _ in cells}):
        row = [_cell(cells[event, state]) for state in StateClass]
        yield f"| {event} | " + " | ".join(row) + " |\n"


def _cell(edges: list[ClassEdge]) -> str:
    after = {edge.after for edge in edges if not edge.ignored}
    reasons = sorted(edge.ignored for edge in edges if edge.ignored)
    words = []
    if after:
        words.append("-> " + ", ".join(state.value for state in StateClass if state in after))
    if reasons:
        words.append("(" + ", ".join(reasons) + ")")
    return " ".join(words)


def main() -> None:
    """Write the document."""
    DOCUMENT.write_text(render(), encoding="utf-8")
    print(f"wrote {DOCUMENT}")


if __name__ == "__main__":
    main()
