"""Breadth-first walk over every state that one slot can get into.

Time is abstracted: what matters of a deadline is whether it is past. So timers are wound back to
"far away" after every step, and a tick is tried with nothing due, with each single hold due, with
each single offer expired, and with everything due at once: since a tick treats every hold alone,
these compose to all others.

Parties of one kind differ in their names only, so states that are equal up to names are visited
once (every event with every name is tried in it all the same).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from kvd.core import slot_events as ev
from kvd.core.holds import Doubt, Hold, HoldKind, Phase
from kvd.core.ids import ReadId
from kvd.core.release import transition
from kvd.core.slot import Rules, Slot, announced
from tests.exhaustive.alphabet import HERE, World, foreign_refs, said_of
from tests.exhaustive.ledger import ENGINE, Doubted, Ledger, Party

NOW = 1_000
FAR = NOW + 10**15
PROBLEMS_MAX = 20


@dataclass(frozen=True, slots=True)
class Edge:
    """One tried event: states before and after are as the slot shows them."""

    before: Slot
    event: ev.SlotEvent
    after: Slot
    effects: tuple[ev.SlotEffect, ...]


@dataclass(slots=True)
class Walk:
    """What an exploration saw.

    states:   every state tried, up to names and timers.
    edges:    events tried that name this tenancy.
    foreign:  events tried that name another one.
    problems: broken rules, `PROBLEMS_MAX` at most.
    """

    states: list[Slot] = field(default_factory=list)
    edges: int = 0
    foreign: int = 0
    problems: list[str] = field(default_factory=list)

    def report(self, slot: Slot, event: ev.SlotEvent, why: str) -> None:
        """Note a broken rule."""
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(f"{why}\n  at    {slot}\n  event {event}")


def walk(
    world: World, seen_edge: Callable[[Edge], None] | None = None, *, by_name: bool = False
) -> Walk:
    """Try every event in every state of the world, and hold each outcome against the oracle.

    seen_edge: called with every event tried that names the tenancy.
    by_name:   visit states that differ in names only one by one.
    """
    mark = rewound if by_name else fingerprint
    result = Walk()
    todo: list[tuple[Slot, Ledger]] = list(starts(world))
    seen: set[object] = {(mark(slot), ledger.memory) for slot, ledger in todo}
    sayings = list(said_of(world, HERE))
    others = list(foreign_refs(HERE).items())[: 1 if world.is_large else None]
    foreign = [(event, why) for ref, why in others for event in said_of(world, ref)]
    while todo and len(result.problems) < PROBLEMS_MAX:
        slot, ledger = todo.pop()
        result.states.append(slot)
        for after, books in _from(slot, ledger, sayings, world.rules, result, seen_edge):
            key = (mark(after), books.memory)
            if key not in seen and _in_doubt(after) <= world.doubts_max:
                seen.add(key)
                todo.append((rewound(after), books))
        result.foreign += len(foreign)
        _check_foreign(slot, foreign, world.rules, result)
    return result


def starts(world: World) -> Iterator[tuple[Slot, Ledger]]:
    """A free slot, and slots as members announce them to a restarted kvd."""
    yield Slot(HERE), Ledger(HERE, world.rules)
    reads = tuple((read, world.reader_kvds[0]) for read in world.reads())
    for computing in (False, True):
        if not (computing or reads or world.saver_names):
            continue
        slot = announced(HERE, computing, world.saver_names, reads, NOW, world.rules)
        ledger = Ledger(HERE, world.rules)
        member = str(HERE.member)
        if computing:
            ledger.touching[ENGINE] = member
        for saver in world.saver_names:
            ledger.touching[Party(HoldKind.SAVE, saver)] = member
            ledger.saves[saver] = None
        for read, executor in reads:
            ledger.touching[Party(HoldKind.READ, read)] = executor
            ledger.doubted[Party(HoldKind.READ, read)] = Doubted()
        ledger.written = bool(reads or world.saver_names)
        yield rewound(slot), ledger


def _from(
    slot: Slot,
    ledger: Ledger,
    sayings: list[ev.SlotEvent],
    rules: Rules,
    result: Walk,
    seen_edge: Callable[[Edge], None] | None,
) -> Iterator[tuple[Slot, Ledger]]:
    """Try all events in one state; yields the states reached, of this tenancy alone."""
    for before, event, due, expired in _tries(slot, sayings):
        after, effects = transition(before, event, NOW, rules)
        result.edges += 1
        if seen_edge is not None:
            seen_edge(Edge(before, event, after, effects))
        if not ledger.is_due(event):
            if after != before or not is_refusal(effects):
                result.report(before, event, f"must be ignored, gave {effects}")
            continue
        books = ledger.copy()
        wanted = books.step(event, due, expired)
        why = _difference(effects, wanted) or "; ".join(books.mismatches(after))
        if why:
            result.report(before, event, why)
        elif after.ref == HERE:
            yield after, books


def _tries(
    slot: Slot, sayings: list[ev.SlotEvent]
) -> Iterator[tuple[Slot, ev.SlotEvent, tuple[Party, ...], tuple[ReadId, ...]]]:
    for event in sayings:
        yield slot, event, (), ()
    tick = ev.Ticked(slot.ref)
    yield slot, tick, (), ()
    if not slot.holds:
        return
    everything: list[Hold] = []
    for at, hold in enumerate(slot.holds):
        party = (Party(hold.kind, hold.owner),)
        yield _with_hold(slot, at, replace(hold, ask_at=NOW)), tick, party, ()
        yield _with_hold(slot, at, replace(hold, ask_at=NOW + 1)), tick, (), ()
        late = replace(hold, ask_at=NOW - 1, deadline=NOW)
        everything.append(late)
        if hold.phase is Phase.OFFERED:
            assert isinstance(hold.owner, ReadId)
            yield _with_hold(slot, at, late), tick, (), (hold.owner,)
    due = tuple(Party(h.kind, h.owner) for h in slot.holds if h.phase is Phase.RUNNING)
    expired = tuple(h.owner for h in slot.holds if h.phase is Phase.OFFERED)
    yield (
        replace(slot, holds=tuple(everything)),
        tick,
        due,
        tuple(owner for owner in expired if isinstance(owner, ReadId)),
    )


def _with_hold(slot: Slot, at: int, hold: Hold) -> Slot:
    return replace(slot, holds=(*slot.holds[:at], hold, *slot.holds[at + 1 :]))


def is_refusal(effects: tuple[ev.SlotEffect, ...]) -> bool:
    """Whether the only effect is to say why nothing happens."""
    return len(effects) == 1 and isinstance(effects[0], ev.Ignore) and bool(effects[0].why)


def _difference(got: tuple[ev.SlotEffect, ...], wanted: list[ev.SlotEffect]) -> str:
    if len(got) != len(wanted) or set(got) != set(wanted):
        return f"effects {got}, wanted {wanted}"
    if wanted and isinstance(wanted[-1], ev.Release) and got[-1] != wanted[-1]:
        return "something is done after the release"
    return ""


def _check_foreign(
    slot: Slot, foreign: list[tuple[ev.SlotEvent, str]], rules: Rules, result: Walk
) -> None:
    for event, why in foreign:
        after, effects = transition(slot, event, FAR, rules)
        if after is not slot or effects != (ev.Ignore(event.ref, why),):
            result.report(slot, event, f"another tenancy's event gave {effects}, wanted {why}")


def rewound(slot: Slot) -> Slot:
    """The slot with every timer wound back, and counts that nothing depends on dropped."""
    holds = tuple(
        replace(hold, deadline=FAR, ask_at=FAR, asked=_asked(hold)) for hold in slot.holds
    )
    return replace(slot, holds=holds)


def _asked(hold: Hold) -> int:
    """Only questions for the truth are counted by the rules; repeated fences are not."""
    return hold.asked if hold.doubt is Doubt.SUSPECT else 0


def fingerprint(slot: Slot) -> tuple[object, ...]:
    """What is left of a slot without the names of its parties; equal slots behave alike."""
    parts = sorted(_described(hold) for hold in slot.holds)
    return slot.ref.epoch, slot.armed, slot.saved, slot.poisoned, tuple(parts)


def _described(hold: Hold) -> tuple[str, str, str, int, int, int]:
    attempt = hold.owner.attempt if isinstance(hold.owner, ReadId) else 0
    return (
        hold.kind.value,
        hold.executor,
        hold.phase.value,
        int(hold.doubt),
        _asked(hold),
        attempt,
    )


def _in_doubt(slot: Slot) -> int:
    return sum(hold.doubt is not Doubt.NONE for hold in slot.holds)
