"""The scheduler's side under a stub of vLLM's scheduler: what is found, and who waits or ends."""

from __future__ import annotations

import pytest

from engine_shim.vllm import scheduler
from engine_shim.vllm.options import ConnectorOptions
from tests.unit.engine_shim.vllm.stub_fixture import (
    MODES,
    OTHER,
    TEXT,
    Make,
    assert_all_let_go,
    make,
)

__all__ = ["make"]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [3, 8, 64])
@pytest.mark.parametrize("mode", MODES)
def test_a_request_goes_through_and_is_found_again(
    make: Make, mode: str, chunk: int, depth: int
) -> None:
    engine = make(mode, chunk=chunk, depth=depth)
    for name in ("a", "b"):
        engine.add(name, TEXT)
        engine.run()
        assert engine.all[name].error == ""
    assert engine.hits == {"a": [0], "b": [(len(TEXT) - 2) // 4 * 4]}
    assert_all_let_go(engine)


@pytest.mark.parametrize("mode", MODES)
def test_outputs_are_found_too(make: Make, mode: str) -> None:
    engine = make(mode)
    engine.add("a", TEXT, outputs=12)
    engine.run()
    engine.add("b", TEXT + " and more")
    engine.run()
    assert engine.hits["b"] == [len(TEXT[:-1]) // 4 * 4]


@pytest.mark.parametrize("mode", MODES)
def test_hits_across_two_engines_with_finer_hashes(make: Make, mode: str) -> None:
    one = make(mode)
    one.add("a", TEXT)
    one.run()
    other = make(mode, kvd=one.kvd, per_block=2)
    other.worker.pool = one.worker.pool
    other.add("a-of-the-other", TEXT[:20] + "something else")
    other.run()
    assert other.hits == {"a-of-the-other": [20]}


@pytest.mark.parametrize("mode", MODES)
def test_the_last_block_before_a_draft_layer_is_not_trusted(make: Make, mode: str) -> None:
    """Its draft row depends on the token behind it, which is another one here."""
    engine = make(mode, drafts=1)
    engine.add("a", TEXT)
    engine.run()
    engine.add("b", TEXT[:20] + "something else")
    engine.step()
    assert len(engine.kvd.pinned) == len(engine.orders[-1].requests[0].pool_blocks)
    engine.run()
    assert engine.hits["b"] == [16]
    assert_all_let_go(engine)


# Pressure -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_requests_come_back(make: Make, mode: str, depth: int) -> None:
    engine = make(mode, blocks=14, pool=40, depth=depth)
    engine.add("a", TEXT, outputs=20)
    engine.add("b", OTHER, outputs=20)
    engine.run()
    assert engine.preempted, "the device has no room for both"
    assert {request.error for request in engine.all.values()} == {""}
    assert_all_let_go(engine)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_request_lets_those_who_run_have_the_pool(make: Make, depth: int) -> None:
    """The pool has a block for each of the device's: what is preempted must not keep any."""
    engine = make("rolling", blocks=14, pool=14, depth=depth)
    engine.add("a", TEXT, outputs=20)
    engine.add("b", OTHER, outputs=20)
    engine.run()
    assert engine.preempted
    assert {request.error for request in engine.all.values()} == {""}
    assert_all_let_go(engine)


def test_a_full_pool_lets_a_request_wait_and_it_is_served_later(make: Make) -> None:
    engine = make("rolling", pool=12, blocks=12)
    engine.kvd.reserve("another engine's", 11)
    request = engine.add("a", TEXT)
    for _ in range(3):
        engine.step()
        engine.side._refused_at.clear()
        assert engine.side.matched_tokens(request, 0) is None
    assert engine.kvd.known == {"another engine's"}, "who waits keeps nothing"
    engine.kvd.unpin("another engine's")
    engine.run()
    assert request.error == ""


def test_waiting_has_an_end(make: Make) -> None:
    engine = make("rolling", options=ConnectorOptions(deadline_s=1e-9))
    engine.kvd.reserve("another engine's", 40)
    engine.add("a", TEXT)
    engine.run()
    assert engine.all["a"].error == "pool_full"
    assert engine.kvd.known == {"another engine's"}


def test_a_running_request_without_blocks_ends_alone(make: Make) -> None:
    engine = make("rolling", pool=16)
    engine.add("a", TEXT[:12], outputs=8)
    engine.add("b", OTHER)
    engine.step()
    engine.step()
    taken = engine.kvd.machine.state.pool
    assert taken is not None
    engine.kvd.reserve("another engine's", len(taken.blocks.free))
    engine.run()
    assert engine.all["a"].error == ""
    assert engine.all["b"].error == "pool_full"
    assert engine.kvd.known == {"another engine's"}


def test_resident_requests_go_on_without_room_in_the_pool(make: Make) -> None:
    engine = make("resident", pool=12)
    engine.kvd.reserve("another engine's", 12)
    engine.add("a", TEXT)
    engine.run()
    assert engine.all["a"].error == ""
    assert engine.kvd.known == {"another engine's"}


# kvd is away ----------------------------------------------------------------------------------


def test_rolling_waits_for_a_kvd_that_is_away(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "PAUSE_S", 60.0)  # longer than two steps on any machine
    engine = make("rolling")
    engine.kvd.is_away = True
    engine.add("a", TEXT)
    engine.step()
    engine.step()
    assert not engine.running
    assert engine.kvd.retries == 1, "a refused request is not asked for at once"
    engine.kvd.is_away = False
    monkeypatch.setattr(scheduler, "PAUSE_S", 0.0)
    engine.run()
    assert engine.all["a"].error == ""


@pytest.mark.parametrize("mode", MODES)
def test_away_for_too_long_ends_the_request(make: Make, mode: str) -> None:
    engine = make(mode, options=ConnectorOptions(deadline_s=1e-9))
    engine.kvd.is_away = True
    engine.add("a", TEXT)
    engine.run()
    assert engine.all["a"].error == "unreachable"


def test_resident_computes_without_kvd_when_it_may(make: Make) -> None:
    engine = make("resident", options=ConnectorOptions(on_unavailable="recompute"))
    engine.kvd.is_away = True
    engine.add("a", TEXT, outputs=10)
    engine.run()
    assert engine.all["a"].error == ""
    assert not engine.kvd.known


def test_a_running_resident_request_goes_on_when_kvd_goes_away(make: Make) -> None:
    engine = make("resident")
    engine.add("a", TEXT, outputs=20)
    engine.step()
    engine.kvd.is_away = True
    engine.run()
    assert engine.all["a"].error == ""


@pytest.mark.parametrize("mode", MODES)
def test_a_look_up_before_kvd_went_away_is_not_kept_for_ever(make: Make, mode: str) -> None:
    """It was found, the device had no room, and kvd refused the next look-up."""
    engine = make(mode, blocks=12, options=ConnectorOptions(on_unavailable="recompute"))
    engine.add("a", TEXT)
    engine.run()
    engine.free.clear()
    engine.add("b", TEXT)
    engine.step()
    assert engine.kvd.known == {"b"}
    engine.kvd.is_away = True
    engine.step()
    engine.kvd.is_away = False
    engine.free.extend(range(1, 13))
    engine.run()
    assert engine.all["b"].error == ""
    assert_all_let_go(engine)


@pytest.mark.parametrize("mode", MODES)
def test_a_kvd_with_another_pool_is_looked_up_again(make: Make, mode: str) -> None:
    engine = make(mode)
    engine.add("a", TEXT, outputs=10)
    engine.step()
    engine.kvd.lose_pool()
    engine.run()
    assert engine.all["a"].error == ""


# Ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", range(8))
def test_an_abort_at_any_moment_leaves_nothing(
    make: Make, mode: str, depth: int, steps: int
) -> None:
    engine = make(mode, depth=depth, blocks=14, pool=14)
    engine.add("a", TEXT, outputs=10)
    engine.add("b", OTHER, outputs=10)
    for _ in range(steps):
        engine.step()
    engine.abort("a")
    engine.run()
    assert engine.all["b"].error == ""
    assert_all_let_go(engine)


def test_an_end_is_told_only_when_the_step_has_been_reported(make: Make) -> None:
    """A step is under way: ranks may yet announce saves into the request's blocks."""
    engine = make("rolling", depth=3)
    engine.add("a", TEXT)
    engine.step()
    engine.step()
    engine.abort("a")
    assert engine.kvd.known == {"a"}
    engine.hear()
    assert engine.kvd.known == {"a"}
    engine.hear()
    assert not engine.kvd.known


@pytest.mark.parametrize("mode", MODES)
def test_a_refused_commit_at_the_end_keeps_nothing(make: Make, mode: str) -> None:
    engine = make(mode)
    engine.add("a", TEXT, outputs=6)
    for _ in range(2):
        engine.step()
    tracked = engine.side._requests["a"]
    assert tracked.pooled is not None
    pool = engine.kvd.machine.state.pool
    assert pool is not None
    pool.blocks.poison(tracked.pooled.blocks[-1])
    engine.abort("a")
    assert_all_let_go(engine)


@pytest.mark.parametrize("mode", MODES)
def test_an_end_that_kvd_did_not_hear_is_told_again(make: Make, mode: str) -> None:
    """Its link was broken, not its pool: it keeps every pin until it hears of the end."""
    engine = make(mode)
    engine.add("a", TEXT)
    engine.step()
    engine.kvd.is_away = True
    engine.abort("a")
    assert engine.kvd.known == {"a"}
    engine.step()
    engine.kvd.is_away = False
    engine.step()
    assert_all_let_go(engine)
