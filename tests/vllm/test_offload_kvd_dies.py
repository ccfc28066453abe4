"""kvd is killed under a running engine: the engine stays up, and its requests end or recover."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Final, Self

import pytest

from engine_shim.vllm.messages import StepOrder
from engine_shim.vllm.worker import WorkerSide
from tests.vllm import tamper
from tests.vllm.engines import Answer, Engine, assert_same, prompt
from tests.vllm.node import Node

NEW_TOKENS: Final = 6
HOW: Final = {"max_num_batched_tokens": 128}


def asked() -> list[list[int]]:
    """Requests of several chunks."""
    return [prompt(27, 500), prompt(28, 300)]


@pytest.fixture(scope="module")
def stock() -> list[Answer]:
    with Engine("llama", enable_prefix_caching=False, **HOW) as engine:
        return engine.generate(asked(), NEW_TOKENS)


class Killer:
    """Kills kvd at the begin of a step, and starts another beside the step that waits."""

    def __init__(self, node: Node, at_step: int, *, restarts: bool) -> None:
        self._node = node
        self._left = at_step
        self._restarts = restarts
        self._starter: threading.Thread | None = None
        self._over = threading.Event()

    def __call__(self, worker: WorkerSide, order: StepOrder) -> None:
        self._left -= 1
        if self._left == 0:
            self._node.stop(signal.SIGKILL)
            if self._restarts:
                self._starter = threading.Thread(target=self._start)
                self._starter.start()

    def _start(self) -> None:
        self._node.start()
        self._over.wait(120.0)  # a kvd of a test ends with the thread that started it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._starter is not None:
            self._starter.join(30.0)


@pytest.fixture(params=["none", "holder"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """A kvd whose pool ends with it, or outlives it."""
    with Node(f"pool.owner={request.param}", "pool.hold_ttl=10s") as node:
        yield node


@pytest.mark.parametrize("at_step", [2, 5, 9])
def test_rolling_requests_recover_when_kvd_comes_back(
    node: Node, at_step: int, stock: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = node.rolling(3, policy="recompute")
    with (
        Killer(node, at_step, restarts=True) as killer,
        Engine("llama", kv_transfer_config=transfer, **HOW) as engine,
    ):
        tamper.watch_steps(monkeypatch, killer)
        assert_same(engine.generate(asked(), NEW_TOKENS), stock)
        assert_same(engine.generate(asked(), NEW_TOKENS), stock)


def test_with_policy_fail_who_runs_ends_with_an_error_and_who_waits_is_served(
    node: Node, stock: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Killer(node, 3, restarts=True) as killer,
        Engine("llama", kv_transfer_config=node.rolling(3), **HOW) as engine,
    ):
        tamper.watch_steps(monkeypatch, killer)
        runs, waits = engine.generate(asked(), NEW_TOKENS)
        assert (runs.finish, runs.tokens) == ("error", ())
        assert_same([waits], stock[1:])
        assert_same(engine.generate(asked(), NEW_TOKENS), stock)


def test_a_kvd_that_stays_away_ends_them_by_the_deadline(
    stock: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Node() as node:
        killer = Killer(node, 3, restarts=False)
        transfer = node.rolling(3, policy="recompute", kvd_deadline_s=2.0)
        with Engine("llama", kv_transfer_config=transfer, **HOW) as engine:
            tamper.watch_steps(monkeypatch, killer)
            first = engine.generate(asked(), NEW_TOKENS)
            assert {answer.finish for answer in first} == {"error"}
            # New ones wait their deadline, too, and are served once kvd is back.
            assert {a.finish for a in engine.generate(asked(), NEW_TOKENS)} == {"error"}
            node.start()
            assert_same(engine.generate(asked(), NEW_TOKENS), stock)


def test_a_resident_engine_goes_on_without_kvd(
    stock: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Node() as node:
        killer = Killer(node, 3, restarts=False)
        transfer = node.transfer(offload="resident", on_unavailable="recompute")
        with Engine("llama", kv_transfer_config=transfer, **HOW) as engine:
            tamper.watch_steps(monkeypatch, killer)
            assert_same(engine.generate(asked(), NEW_TOKENS), stock)
            assert_same(engine.generate(asked(), NEW_TOKENS), stock)
            node.start()
            assert_same(engine.generate(asked(), NEW_TOKENS), stock)
