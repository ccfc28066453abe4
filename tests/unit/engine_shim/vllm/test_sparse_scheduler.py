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
from engine_shim.vllm.sparse_scheduler import FAILURES_MAX, SparseScheduler

SIZE = 4
FAILED = StepReport({"r": Failure("row_missing", "no row", (1, 2))})


class Client:
    """A kvd that notes what it is told."""

    def __init__(self) -> None:
        self.state = LinkState.ATTACHED
        self.generation = 1
        self.told: list[tuple[int, int]] = []
        self.code = ""
        self.closed = 0

    def allocated(self, region: str, blocks: list[tuple[int, int]]) -> list[str]:
        """See `KvdClient`."""
        assert region == "engine-kv"
        if self.code == "region_unknown":
            raise KvdRefused(self.code, region=region)
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
    return SparseScheduler(cast(KvdClient, client), "engine-kv", SIZE, log, recompute=recompute)


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
def test_a_kvd_that_is_away_or_new_is_not_asked(generation: int) -> None:
    client = Client()
    made = side(client)
    client.generation = generation
    client.state = LinkState.LOST if generation == 1 else LinkState.ATTACHED
    assert made.order([new(0, 4, 1)], ()).shares
    assert client.told == []


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
