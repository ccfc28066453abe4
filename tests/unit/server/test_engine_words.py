"""What engines say of themselves, in the tables and the status: whose word counts."""

from __future__ import annotations

from kvd.core import events as ev
from kvd.core.ids import MemberRef
from kvd.server.models import EngineSummary, Status
from kvd.server.models_tables import EngineView
from kvd.server.node_view import SessionInfo
from kvd.server.sliced import run_now
from kvd.server.views import Watch, status
from kvd.server.views_tables import EngineQuery, engine_page
from tests.unit.server.fake_node import WALL, FakeNode, ref


def says(who: MemberRef, store: str = "", **about: str) -> SessionInfo:
    """The session of a member that says this of itself."""
    return SessionInfo("member", str(who), 100, 1000, 0, 0, store, about)


def shown(node: FakeNode) -> tuple[EngineView, EngineSummary]:
    """The only engine, as both documents have it."""
    (engine,) = run_now(engine_page(node, EngineQuery())).items
    (summary,) = run_now(status(node, Watch(), WALL)).engines
    assert (summary.store, summary.about) == (engine.store, engine.about)
    return engine, summary


def test_an_engine_that_says_nothing() -> None:
    node = FakeNode()
    who = node.join()
    engine, _ = shown(node)
    assert (engine.store, engine.about) == ("", {})  # without a session
    node.the_sessions = [says(who, "local")]
    engine, _ = shown(node)
    assert (engine.store, engine.about, engine.members[0].store) == ("local", {}, "local")


def test_the_word_of_the_scheduler_counts_and_workers_complete_it() -> None:
    node = FakeNode()
    first = node.join(ref("e0", "a"), scheduler=False)
    chief = node.join(ref("e0", "b"), scheduler=True)
    last = node.join(ref("e0", "c"), scheduler=False)
    node.the_sessions = [
        says(first, "fast", offload="off", ring="4 slots"),
        says(chief, "local", model="m", offload="rolling"),
        says(last, "slow", ring="5 slots", why="asked"),
        says(ref("e1", "b"), "other", model="not of this engine"),
    ]
    engine, _ = shown(node)
    assert engine.store == "local"
    assert list(engine.about.items()) == [
        ("model", "m"),
        ("offload", "rolling"),
        ("ring", "4 slots"),
        ("why", "asked"),
    ]
    assert [member.store for member in engine.members] == ["fast", "local", "slow"]
    assert engine.members[0].about == {"offload": "off", "ring": "4 slots"}


def test_an_engine_without_its_scheduler_is_what_its_workers_say() -> None:
    node = FakeNode()
    who = node.join(scheduler=False)
    node.the_sessions = [says(who, "local", offload="rolling")]
    assert shown(node)[0].about == {"offload": "rolling"}


def test_all_members_together_say_no_more_than_one_may() -> None:
    node = FakeNode()
    members = [node.join(ref("e0", f"w{number}")) for number in range(3)]
    node.the_sessions = [
        says(who, **{f"k{number}-{at}": "x" for number in range(16)})
        for at, who in enumerate(members)
    ]
    engine, _ = shown(node)
    assert list(engine.about) == [f"k{number}-0" for number in range(16)]


def test_a_life_that_has_ended_says_nothing_any_more() -> None:
    node = FakeNode()
    old = node.join(ref(incarnation=1))
    node.the_sessions = [says(old, "local", offload="rolling")]
    node.handle(ev.MemberDied(old))
    node.join(ref(incarnation=2))
    assert shown(node)[0].about == {}


def test_an_older_kvd_does_not_know_what_engines_say() -> None:
    """A newer kvctl reads its documents."""
    node = FakeNode()
    node.join()
    document = run_now(status(node, Watch(), WALL)).model_dump()
    for engine in document["engines"]:
        del engine["store"], engine["about"]
    assert Status.model_validate(document).engines[0].about == {}
