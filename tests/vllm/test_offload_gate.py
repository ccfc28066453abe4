"""A buffer is written only when its last occupant has left it, however late that is."""

from __future__ import annotations

from typing import Final

import pytest

from engine_shim.client.slots import RUNNING, SAVE, UNKNOWN, SlotBooks
from engine_shim.testing import Delay, Lose, Rule
from tests.vllm import tamper
from tests.vllm.engines import Answer, Engine, assert_same, difference, prompt
from tests.vllm.node import Node

MS: Final = 1_000_000
NEW_TOKENS: Final = 8
HOW: Final = {"max_num_batched_tokens": 256}
LATE: Final = (
    Rule(Delay(4 * MS), stream="save", kind="copy"),
    Rule(Delay(3 * MS), stream="save", kind="host"),
    Rule(Delay(2 * MS), stream="load", kind="copy"),
)
"""Every save, the news of its end (and so the release), and every load come late."""


def asked() -> list[list[int]]:
    """Two requests of several chunks."""
    return [prompt(7, 600), prompt(8, 333)]


@pytest.fixture(scope="module")
def stock() -> list[Answer]:
    with Engine("llama", enable_prefix_caching=False, **HOW) as engine:
        return engine.generate(asked(), NEW_TOKENS)


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_late_saves_loads_and_releases_change_nothing(
    stock: list[Answer], buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper.faulty_device(monkeypatch, LATE)
    with (
        Node() as node,
        Engine("llama", kv_transfer_config=node.rolling(buffers), **HOW) as engine,
    ):
        assert_same(engine.generate(asked(), NEW_TOKENS), stock)
        assert_same(engine.generate(asked(), NEW_TOKENS), stock)


def test_a_gate_in_the_wrong_hook_would_be_seen(
    stock: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper.faulty_device(monkeypatch, LATE)
    tamper.gate_in_the_wrong_hook(monkeypatch)
    with Node() as node, Engine("llama", kv_transfer_config=node.rolling(2), **HOW) as engine:
        got = engine.generate(asked(), NEW_TOKENS)
    assert any(difference(one, other, 5) for one, other in zip(got, stock, strict=True))


IMPATIENT: Final = ("release.save_deadline=300ms", "release.query_interval=50ms")


def lose_a_save(patch: pytest.MonkeyPatch) -> None:
    """The news of one save never comes, and the engine does not know what became of it."""
    tamper.faulty_device(patch, [Rule(Lose(), stream="save", kind="host", nth=8)])
    truth = SlotBooks.truth

    def unknown(books: SlotBooks, slot: int, epoch: int, kind: str, owner: str) -> str:
        found = truth(books, slot, epoch, kind, owner)
        return UNKNOWN if kind == SAVE and found == RUNNING else found

    patch.setattr(SlotBooks, "truth", unknown)


def test_a_buffer_that_stays_taken_is_replaced_by_a_spare(
    stock: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_a_save(monkeypatch)
    with (
        Node(*IMPATIENT) as node,
        Engine("llama", kv_transfer_config=node.rolling(2, policy="recompute"), **HOW) as engine,
    ):
        assert_same(engine.generate(asked(), NEW_TOKENS), stock)
        assert_same(engine.generate(asked(), NEW_TOKENS), stock)
        (seen,) = node.engines()
        assert seen["slots"]["quarantined"] == 1


def test_without_a_spare_requests_end_with_an_error(
    stock: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_a_save(monkeypatch)
    with Node(*IMPATIENT) as node:
        transfer = node.rolling(2, policy="recompute", spare_buffers=0)
        with Engine("llama", kv_transfer_config=transfer, **HOW) as engine:
            assert {a.finish for a in engine.generate(asked(), NEW_TOKENS)} == {"error"}
