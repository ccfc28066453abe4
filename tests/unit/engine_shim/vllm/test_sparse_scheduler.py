"""The scheduler's side of sparse decode offload: who gets blocks anew, who has ended or failed."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import cast

import pytest

from engine_shim.client import KvdClient, KvdRefused
from engine_shim.client.session import LinkState
from engine_shim.vllm.messages import Failure, SparseShare, StepReport
from engine_shim.vllm.shares import Scheduled
from engine_shim.vllm.sparse_scheduler import FAILURES_MAX, NULL_BLOCK, SparseScheduler

SIZE = 4
FAILED = StepReport({"r": Failure("row_missing", "no row", (1, 2))})


class Client:
    """A kvd that notes what it is told."""

    def __init__(self) -> None:
        self.state = LinkState.ATTACHED
        self.generation = 1
        self.told: list[tuple[int, int]] = []
        self.code = self.refusal = ""
        self.closed = 0

    def allocated(
        self, region: str, blocks: list[tuple[int, int]], deadline_s: float | None = None
    ) -> list[str]:
        """See `KvdClient`."""
        assert region == "engine-kv"
        if self.refusal or self.code == "region_unknown":
            raise KvdRefused(self.refusal or self.code, region=region)
        self.told.extend(blocks)
        return [self.code] * len(blocks)

    def goodbye(self, deadline_s: float) -> None:
        """See `KvdClient`."""
        raise KvdRefused("unreachable", path="p", detail="away")

    def close(self) -> None:
        """See `KvdClient`."""
        self.closed += 1


def side(client: Client, *, recompute: bool = False) -> SparseScheduler:
    """A scheduler's side."""
    log = logging.getLogger("kvd-test")
    return SparseScheduler(
        cast(KvdClient, client), "engine-kv", SIZE, log, deadline_s=60.0, recompute=recompute
    )


def new(start: int, tokens: int, *blocks: int) -> Scheduled:
    """A request that is admitted with so many tokens known."""
    return Scheduled("r", start, tokens, blocks, replaces=True)


def test_blocks_of_a_prefix_hit_are_not_given_out_anew() -> None:
    client = Client()
    made = side(client)
    order = made.order([new(8, 5, 3, 4, 6, 7)], ())
    assert order.shares == (SparseShare("r", 8, 13, (3, 4, 6, 7), replaces=True, fresh=2),)
    assert client.told == [(6, 1), (7, 1)]
    order = made.order([Scheduled("r", 13, 4, (6,), replaces=False)], ())
    assert order.shares == (SparseShare("r", 13, 17, (6,), replaces=False, fresh=1),)
    assert client.told[2:] == [(6, 2)], "each use of a block has a generation"
    made.order([Scheduled("r", 17, 1, (), replaces=False)], ())
    assert len(client.told) == 3, "kvd is not asked when there is nothing to say"


@pytest.mark.parametrize("generation", [1, 2])
def test_a_kvd_that_is_away_is_not_asked(generation: int) -> None:
    client = Client()
    made = side(client)
    client.generation = generation
    client.state = LinkState.LOST
    assert made.order([new(0, 4, 1)], ()).shares
    assert made.matched_tokens("r") == 0, "the rows that are mapped serve on"
    assert client.told == []


def test_a_kvd_that_took_the_region_over_is_told_as_ever() -> None:
    client = Client()
    made = side(client)
    client.generation = 2
    assert made.order([new(0, 4, 1)], ()).region == 0
    assert client.told == [(NULL_BLOCK, 1), (1, 1)]
    made.order([new(0, 4, 2)], ())
    assert client.told[2:] == [(2, 1)], "it is asked for the region once in its life"


def test_a_lost_region_begins_another_life_and_who_is_new_waits_for_it() -> None:
    client = Client()
    made = side(client)
    forgotten: list[int] = []
    made.forget_prefixes = lambda: forgotten.append(made.order([], ()).region)
    client.generation, client.code = 2, "region_unknown"
    assert made.matched_tokens("r") is None
    assert forgotten == [1], "prefixes go before a request can find them, once in a life"
    assert made.order([new(0, 4, 1)], ()).region == 1
    assert made.matched_tokens("r") is None
    client.code = ""
    assert made.matched_tokens("r") == 0
    assert client.told == [(NULL_BLOCK, 5)], "of blocks without rows nothing had to be said"
    assert made.order([new(0, 4, 2)], ()).region == 1
    assert client.told[1:] == [(2, 1)]
    assert made.take_ends() == {}


def test_each_life_of_kvd_can_lose_it_once() -> None:
    client = Client()
    made = side(client)
    client.code = "region_unknown"
    for generation, life in ((1, 0), (2, 1), (2, 1), (4, 2)):
        client.generation = generation
        assert made.order([], ()).region == life
    client.state = LinkState.LOST
    assert made.matched_tokens("r") is None, "it was not made anew before kvd went away again"
    client.state, client.generation, client.code = LinkState.ATTACHED, 5, ""
    assert made.matched_tokens("r") == 0


@pytest.mark.parametrize("code", ["deadline_exceeded", "busy", "unreachable"])
def test_a_kvd_that_does_not_say_whether_it_has_the_region_is_asked_again(code: str) -> None:
    client = Client()
    made = side(client)
    client.generation, client.refusal = 2, code
    assert made.order([], ()).region == 0
    client.refusal, client.code = "", "region_unknown"
    assert made.order([], ()).region == 1


def test_who_waits_for_a_lost_region_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("engine_shim.vllm.sparse_scheduler.time.monotonic", lambda: now[0])
    client = Client()
    made = side(client)
    client.generation, client.code = 2, "region_unknown"
    assert made.matched_tokens("r") is None
    now[0] += 59.0
    assert made.matched_tokens("r") is None
    assert made.take_ends() == {}
    now[0] += 2.0
    assert made.matched_tokens("r") is None
    assert {request: end.code for request, end in made.take_ends().items()} == {"r": "pool_lost"}
    made.finished(SimpleNamespace(request_id="r"))
    assert made.matched_tokens("r") is None
    assert made.take_ends() == {}, "another request of that name has a deadline of its own"


@pytest.mark.parametrize("code", ["destination_busy", "region_unknown"])
def test_what_kvd_refuses_is_said(code: str, caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    client.code = code
    assert side(client).order([new(0, 4, 1)], ()).shares
    assert code in caplog.text


def test_the_ended_and_the_preempted_are_forgotten_once() -> None:
    made = side(Client())
    made.finished(SimpleNamespace(request_id="a"))
    assert made.order([], ["b"]).forget == ("a", "b")
    assert made.order([], ()).forget == ()


def test_a_failed_request_ends_by_the_engine_s_policy() -> None:
    made = side(Client())
    made.reported(FAILED)
    assert made.restart_points({"r": 7, "other": 3}) == {"r": 7}
    assert made.restart_points({"r": 7}) == {}, "a failure counts once"
    made.reported(FAILED)
    assert made.restart_points({}) == {}, "it has ended already"
    made.reported(None)
    assert made.take_ends() == {}


def test_a_failed_request_is_computed_again_but_not_for_ever() -> None:
    made = side(Client(), recompute=True)
    for _ in range(FAILURES_MAX):
        made.reported(FAILED)
        assert made.restart_points({"r": 7}) == {"r": 0}
        assert made.take_ends() == {}
    made.reported(FAILED)
    assert made.restart_points({"r": 7}) == {"r": 7}
    assert list(made.take_ends()) == ["r"]
    made.finished(SimpleNamespace(request_id="r"))
    made.reported(FAILED)
    assert made.restart_points({"r": 7}) == {"r": 0}, "another request of that name begins anew"


def test_the_end_does_not_need_kvd() -> None:
    client = Client()
    side(client).close()
    assert client.closed == 1
