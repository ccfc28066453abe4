"""Every event in every reachable state of one slot, held against oracles that know only the rules.

Worlds have 0 to 4 readers and 0 to 2 savers. KVD_TEST_DEPTH=2 (or more) adds the large ones.
"""

from __future__ import annotations

import pytest

from kvd.core.holds import Phase
from kvd.core.slot import Slot
from tests.exhaustive.alphabet import HERE, World
from tests.exhaustive.classes import ClassEdge, class_edge
from tests.exhaustive.depth import depth
from tests.exhaustive.drain import ticks_until_free
from tests.exhaustive.space import Edge, Walk, walk
from tests.exhaustive.worlds import DEEP, LARGE, MAPPED, QUICK, mapped, quick

EXPLORED = (*LARGE, *(DEEP if depth() > 1 else ()))


def _explain(result: Walk) -> str:
    return "\n\n".join(result.problems[:3])


@pytest.mark.slow
@pytest.mark.parametrize("world", MAPPED, ids=str)
def test_every_event_in_every_state_does_what_the_rules_say(world: World) -> None:
    result = mapped()[0][MAPPED.index(world)]
    assert not result.problems, _explain(result)


@pytest.mark.slow
@pytest.mark.parametrize("world", EXPLORED, ids=str)
def test_many_parties_are_no_different(world: World) -> None:
    """The rules hold; and, in a deeper run, nothing happens that the document does not show."""
    edges: set[ClassEdge] = set()

    def note(edge: Edge) -> None:
        edges.add(class_edge(edge.before, edge.event, edge.after, edge.effects))

    result = walk(world, note if depth() > 1 else None)
    assert not result.problems, _explain(result)
    assert edges <= mapped()[1]


@pytest.mark.slow
@pytest.mark.parametrize("world", QUICK, ids=str)
def test_no_single_transition_breaks_a_law(world: World) -> None:
    result, broken = quick(world)
    assert not broken, broken[0]
    assert not result.problems, _explain(result)


@pytest.mark.slow
@pytest.mark.parametrize("losses", [0, 1, 3])
@pytest.mark.parametrize("world", QUICK, ids=str)
def test_lost_questions_keep_no_slot_shut(world: World, losses: int) -> None:
    """From every state: a question or fence that gets lost is asked again until it is answered."""
    ticks_max = 2 * (losses + 1) + 2
    for slot in quick(world)[0].states:
        took = ticks_until_free(slot, world.rules, losses=losses, ticks_max=ticks_max)
        assert took is not None, f"still held after {ticks_max} ticks: {slot}"


@pytest.mark.slow
def test_states_up_to_names_are_enough() -> None:
    """Visiting states that differ in names only one by one finds more states and nothing new."""
    world = World(2, 1, doubts_max=0)
    folded, unfolded = walk(world), walk(world, by_name=True)
    assert not unfolded.problems, _explain(unfolded)
    assert len(unfolded.states) > len(folded.states)


@pytest.mark.slow
def test_all_doubt_levels_and_both_attempts_are_reached() -> None:
    seen = {_level(slot) for world in QUICK for slot in quick(world)[0].states}
    assert seen >= {"free", "offered", "none", "suspect", "fencing", "quarantined", "again"}


def _level(slot: Slot) -> str:
    if slot.is_free:
        return "free"
    worst = max(slot.holds, key=lambda hold: hold.doubt)
    if getattr(worst.owner, "attempt", 0):
        return "again"
    if worst.phase is Phase.OFFERED or any(hold.phase is Phase.OFFERED for hold in slot.holds):
        return "offered"
    return worst.doubt.name.lower()


@pytest.mark.slow
def test_how_much_was_explored(capsys: pytest.CaptureFixture[str]) -> None:
    walks = mapped()[0]
    states = sum(len(result.states) for result in walks)
    edges = sum(result.edges for result in walks)
    foreign = sum(result.foreign for result in walks)
    with capsys.disabled():
        print(
            f"\nslot space: {states} states, {edges} events of the tenancy, "
            f"{foreign} of other tenancies, in {len(walks)} worlds from {HERE}"
        )
    assert states > 2_000
    assert edges > 200_000
